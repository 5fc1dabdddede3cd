"""Kimi delta attention in its chunk form: the only form, for prefill, decode and verification.

Knows chunks of one fixed size. Must not know where their rows come from. A chunk's every row is
computed by the same fixed-shape calls however many rows follow it, so a row of a part-filled chunk
has the bits that it will have when the chunk is full. `naive.py` holds the recurrent definition.

Source: Kimi Linear (arXiv 2510.26692), section 3; the sub-block scheme for the decays is that of
flash-linear-attention's intra-chunk kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from merestone.ops.gemm import bmm
from merestone.ops.solve import solve_unit_lower

SUB = 16
"""Rows of a sub-block. A decay from row j to row i is exp(G_i - r) exp(r - G_j), with r from the
first row of i's sub-block: never a later one, on which row i must not depend. For j in an earlier
sub-block both exponents are at most 0. Inside a sub-block the second reaches SUB - 1 times the
strongest decay: fine where the model bounds it, else the decay is formed pair by pair."""

# exp(80) times sums of keys is finite in fp32, also where it is masked.
_EXPONENT = 80.0

# Pairwise decays formed at once: bounds the memory of a long prefill, and keeps it in the cache.
_PAIRS = 1 << 19


def kda_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    counts: Sequence[int],
    advances: Sequence[int],
    lowest: float | None = None,
) -> tuple[Tensor, Tensor]:
    """All chunks of several sequences, each from its own initial state.

    ``counts[s]`` chunks of sequence s, most first; chunks lie round by round: first chunk 0 of
    every sequence, then chunk 1 of those that have one, and so on.

    Args:
        q, k: [NC, H, C, K] fp32, l2-normalised, q scaled. Rows past a sequence's end may be
            anything of this kind: they come after every row that is read.
        v: [NC, H, C, V]. g: [NC, H, C, K] log decays, at most 0. beta: [NC, H, C].
        state: [NS, H, K, V] fp32, before each sequence's first chunk.
        advances: for each sequence the number of (full) chunks after which its state is wanted;
            0 for none.
        lowest: a lower bound of g that the model guarantees (a constant of the model, since it
            chooses the form of the decays), or None.

    Returns:
        Outputs [NC, H, C, V], and states [NS, H, K, V] at ``advances`` (the initial ones for 0).
    """
    chunks, heads, size, dim = q.shape
    assert size % SUB == 0, size
    assert list(counts) == sorted(counts, reverse=True), counts
    assert sum(counts) == chunks, (counts, chunks)
    bounded = lowest is not None and -lowest * (SUB - 1) <= _EXPONENT
    step = max(1, _PAIRS // (heads * size * SUB * dim))
    blocks = (
        [x[i : i + step].flatten(0, 1) for x in (q, k, v, g, beta)] for i in range(0, chunks, step)
    )
    parts = [_intra(q, k, v, g, beta, bounded) for q, k, v, g, beta in blocks]
    reads, u, scores, writes, decay = (
        torch.cat(x) if len(parts) > 1 else x[0] for x in zip(*parts, strict=True)
    )
    before, fresh, states = _inter(reads, u, writes, decay, state, counts, advances)
    out = before.add_(bmm(scores, fresh))
    return out.view(chunks, heads, size, v.shape[-1]), states


def _intra(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, bounded: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What needs no state, for B = chunks x heads items of [C, ...].

    Returns the rows that read the state [B, 2C, K] (decayed q over w), u [B, C, V], the lower
    scores of q on k [B, C, C], the decayed keys that write it [B, K, C], its decay [B, K, 1].
    """
    total = g.cumsum(1)  # [B, C, K]
    beta = beta.unsqueeze(-1)
    pairs = _decayed_scores(torch.stack([k, q], 1), k, total, bounded)  # [B, 2, C, C]
    since = total.exp()
    right = torch.cat([v, k * since], -1).mul_(beta)
    solved = solve_unit_lower(pairs[:, 0] * beta, right)  # [B, C, V + K]
    u, w = torch.split(solved, [v.shape[-1], k.shape[-1]], -1)
    reads = torch.cat([q * since, w], 1)
    last = total[:, -1:]
    writes = (last - total).exp_().mul_(k).transpose(1, 2).contiguous()
    return reads, u, pairs[:, 1], writes, last.exp().transpose(1, 2)


def _decayed_scores(rows: Tensor, k: Tensor, total: Tensor, bounded: bool) -> Tensor:
    """sum_d rows[i, d] k[j, d] exp(total[i, d] - total[j, d]), lower triangle, [B, 2, C, C].

    rows [B, 2, C, K] are k (strict triangle) and q (with the diagonal).
    """
    batch, _, size, dim = rows.shape
    blocks = size // SUB
    by_block = rows.view(batch, 2, blocks, SUB, dim)
    inside = total.view(batch, blocks, SUB, dim)
    # Exponents of columns that no row of the block may see are clamped: finite, then masked.
    reference = inside[:, :, :1]
    left = by_block * (inside - reference).exp_()[:, None]
    left = left.transpose(1, 2).reshape(-1, 2 * SUB, dim)
    right = (reference - total[:, None]).clamp_(max=_EXPONENT if bounded else 0.0)
    right = right.exp_().mul_(k[:, None]).view(-1, size, dim)
    crossed = bmm(left, right.transpose(1, 2)).view(batch, blocks, 2, SUB, size)
    scores = k.new_empty(batch, 2, blocks, SUB, size)
    torch.mul(crossed.transpose(1, 2), _visible(size, bounded), out=scores)
    if not bounded:
        pairwise = (inside[:, :, :, None] - inside[:, :, None]).clamp_(max=0.0).exp_()
        pairwise.mul_(k.view(batch, blocks, 1, SUB, dim))  # [B, blocks, i, j, K]
        diagonal = (pairwise[:, None] * by_block.unsqueeze(4)).sum(-1).mul_(_triangles(SUB))
        target = scores.view(batch, 2, blocks, SUB, blocks, SUB).diagonal(dim1=2, dim2=4)
        target.copy_(diagonal.permute(0, 1, 3, 4, 2))
    return scores.view(batch, 2, size, size)


@functools.cache
def _triangles(size: int) -> Tensor:
    """The strict and the full lower triangle, [2, 1, size, size] of 0 and 1."""
    ones = torch.ones(size, size)
    return torch.stack([ones.tril(-1), ones.tril()]).view(2, 1, size, size)


@functools.cache
def _visible(size: int, bounded: bool) -> Tensor:
    """What the factored product covers, [2, blocks, SUB, size] of 0 and 1: the lower triangles,
    or only the sub-blocks below the diagonal ones."""
    if bounded:
        return _triangles(size).view(2, size // SUB, SUB, size)
    block = torch.arange(size).div(SUB, rounding_mode="floor")
    below = (block < block[:, None]).float()
    return below.view(1, size // SUB, SUB, size).expand(2, -1, -1, -1)


def _inter(
    reads: Tensor,
    u: Tensor,
    writes: Tensor,
    decay: Tensor,
    state: Tensor,
    counts: Sequence[int],
    advances: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """The recurrence over chunks, all sequences in lockstep.

    Returns what q reads from the states [B, C, V], the corrected values [B, C, V], the states
    wanted [NS, H, K, V].
    """
    heads, dim, width = state.shape[1:]
    size = u.shape[1]
    wanted = state.clone()
    before: list[Tensor] = []
    fresh: list[Tensor] = []
    done = 0
    for turn in range(counts[0] if counts else 0):
        active = sum(count > turn for count in counts)
        items = slice(done, done + active * heads)
        done = items.stop
        flat = state[:active].reshape(-1, dim, width)
        read = bmm(reads[items], flat)
        values = u[items] - read[:, size:]
        before.append(read[:, :size])
        fresh.append(values)
        ends = [s for s, count in enumerate(advances) if count == turn + 1]
        if ends or turn + 1 < counts[0]:
            state = (
                (flat * decay[items])
                .add_(bmm(writes[items], values))
                .view(active, heads, dim, width)
            )
            if ends:
                wanted[ends] = state[ends]
    return torch.cat(before), torch.cat(fresh), wanted
