"""Addresses beyond 31 bits: frames, slots and rows whose first element is further than 2^31 from
where their memory begins have the bits of near ones. Only the pages that are touched exist, so an
address that is cut to 31 bits ends the process, or is another frame."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from test_triton_kda import Machine, rows
from torch import Tensor

from merestone.ops.triton import attention, attention_wide
from merestone.ops.triton.attention import Keys, attend, items
from merestone.ops.triton.attention_wide import attend_wide
from merestone.ops.triton.block import Context, attend_block
from merestone.ops.triton.gemm import linear
from merestone.ops.triton.index import pool_scores, write_pools
from merestone.ops.triton.judge import bad_anchors, best
from merestone.ops.triton.kda_inputs import Raw, kda_inputs
from merestone.ops.triton.latents import write_latents
from merestone.ops.triton.norms import rms_norm, swiglu
from merestone.ops.triton.pages import read_rows, write_ring, write_rows, write_tail
from merestone.ops.triton.rows import Cells, Sequences

FRAME = 1 << 20
"""Elements of a frame, fp32."""
NEAR, FAR = 1, 2100
PAGE, WIDTH = 16, 32


@pytest.fixture(scope="module")
def memory() -> Tensor:
    """[FAR + 1, FRAME]: 8.8 GB of addresses."""
    assert FAR * FRAME > 1 << 31
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.empty(FAR + 1, FRAME, device=device)
    except RuntimeError as error:
        if "allocate" not in str(error):
            raise
        pytest.skip("needs 8.8 GB of addresses")


def ints(*values: int, device: str) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def pages(memory: Tensor, width: int, offset: int = 0, page: int = PAGE) -> Tensor:
    return memory.as_strided((FAR + 1, page, width), (FRAME, width, 1), offset)


def both(run: Callable[[int], Tensor | tuple[Tensor, ...]]) -> None:
    """Of a near frame and of a far one the same."""
    near, far = (run(frame) for frame in (NEAR, FAR))
    pairs = ((near, far),) if isinstance(near, Tensor) else zip(near, far, strict=True)
    for one, other in pairs:
        assert one.isfinite().all()
        assert torch.equal(one, other)


def test_rows_that_are_kept(draw, device: str, memory: Tensor) -> None:
    x, weight = draw(5, WIDTH), draw(24)
    sequence, position = ints(*[0] * 5, device=device), ints(*range(5), device=device)
    view = pages(memory, WIDTH)

    def kept(frame: int) -> tuple[Tensor, ...]:
        table = ints(frame, device=device)[None]
        write_rows(x, view, table, sequence, position)
        found = read_rows(view, table, sequence, position)
        assert torch.equal(found, view[frame, :5])
        write_latents(x, weight, 1e-5, view, table, sequence, position)
        return found, view[frame, :5].clone()

    both(kept)

    def ringed(slot: int) -> Tensor:
        ring = memory.view(FAR + 1, 128, -1)
        new = draw(1, 1).new_ones(3, ring.shape[2])
        write_ring(new, ring, sequence[:3], position[:3], ints(slot, device=device), sequence[:1])
        return ring[slot, :3].clone()

    both(ringed)


def test_anchors(draw, device: str, memory: Tensor) -> None:
    """Tails that are written, what convolutions read of them, and states that are judged."""
    taps, heads, dim = 4, 2, 16
    width = heads * dim
    widths = 3 * width, width, heads
    raw = Raw(*(draw(9, n) for n in widths))
    fixed = draw(taps, 3 * width), draw(width), draw(heads).exp()
    starts = 0, 4096, 8192
    views = Raw(*(pages(memory, n, at) for n, at in zip(widths, starts, strict=True)))
    cells = [[0, 16384 + 3 * width * i] for i in range(taps - 1)]
    tail = Cells(memory, torch.tensor(cells, device=device))
    position, sequence = ints(*range(16, 25), device=device), ints(*[0] * 9, device=device)
    zero, at = ints(0, device=device), ints(16, device=device)

    def passed(frame: int) -> tuple[Tensor, ...]:
        own = ints(frame, device=device)[None]
        begun = Sequences(zero, zero, zero, own, own)
        whole = torch.cat([raw.r, raw.r])[: PAGE + 1]
        write_tail(whole, views.r, tail, begun, at, own)
        step = Sequences(at, zero, at, torch.cat([own, own], 1), own)
        found = kda_inputs(
            raw, views, tail, *fixed, sequence, position, step, eps=1e-6, lowest=-5.0, floor=zero
        )
        kept = (view[frame, :9].clone() for view in (views.r, views.gate, views.beta))
        return (*found, *kept)

    both(passed)
    bad = ints(5, device=device)
    for frame in (NEAR, FAR):
        for value, wanted in ((1.0, 0), (float("nan"), 1)):
            memory[frame, :256] = value
            states = Cells(memory, torch.zeros(1, 2, dtype=torch.int64, device=device))
            bad_anchors(states, 256, ints(frame, device=device)[None], bad)
            assert bad.tolist() == [wanted]


@pytest.mark.usefixtures("ordered_dot")
def test_states(draw, device: str, memory: Tensor) -> None:
    """A pass that starts at an anchor and moves it on, from frame to frame."""
    one = rows(draw, 40)

    def moved(anchor: int) -> tuple[Tensor, ...]:
        machine = Machine(device)
        machine.memory = memory
        machine.step([(one, 0, 0, 32, 0, 32, (0, anchor // 2))])
        [out] = machine.step([(one, 1, 32, 40, 32, 0, (anchor // 2, 0))])
        return out, machine.anchor(anchor // 2)

    near, far = moved(2), moved(FAR - 2)
    for x, y in zip(near, far, strict=True):
        assert torch.equal(x, y)


@pytest.mark.usefixtures("ordered_dot")
def test_keys(draw, device: str, memory: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, value in (
        (attention, "TILE", 16), (attention, "SPAN", 32), (attention_wide, "ROWS", 16),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)
    view, latents, q = pages(memory, WIDTH), draw(PAGE, WIDTH), draw(2, 4, WIDTH)
    seen = ints(9, 16, device=device)
    every = torch.arange(PAGE, dtype=torch.int32, device=device).repeat(2, 1)
    lone = [(0, 0, 1), (0, 1, 1)]

    def attended(frame: int) -> tuple[Tensor, ...]:
        view[frame] = latents
        keys = Keys(view, ints(frame, device=device)[None])
        found: list[Tensor] = []
        for split in (True, False):
            for selection in (None, every):
                work = items(lone, 4, 16).to(device)
                found += attend(
                    q, keys, work, seen, 0.3, longest=PAGE, split=split, height=16,
                    selection=selection,
                )  # fmt: skip
        work = items([(0, 0, 2)], 4, 16).to(device)
        return (*found, *attend_wide(q, keys, work, seen, 0.3, longest=PAGE))

    both(attended)


@pytest.mark.usefixtures("ordered_dot")
def test_pools_and_windows(draw, device: str, memory: Tensor) -> None:
    dim, size, heads = 16, 4, 4
    keys, gates, positions = draw(6, dim), draw(6, dim), draw(size, dim)
    raw, more = pages(memory, dim), pages(memory, dim, 4096)
    pools = pages(memory, dim, 8192, PAGE // size)
    zero, first = ints(0, device=device), ints(2, device=device)
    q, weights = draw(1, heads, dim), draw(1, heads)

    def pooled(frame: int) -> tuple[Tensor, ...]:
        own = ints(frame, device=device)[None]
        raw[frame, :2], more[frame, :2] = keys[:2], gates[:2]
        step = Sequences(first, zero, zero, own, zero[None] - 1)
        new = keys[2:].contiguous(), gates[2:].contiguous()
        write_pools(*new, raw, more, positions, pools, own, zero, zero, step)
        found = pool_scores(q, weights, pools, own, zero, zero + 1, longest=1)
        return pools[frame, 0].clone(), found

    both(pooled)
    shape, stride = (FAR + 1, 64, 2, dim), (FRAME, 2 * dim, dim, 1)
    kept = [memory.as_strided(shape, stride, at) for at in (0, 4096)]
    old, block, query = draw(2, 30, 2, dim), draw(2, 3, 2 * dim), draw(3, 4, dim)

    def windowed(frame: int) -> tuple[Tensor, ...]:
        for view, values in zip(kept, old, strict=True):
            view[frame, :30] = values
        where = Context(ints(30, device=device), 3, *kept, ints(frame, device=device)[None],
                        20, 16, 64)  # fmt: skip
        return tuple(attend_block(query, *block, where, 0.3, split=s) for s in (True, False))

    both(windowed)


@pytest.mark.gpu
def test_rows(device: str) -> None:
    """Rows of a step, of an output head and of experts' widths, the last of them alone."""
    bf16 = torch.bfloat16
    for count, k, n in ((530_000, 4096, 64), (16_384, 256, 154_880)):
        x, w = torch.randn(count, k, dtype=bf16, device=device), torch.randn(n, k, device=device)
        w = (w * k**-0.5).to(bf16)
        assert max(x.numel(), count * n) > 1 << 31
        assert torch.equal(linear(x, w)[-3:], linear(x[-3:], w))
    logits = linear(x, w, out_dtype=torch.float32)
    ids, bad = torch.zeros(2, count, dtype=torch.int32, device=device)
    best(logits, ids, bad)
    assert torch.equal(ids[-5:].long(), logits[-5:].argmax(1))
    del logits
    x = torch.randn(530_000, 4096, dtype=bf16, device=device)
    weight = x[0].clone()
    assert torch.equal(rms_norm(x, weight, 1e-5)[-3:], rms_norm(x[-3:], weight, 1e-5))
    assert torch.equal(swiglu(x, 1.0)[-3:], swiglu(x[-3:], 1.0))
