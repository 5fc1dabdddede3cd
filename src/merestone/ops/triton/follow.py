# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Choosing the tokens of a proposal on the device: among candidates, each given the one before it,
and with the noise that the target will add.

Knows scores and the keys of noise. Must not know drafters. Definitions:
:meth:`merestone.spec.dflash.DFlashDrafter._choose` and, for the noise, `merestone.ops.triton.draw`,
without cuts: a draft outside of them is merely rejected. Where drafts are accepted by their
chances, it is written down what each was drawn from.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from merestone.ops.triton.draw import _exponential
from merestone.ops.triton.index import choose
from merestone.ops.triton.launch import aligned, blocks, power_of_two

_BLOCK = 2048


@dataclass(frozen=True, slots=True)
class Noise:
    """The keys of the noise of S sequences, on the device: ``seeds`` [S] int64; ``positions`` [S]
    int32 of the newest tokens, the first draft being for the next; ``choices`` [S] int32;
    ``temperatures`` [S] fp32, 0 for none."""

    seeds: Tensor
    positions: Tensor
    choices: Tensor
    temperatures: Tensor

    def __post_init__(self) -> None:
        assert self.seeds.dtype == torch.int64
        assert self.positions.dtype == self.choices.dtype == torch.int32
        assert self.temperatures.dtype == torch.float32


@dataclass(frozen=True, slots=True)
class Odds:
    """What drafts are drawn from, a row for each: ``candidates`` [n, C] int32 and their ``scores``
    [n, C] fp32, the greatest of a row 0. Divided by the temperature, their softmax is the chance of
    each. Of logits that are no numbers neither says anything: then a draft was certain."""

    candidates: Tensor
    scores: Tensor

    def __post_init__(self) -> None:
        assert self.candidates.shape == self.scores.shape
        assert self.candidates.is_contiguous()
        assert self.scores.is_contiguous()
        assert self.candidates.dtype == torch.int32
        assert self.scores.dtype == torch.float32

    def rows(self, first: int, count: int) -> "Odds":
        """Those of ``count`` drafts from the ``first`` on."""
        own = slice(first, first + count)
        return Odds(self.candidates[own], self.scores[own])


@triton.jit
def _noisy(score, column, seed, position, choice, temperature):
    """A score as it is compared: divided by the temperature, with noise, if there is one."""
    noise = -tl.log(_exponential(seed, column, position, choice))
    return tl.where(temperature > 0.0, score / tl.maximum(temperature, 1e-30) + noise, score)


@triton.jit
def _pick(
    score, id, inside, seed, position, choice, temperature, VOCAB,
    kept_ids, kept_scores, KEEP: tl.constexpr,
):  # fmt: skip
    """The best candidate, with its noise. KEEP: leave all of them, with scores that say in fp32
    what they were drawn with."""
    if KEEP:
        score -= tl.max(tl.where(inside, score, float("-inf")), 0)
        tl.store(kept_ids, id, mask=inside)
        tl.store(kept_scores, score, mask=inside)
    score = _noisy(score, id, seed, position, choice, temperature)
    score = tl.where(inside, score, float("-inf"))
    return tl.min(tl.where(score == tl.max(score, 0), id, VOCAB - 1), 0)


@triton.jit
def _follow(
    logits, candidates, projected, before, after, newest, seeds, positions, choices, temperatures,
    out, kept_ids, kept_scores, logits_row, VOCAB,
    DEPTH: tl.constexpr, COUNT: tl.constexpr, PADDED: tl.constexpr, RANK: tl.constexpr,
    WIDE: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Grid: (sequences)."""
    sequence = tl.program_id(0).to(tl.int64)
    token = tl.load(newest + sequence).to(tl.int64)
    seed, choice = tl.load(seeds + sequence), tl.load(choices + sequence)
    position, temperature = tl.load(positions + sequence), tl.load(temperatures + sequence)
    i, k = tl.arange(0, PADDED), tl.arange(0, WIDE)
    for place in range(DEPTH):
        row = sequence * DEPTH + place
        # Of logits that are no numbers any id will do for a draft.
        id = tl.maximum(tl.load(candidates + row * COUNT + i, mask=i < COUNT, other=0), 0)
        score = tl.load(logits + row * logits_row + id)
        left = tl.load(before + token * RANK + k, mask=k < RANK, other=0.0).to(tl.float32)
        left *= tl.load(projected + row * RANK + k, mask=k < RANK, other=0.0).to(tl.float32)
        at = id.to(tl.int64)[:, None] * RANK + k[None, :]
        right = tl.load(after + at, mask=(k < RANK)[None, :], other=0.0).to(tl.float32)
        score += tl.sum(right * left[None, :], 1)
        best = _pick(
            score, id, i < COUNT, seed, position + place + 1, choice, temperature, VOCAB,
            kept_ids + row * COUNT + i, kept_scores + row * COUNT + i, KEEP,
        )  # fmt: skip
        tl.store(out + row, best)
        token = best.to(tl.int64)


def follow(
    logits: Tensor,
    candidates: Tensor,
    projected: Tensor,
    codebooks: tuple[Tensor, Tensor],
    newest: Tensor,
    noise: Noise,
    out: Tensor,
    odds: Odds | None = None,
) -> None:
    """The ids of S proposals into ``out`` [S, depth] int32, and into ``odds``, of S depth rows,
    what they are drawn from.

    logits [S depth, V] fp32; candidates [S depth, C] int32, ascending; projected [S depth, rank];
    codebooks: of the token before and of the one after, [V, rank]; newest [S] int32.
    """
    count, depth = out.shape
    rank = projected.shape[1]
    assert logits.shape[0] == candidates.shape[0] == projected.shape[0] == count * depth
    assert newest.shape == (count,)
    assert candidates.dtype == newest.dtype == out.dtype == torch.int32
    for tensor in (candidates, projected, out, *codebooks):
        assert tensor.is_contiguous()
    assert odds is None or odds.candidates.shape == candidates.shape
    aligned(logits)
    if count:
        chosen = candidates.shape[1]
        kept = (odds.candidates, odds.scores) if odds else (out, logits)
        _follow[(count,)](
            logits, candidates, projected, *codebooks, newest, noise.seeds, noise.positions,
            noise.choices, noise.temperatures, out, *kept, logits.stride(0), logits.shape[1],
            DEPTH=depth, COUNT=chosen, PADDED=power_of_two(chosen), RANK=rank,
            WIDE=power_of_two(rank), KEEP=odds is not None, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip


@triton.jit(do_not_specialize=["first"])
def _among(
    logits, candidates, seeds, positions, choices, temperatures, out, kept_ids, kept_scores,
    logits_row, VOCAB, first, DEPTH: tl.constexpr, COUNT: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Grid: (rows)."""
    row = tl.program_id(0).to(tl.int64)
    sequence, i = row // DEPTH, tl.arange(0, PADDED)
    id = tl.maximum(tl.load(candidates + row * COUNT + i, mask=i < COUNT, other=0), 0)
    score = tl.load(logits + row * logits_row + id)
    position = tl.load(positions + sequence) + first + (row % DEPTH).to(tl.int32)
    best = _pick(
        score, id, i < COUNT, tl.load(seeds + sequence), position, tl.load(choices + sequence),
        tl.load(temperatures + sequence), VOCAB, kept_ids + row * COUNT + i,
        kept_scores + row * COUNT + i, True,
    )  # fmt: skip
    tl.store(out + row, best)


def among(logits: Tensor, noise: Noise, depth: int, first: int, out: Tensor, odds: Odds) -> None:
    """Ids into ``out`` [S, depth] int32, of logits [S depth, V] fp32, each drawn from the best of
    its row, as many as ``odds`` have columns: there it is written down with what chances. Positions
    as :func:`add_noise` has them."""
    rows, width = logits.shape
    count = odds.candidates.shape[1]
    assert rows == out.numel() == odds.candidates.shape[0] == noise.seeds.shape[0] * depth
    assert out.is_contiguous()
    assert out.dtype == torch.int32
    assert count <= width
    every = torch.full((rows,), width, dtype=torch.int32, device=logits.device)
    candidates = choose(logits, every, count)
    if rows:
        _among[(rows,)](
            logits, candidates, noise.seeds, noise.positions, noise.choices, noise.temperatures,
            out, odds.candidates, odds.scores, logits.stride(0), width, first,
            DEPTH=depth, COUNT=count, PADDED=power_of_two(count), num_warps=1,
            enable_fp_fusion=False,
        )  # fmt: skip


@triton.jit(do_not_specialize=["first"])
def _add_noise(
    logits, seeds, positions, choices, temperatures, logits_row, first,
    DEPTH: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (rows, blocks of columns)."""
    row = tl.program_id(0).to(tl.int64)
    sequence = row // DEPTH
    temperature = tl.load(temperatures + sequence)
    if temperature > 0.0:
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        at = logits + row * logits_row + column
        position = tl.load(positions + sequence) + first + (row % DEPTH).to(tl.int32)
        seed, choice = tl.load(seeds + sequence), tl.load(choices + sequence)
        score = tl.load(at, mask=column < WIDTH, other=0.0)
        score = _noisy(score, column, seed, position, choice, temperature)
        tl.store(at, score, mask=column < WIDTH)


def add_noise(logits: Tensor, noise: Noise, depth: int, first: int = 1) -> None:
    """Turn logits [S depth, V] fp32 into scores whose best ids the target will draw, in place: a
    sequence's rows are for the positions from its newest plus ``first`` on. A temperature of 0
    leaves logits as they are."""
    rows, width = logits.shape
    assert rows == noise.seeds.shape[0] * depth, (rows, depth)
    assert logits.dtype == torch.float32
    aligned(logits)
    if rows:
        block = min(_BLOCK, power_of_two(width))
        _add_noise[(rows, blocks(width, block))](
            logits, noise.seeds, noise.positions, noise.choices, noise.temperatures,
            logits.stride(0), first,
            DEPTH=depth, WIDTH=width, BLOCK=block, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
