# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Drawing a token on the device: temperature, cuts, and noise that depends on nothing but its key.

Knows one row at a time. Must not know requests. The definition is that of `merestone.ops.sampler`:
the argmax of the cut scores plus Gumbel noise keyed by (seed, choice, position), ties to the lowest
id. The noise is another stream (Philox 4x32 in fp32), so a device has its own tokens, always the
same ones. A program takes one row, so that its sums have one order.

Cuts keep a prefix of the ids sorted by (score, id). A score is at most 0, so the bits of its
absolute value, as an integer, sort like the score; a prefix is a greatest such integer and how many
of its equals belong to it, found bit by bit.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from merestone.ops.triton.launch import aligned, power_of_two
from merestone.sched.plan import SamplingParams

_BLOCK = 4096
_WORD = 1 << 64


@triton.jit
def _depths(x, start, top, temperature, WIDTH, BLOCK: tl.constexpr):
    """Columns, scores and the integers that sort them, of the block at ``start``."""
    column = start + tl.arange(0, BLOCK)
    inside = column < WIDTH
    score = (tl.load(x + column, mask=inside, other=float("-inf")) - top) / temperature
    # A temperature near zero makes -inf of what is below the best, never NaN.
    score = tl.where(inside, tl.minimum(score, 0.0), float("-inf"))
    return column, inside, score, tl.abs(score).to(tl.int32, bitcast=True)


@triton.jit
def _mass(x, top, temperature, deepest, WIDTH, BLOCK: tl.constexpr, WEIGHTED: tl.constexpr):
    """How many scores, or what weight, is no deeper than ``deepest``: fp32."""
    total = tl.zeros((), tl.float32)
    for start in range(0, WIDTH, BLOCK):
        _, inside, score, depth = _depths(x, start, top, temperature, WIDTH, BLOCK)
        kept = inside & (depth <= deepest)
        if WEIGHTED:
            total += tl.sum(tl.where(kept, tl.exp(score), 0.0), 0)
        else:
            total += tl.sum(kept.to(tl.float32), 0)
    return total


@triton.jit
def _reach(x, top, temperature, wanted, WIDTH, BLOCK: tl.constexpr, WEIGHTED: tl.constexpr):
    """The least depth down to which there is at least ``wanted``, and what lies above it."""
    deepest = tl.zeros((), tl.int32)
    for i in range(31):
        step = tl.full((), 1, tl.int32) << (30 - i)
        within = _mass(x, top, temperature, deepest + step - 1, WIDTH, BLOCK, WEIGHTED)
        deepest += tl.where(within < wanted, step, 0)
    above = _mass(x, top, temperature, deepest - 1, WIDTH, BLOCK, WEIGHTED)
    return deepest, above


@triton.jit
def _exponential(seed, column, position, choice):
    """Standard exponential noise of each id, with full relative precision near zero."""
    word, _, _, _ = tl.philox(seed, column, position, choice, 0)
    uniform = tl.minimum(word.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532e-10, 0.99999994)
    series = uniform * (1.0 + uniform * (0.5 + uniform * 0.33333334))
    return tl.where(uniform < 0.0039, series, -tl.log(1.0 - uniform))


@triton.jit
def _draw(
    logits, rows, keys, cuts, out, logits_row, INFINITE, WIDTH, BLOCK: tl.constexpr
):  # fmt: skip
    """Grid: (rows drawn)."""
    row = tl.program_id(0)
    x = logits + tl.load(rows + row).to(tl.int64) * logits_row
    seed, position = tl.load(keys + row * 3), tl.load(keys + row * 3 + 1).to(tl.int32)
    choice = tl.load(keys + row * 3 + 2).to(tl.int32)
    temperature, top_k = tl.load(cuts + row * 4), tl.load(cuts + row * 4 + 1)
    top_p, least = tl.load(cuts + row * 4 + 2), tl.load(cuts + row * 4 + 3)
    top = tl.full((), float("-inf"), tl.float32)
    for start in range(0, WIDTH, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(x + column, mask=column < WIDTH, other=float("-inf"))
        top = tl.maximum(top, tl.max(value, 0))
    # Everything, until a cut says less.
    deepest, equals = tl.full((), INFINITE, tl.int32), tl.full((), WIDTH, tl.int32)
    total = tl.zeros((), tl.float32)
    if top_k > 0.0:
        deepest, above = _reach(x, top, temperature, top_k, WIDTH, BLOCK, False)
        equals = (top_k - above).to(tl.int32)
    if top_p < 1.0:
        weight = tl.exp(-deepest.to(tl.float32, bitcast=True))
        total = _mass(x, top, temperature, deepest - 1, WIDTH, BLOCK, True)
        total += tl.where(weight > 0.0, weight * equals.to(tl.float32), 0.0)
        nucleus, above = _reach(x, top, temperature, top_p * total, WIDTH, BLOCK, True)
        weight = tl.exp(-nucleus.to(tl.float32, bitcast=True))
        wanted = tl.ceil((top_p * total - above) / weight)
        count = tl.minimum(tl.maximum(wanted, 1.0), 1.0e9).to(tl.int32)
        equals = tl.where(nucleus == deepest, tl.minimum(equals, count), count)
        equals = tl.where(nucleus > deepest, WIDTH, equals)
        deepest = tl.minimum(deepest, nucleus)
    # The floor keeps all of its equals.
    floor = least.to(tl.int32, bitcast=True)
    equals = tl.where(floor < deepest, WIDTH, equals)
    deepest = tl.minimum(deepest, floor)
    best, chosen = tl.full((), float("-inf"), tl.float32), tl.zeros((), tl.int32)
    seen = tl.zeros((), tl.int32)
    for start in range(0, WIDTH, BLOCK):
        column, inside, score, depth = _depths(x, start, top, temperature, WIDTH, BLOCK)
        equal = (inside & (depth == deepest)).to(tl.int32)
        kept = inside & (depth < deepest)
        kept |= (equal > 0) & (seen + tl.cumsum(equal, 0) <= equals)
        seen += tl.sum(equal, 0)
        noise = -tl.log(_exponential(seed, column, position, choice))
        value = tl.where(kept, score + noise, float("-inf"))
        here = tl.max(value, 0)
        first = tl.min(tl.where(value == here, column, WIDTH), 0)
        chosen = tl.where(here > best, first, chosen)
        best = tl.maximum(best, here)
    tl.store(out + row, chosen)


@dataclass(frozen=True, slots=True)
class Draws:
    """Which rows are drawn from and how, on the host: ``rows`` [n] int32 of the logits, ``keys``
    [n, 3] int64 (seed, position, choice), ``cuts`` [n, 4] fp32 (temperature, top k or 0, top p,
    the absolute score of the floor)."""

    rows: Tensor
    keys: Tensor
    cuts: Tensor


def draws(wanted: list[tuple[int, SamplingParams, int, int]], width: int) -> Draws:
    """``wanted``: (row of logits, how, position, choice) of each token; temperatures above 0, no
    penalties, biases or bans. ``width``: of a row."""
    keys, cuts = [], []
    for _, params, position, choice in wanted:
        assert params.temperature > 0.0
        word = params.seed % _WORD
        keys.append((word - _WORD if word >= _WORD // 2 else word, position, choice))
        floor = torch.tensor(params.min_p).log().neg().item() if params.min_p > 0 else float("inf")
        top_k = params.top_k if 0 < params.top_k < width else 0
        cuts.append((params.temperature, float(top_k), params.top_p, max(floor, 0.0)))
    return Draws(
        torch.tensor([row for row, *_ in wanted], dtype=torch.int32),
        torch.tensor(keys, dtype=torch.int64),
        torch.tensor(cuts, dtype=torch.float32),
    )


def draw(logits: Tensor, wanted: Draws) -> Tensor:
    """A token for each of ``wanted``, of logits [M, V] fp32 on the device: [n] int32. Of a row with
    values that are not finite the token says nothing."""
    device, width = logits.device, logits.shape[1]
    assert logits.is_contiguous()
    rows, keys, cuts = (
        (t.pin_memory() if device.type == "cuda" else t).to(device, non_blocking=True)
        for t in (wanted.rows, wanted.keys, wanted.cuts)
    )
    out = torch.empty(rows.shape[0], dtype=torch.int32, device=device)
    aligned(logits)
    if rows.shape[0]:
        _draw[(rows.shape[0],)](
            logits, rows, keys, cuts, out, logits.stride(0), _INFINITE, width,
            BLOCK=min(_BLOCK, power_of_two(width)), num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip
    return out


_INFINITE = 0x7F800000
"""The depth of -inf: no score is deeper."""
