"""The row-invariance law on the second family: dense attention over all pages, plain residual."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch

from layers.arena_double import Arena, Sequence, fork, step
from layers.configs import KIMI
from layers.schedules import cuts, in_company, in_parts, text, whole
from merestone.models.kimi_config import KimiLinearConfig
from merestone.models.kimi_linear import KimiLinear
from merestone.models.tiny_weights import draw

CONFIG = KIMI
CASES = {
    "fp32": (CONFIG, torch.float32),
    "bf16": (CONFIG, torch.bfloat16),
    "nothing shared": (dataclasses.replace(CONFIG, qk_rope_head_dim=0), torch.float32),
}


def build(config: KimiLinearConfig, dtype: torch.dtype = torch.float32) -> KimiLinear:
    return KimiLinear(config, dict(draw(config, 0)), dtype)


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


@pytest.mark.parametrize("case", CASES)
def test_token_by_token(case: str) -> None:
    model = build(*CASES[case])
    ids = text(150, 2)
    expected = whole(model, ids)
    assert torch.equal(in_parts(model, ids, [1] * 150), expected)
    assert torch.equal(in_parts(model, ids, [61] + [1] * 9 + [80], 1), expected)


@each_pool
@pytest.mark.parametrize("case", ["fp32", "bf16"])
def test_batch_mates_do_not_matter(case: str) -> None:
    model = build(*CASES[case])
    texts = [text(n, 10 + n) for n in (1, 5, 63, 64, 65, 130, 200, 260)]
    for ids, got in zip(texts, in_company(model, texts), strict=True):
        assert torch.equal(got, whole(model, ids))


def test_forks_share_pages_and_keep_their_bits() -> None:
    model = build(CONFIG)
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


def test_a_wrong_head_changes_the_output() -> None:
    """Power: with the same last 64 tokens, eight other heads give eight other rows."""
    model = build(CONFIG)
    tail = text(64, 7)
    right = model.logits(whole(model, text(130, 8) + tail)[-1:])
    for seed in range(8):
        wrong = model.logits(whole(model, text(130, 20 + seed) + tail)[-1:])
        assert (wrong - right).abs().max() > 1e-3


def test_every_part_of_a_cached_row_counts() -> None:
    """The part of a key that heads share changes scores; it is no value."""
    model = build(CONFIG)
    ids = text(100, 9)
    arenas = [Arena(model.fields(), 64, seed=0) for _ in range(2)]
    outs = []
    for change, arena in zip((False, True), arenas, strict=True):
        sequence = Sequence(ids)
        step(model, arena, [(sequence, 99)])
        if change:
            rows = arena.rows(2, "latent")
            assert rows.shape[-1] == 32 + 8
            rows[sequence.pages["full"][0], 5, 32:] += 10.0
        outs += step(model, arena, [(sequence, 1)])
    assert not torch.equal(*outs)
