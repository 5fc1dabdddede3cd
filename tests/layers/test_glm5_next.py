"""The row-invariance law on the whole model: equal bits, whatever the schedule."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from layers.arena_double import Arena, Sequence, fork, step
from layers.configs import GLM
from layers.schedules import cuts, in_company, in_parts, text, whole
from merestone.models.config import Glm5NextConfig
from merestone.models.glm5_next import Glm5Next
from merestone.models.tiny_weights import draw

CONFIG = GLM
DENSE = dataclasses.replace(CONFIG, index_topk=512)
SOFTPLUS = dataclasses.replace(CONFIG, gate_lower_bound=None)
ADJACENT = dataclasses.replace(
    CONFIG,
    layer_types=("kda", "kda", "kda", "mla", "mla"),
    indexer_types=("full", "full", "full", "full", "shared"),
)
CASES = {
    "dense": (DENSE, torch.float32),
    "sparse": (CONFIG, torch.float32),
    "softplus": (SOFTPLUS, torch.float32),
    "shared": (ADJACENT, torch.float32),
    "bf16": (CONFIG, torch.bfloat16),
}


def build(config: Glm5NextConfig, dtype: torch.dtype = torch.float32, seed: int = 0) -> Glm5Next:
    shared = [i for i, kind in enumerate(config.indexer_types) if kind == "shared"]
    without = tuple(f"layers.{i}.self_attn.indexer." for i in shared)
    tensors = {name: w for name, w in draw(config, seed) if not name.startswith(without)}
    return Glm5Next(config, tensors, dtype)


@pytest.fixture(autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """The size of the thread pool: 1 unless the test asks for another."""
    before = torch.get_num_threads()
    count: int = getattr(request, "param", 1)
    torch.set_num_threads(count)
    yield count
    torch.set_num_threads(before)


each_pool = pytest.mark.parametrize("threads", [1, 2], indirect=True, ids=["1 thread", "2 threads"])


@each_pool
@pytest.mark.parametrize("case", CASES)
def test_any_split_has_the_bits_of_one_pass(case: str) -> None:
    model = build(*CASES[case])
    ids = text(300, 1)
    expected = whole(model, ids)
    assert torch.isfinite(expected).all()
    for seed, most in ((1, 150), (2, 40)):
        assert torch.equal(in_parts(model, ids, cuts(300, most, seed), seed), expected)


@pytest.mark.parametrize("case", ["dense", "sparse", "bf16"])
def test_token_by_token(case: str) -> None:
    model = build(*CASES[case])
    ids = text(150, 2)
    expected = whole(model, ids)
    assert torch.equal(in_parts(model, ids, [1] * 150), expected)
    assert torch.equal(in_parts(model, ids, [61] + [1] * 9 + [80], 1), expected)


@each_pool
@pytest.mark.parametrize("case", ["dense", "sparse", "bf16"])
def test_batch_mates_do_not_matter(case: str) -> None:
    """Ragged sequences in one arena, in changing company and order."""
    model = build(*CASES[case])
    texts = [text(n, 10 + n) for n in (1, 5, 63, 64, 65, 130, 200, 260)]
    for ids, got in zip(texts, in_company(model, texts), strict=True):
        assert torch.equal(got, whole(model, ids))


def test_forks_share_pages_and_keep_their_bits() -> None:
    """Two continuations from one boundary inside a page, a pool and a chunk, while the parent goes
    on filling the shared page."""
    model = build(*CASES["sparse"])
    head = text(150, 4)
    texts = [head + text(60, 5 + i) for i in range(3)]
    arena = Arena(model.fields(), 200)
    parent = Sequence(texts[0])
    step(model, arena, [(parent, 70)])
    step(model, arena, [(parent, 80)])
    children = [fork(parent, ids) for ids in texts[1:]]
    outs = [step(model, arena, [(parent, 60)])[0]]
    outs += step(model, arena, [(child, 60) for child in children])
    for ids, out in zip(texts, outs, strict=True):
        assert torch.equal(out, whole(model, ids)[150:])


def test_rejected_rows_are_truncations() -> None:
    """Rows computed for tokens that are then replaced leave no trace."""
    model = build(*CASES["sparse"])
    ids = text(200, 6)
    expected = whole(model, ids)
    arena = Arena(model.fields(), 64)
    sequence = Sequence(ids)
    out = step(model, arena, [(sequence, 120)])
    while sequence.length < 180:
        at = sequence.length
        # Two right tokens, three wrong ones; the anchor waits for what is accepted.
        sequence.ids = ids[: at + 2] + text(3, at) + ids[at + 5 :]
        rows = step(model, arena, [(sequence, 5)], [True])[0]
        out.append(rows[:2])
        sequence.ids, sequence.length = ids, at + 2
    out += step(model, arena, [(sequence, 200 - sequence.length)])
    assert torch.equal(torch.cat(out), expected)


def test_a_wrong_head_changes_the_output() -> None:
    """Power: with the same last 64 tokens, eight other heads give eight other rows."""
    for config in (CONFIG, DENSE):
        model = build(config)
        tail = text(64, 7)
        right = model.logits(whole(model, text(130, 8) + tail)[-1:])
        for seed in range(8):
            wrong = model.logits(whole(model, text(130, 20 + seed) + tail)[-1:])
            assert (wrong - right).abs().max() > 1e-3


def test_a_broken_state_stays_in_its_sequence() -> None:
    """NaN in one sequence's anchor reaches its own rows alone, through router and index as well."""
    model = build(CONFIG)
    texts = [text(150, seed) for seed in (40, 41, 42)]
    arena = Arena(model.fields(), 64)
    sequences = [Sequence(ids) for ids in texts]
    step(model, arena, [(s, 100) for s in sequences])
    frame = sequences[1].anchor_frame
    assert frame is not None
    arena.rows(0, "state")[frame] = float("nan")
    outs = step(model, arena, [(s, 50) for s in sequences])
    assert outs[1].isnan().any()
    for i in (0, 2):
        assert torch.equal(outs[i], whole(model, texts[i])[100:])


# What a step may dispatch. Not here, because their bits depend on place, size or threads: sigmoid,
# silu, softplus, rsqrt, softmax, matmul, einsum, addmm, addcmul.
ALLOWED = {
    # Data and views.
    "_local_scalar_dense", "alias", "arange", "cat", "chunk", "clone", "contiguous", "copy_",
    "detach_", "diagonal", "empty", "empty_like", "expand", "flatten", "gather", "index",
    "index_put_", "index_select", "item", "lift_fresh", "new_empty", "new_full", "new_zeros",
    "pad", "permute", "repeat_interleave", "reshape", "resolve_conj", "resolve_neg", "select",
    "slice", "split", "split_with_sizes", "stack", "t", "to", "transpose", "unfold",
    "unsqueeze", "view", "zeros",
    # Integers, comparisons, exact values.
    "__and__", "__or__", "abs", "amax", "any", "bincount", "bitwise_not", "clamp", "clamp_",
    "cumsum", "eq", "floor_divide", "ge", "gt", "isnan", "le", "lt", "masked_fill",
    "masked_fill_", "max", "min", "neg", "nonzero", "remainder", "sort", "topk",
    # Rounded once, elementwise.
    "add", "add_", "div", "div_", "exp", "exp_", "log1p_", "mul", "mul_", "reciprocal_",
    "rsub", "sqrt_", "sub",
    # Products, solves and sums over a last dimension, as their modules check them.
    "bmm", "linalg_solve_triangular", "mean", "mm", "sum",
}  # fmt: skip


class Dispatched(TorchDispatchMode):
    """Collects the names of the ATen operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("case", CASES)
def test_a_step_dispatches_only_named_operators(case: str) -> None:
    model = build(*CASES[case])
    seen = Dispatched()
    # The first use of a shape draws random numbers for its check.
    for watch in (nullcontext(), seen):
        arena = Arena(model.fields(), 64)
        sequences = [Sequence(text(150, seed)) for seed in (1, 2)]
        with watch:
            for count in (100, 1):
                step(model, arena, [(s, count) for s in sequences])
    assert seen.names - ALLOWED == set()


def test_logits_are_row_invariant() -> None:
    model = build(CONFIG)
    hidden = whole(model, text(70, 9))
    logits = model.logits(hidden)
    assert logits.dtype == torch.float32
    for rows in (slice(0, 1), slice(5, 22), slice(69, 70)):
        assert torch.equal(model.logits(hidden[rows]), logits[rows])


def test_refuses_a_shared_index_after_kda() -> None:
    config = dataclasses.replace(CONFIG, indexer_types=("full", "full", "shared", "full", "full"))
    with pytest.raises(ValueError, match="layer 2 shares"):
        build(config)


def test_refuses_expert_groups() -> None:
    with pytest.raises(ValueError, match="n_group is 2"):
        build(dataclasses.replace(CONFIG, n_group=2))
