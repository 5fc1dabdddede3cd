# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Kimi delta attention from the anchor: one kernel for prefill, decode and verification.

Knows positions, anchors and caches of open rows. Must not know requests. A program takes one head
of one sequence (and some columns of V), reads the anchor once and walks over chunks of C rows in
sub-blocks of SUB. Of a sub-block's rows some are new, the others are old: their keys, log decays
and corrected values ("fresh") come from a slot's cache. Both kinds pass through the same tiles, so
a row has the same bits whichever rows came with it; a decode step merely starts at the sub-block of
its first new row.

Per chunk, with G the cumulated log decays since its start and S the state before it:

    A_ij = sum_d k_i k_j exp(G_i - G_j)  for j < i;  P_ij the same with q_i, for j <= i
    fresh_i = beta_i (v_i - (k_i exp(G_i)) S - sum_j A_ij fresh_j)
    out_i = (q_i exp(G_i)) S + sum_j P_ij fresh_j
    S' = exp(G_last) S + sum_j (k_j exp(G_last - G_j))^T fresh_j

Sums over earlier sub-blocks are tensor-core products in ascending order, those inside a sub-block
go row by row. Definition: `merestone.ops.naive.kda_recurrent`. Source: Kimi Linear (arXiv
2510.26692), section 3.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from merestone.ops.triton.launch import aligned, blocks
from merestone.ops.triton.rows import Cells, Sequences

SUB = 16
"""Rows of a sub-block: the smallest tile of a tensor core, and so free of charge at one row."""
_COLUMNS = 64
# A decay inside a sub-block is exp(G_i - r) exp(r - G_j) with r from its first row: the second
# factor must stay finite. Where the model does not bound it, decays are formed pair by pair.
_EXPONENT = 80.0


@triton.jit
def _row_of(x, j, SUB: tl.constexpr):
    """Row ``j`` of x [SUB, n]: one term and zeros, exact in any order."""
    return tl.sum(tl.where(tl.arange(0, SUB)[:, None] == j, x, 0.0), 0)


@triton.jit
def _column_of(x, j, SUB: tl.constexpr):
    """Column ``j`` of x [SUB, SUB]."""
    return tl.sum(tl.where(tl.arange(0, SUB)[None, :] == j, x, 0.0), 1)


@triton.jit
def _keys(
    k, g, keys, decays, carry, start, first, end, k_row, g_row,
    DIM: tl.constexpr, CYCLE: tl.constexpr, SUB: tl.constexpr,
):  # fmt: skip
    """Keys and cumulated log decays of the sub-block at ``start``, [SUB, DIM] each; zero keys and
    no decay past the end. ``carry`` [DIM]: the decays before it."""
    position = start + tl.arange(0, SUB)[:, None]
    column = tl.arange(0, DIM)[None, :]
    old, new = position < first, (position >= first) & (position < end)
    old_at = (position % CYCLE) * DIM + column
    fresh_row = (position - first).to(tl.int64)
    key = tl.load(k + fresh_row * k_row + column, mask=new, other=0.0)
    key = tl.where(old, tl.load(keys + old_at, mask=old, other=0.0), key)
    decay = tl.load(g + fresh_row * g_row + column, mask=new, other=0.0)
    decay = tl.where(old, tl.load(decays + old_at, mask=old, other=0.0), decay)
    return key, decay, carry[None, :] + tl.cumsum(decay, 0)


@triton.jit
def _inside(query, key, total, reference, BOUNDED: tl.constexpr, LIMIT, SUB: tl.constexpr):
    """A and P inside a sub-block, [SUB, SUB] fp32, strictly lower and lower triangular."""
    row, column = tl.arange(0, SUB)[:, None], tl.arange(0, SUB)[None, :]
    if BOUNDED:
        since = tl.exp(total - reference[None, :])
        right = (key * tl.exp(tl.minimum(reference[None, :] - total, LIMIT))).to(query.dtype)
        a = tl.dot((key * since).to(query.dtype), tl.trans(right), input_precision="ieee")
        p = tl.dot((query * since).to(query.dtype), tl.trans(right), input_precision="ieee")
    else:
        a = tl.zeros((SUB, SUB), tl.float32)
        p = tl.zeros((SUB, SUB), tl.float32)
        wide = key.to(tl.float32)
        for j in range(SUB):
            decay = tl.exp(tl.minimum(total - _row_of(total, j, SUB)[None, :], 0.0))
            right = _row_of(wide, j, SUB)[None, :] * decay
            a = tl.where(column == j, tl.sum(wide * right, 1)[:, None], a)
            p = tl.where(column == j, tl.sum(query.to(tl.float32) * right, 1)[:, None], p)
    return tl.where(row > column, a, 0.0), tl.where(row >= column, p, 0.0)


@triton.jit
def _sub_block(
    q, k, v, g, beta, keys, decays, fresh, out, state, carry, base, index, first, end,
    q_row, k_row, v_row, g_row, heads, LIMIT,
    DIM: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, CYCLE: tl.constexpr,
    SUB: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """Computes the new rows of sub-block ``index`` of the chunk at ``base``: stores their outputs
    and corrected values. Returns keys and decays, [SUB, DIM], for the cache, and the next carry."""
    start = base + index * SUB
    key, decay, total = _keys(
        k, g, keys, decays, carry, start, first, end, k_row, g_row, DIM, CYCLE, SUB
    )
    position = start + tl.arange(0, SUB)
    new = (position >= first) & (position < end)
    fresh_row = (position - first).to(tl.int64)
    column = tl.arange(0, DIM)[None, :]
    query = tl.load(q + fresh_row[:, None] * q_row + column, mask=new[:, None], other=0.0)
    reference = _row_of(total, 0, SUB)
    since, decayed = tl.exp(total - reference[None, :]), tl.exp(total)
    left_k, left_q = (key * since).to(query.dtype), (query * since).to(query.dtype)
    read_k = tl.dot((key * decayed).to(query.dtype), state, input_precision="ieee")
    read_q = tl.dot((query * decayed).to(query.dtype), state, input_precision="ieee")
    value_column = tl.arange(0, COLUMNS)[None, :]
    inner = tl.zeros((DIM,), tl.float32)
    for past in range(index):
        at = base + past * SUB
        past_key, _, past_total = _keys(
            k, g, keys, decays, inner, at, first, end, k_row, g_row, DIM, CYCLE, SUB
        )
        inner = _row_of(past_total, SUB - 1, SUB)
        right = (past_key * tl.exp(reference[None, :] - past_total)).to(query.dtype)
        ring = (at + tl.arange(0, SUB)[:, None]) % CYCLE
        past_fresh = tl.load(fresh + ring * WIDTH + value_column)
        a = tl.dot(left_k, tl.trans(right), input_precision="ieee").to(query.dtype)
        p = tl.dot(left_q, tl.trans(right), input_precision="ieee").to(query.dtype)
        read_k = tl.dot(a, past_fresh, read_k, input_precision="ieee")
        read_q = tl.dot(p, past_fresh, read_q, input_precision="ieee")
    share = tl.load(beta + fresh_row * heads, mask=new, other=0.0)[:, None]
    value = tl.load(v + fresh_row[:, None] * v_row + value_column, mask=new[:, None], other=0.0)
    x = share * (value.to(tl.float32) - read_k)
    to_ring = fresh + (position % CYCLE)[:, None] * WIDTH + value_column
    old = (position < first)[:, None]
    x = tl.where(old, tl.load(to_ring, mask=old, other=0.0).to(tl.float32), x)
    a, p = _inside(query, key, total, reference, BOUNDED, LIMIT, SUB)
    a = a * share
    for j in range(SUB):
        # Rounded as the cache holds it: an old row must count as it did when it was new.
        solved = _row_of(x, j, SUB).to(query.dtype).to(tl.float32)
        later = (tl.arange(0, SUB)[:, None] > j) & new[:, None]
        x = tl.where(later, x - _column_of(a, j, SUB)[:, None] * solved[None, :], x)
    corrected = x.to(query.dtype)
    result = tl.dot(p.to(query.dtype), corrected, read_q, input_precision="ieee")
    to = out + fresh_row[:, None] * (heads * WIDTH) + value_column
    tl.store(to, result.to(out.dtype.element_ty), mask=new[:, None])
    tl.store(to_ring, corrected, mask=new[:, None])
    # Later sub-blocks read what these threads wrote.
    tl.debug_barrier()
    return key, decay, _row_of(total, SUB - 1, SUB)


@triton.jit
def _advanced(
    k, g, keys, decays, fresh, state, last, base, first, end, k_row, g_row,
    DIM: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr,
    CYCLE: tl.constexpr, SUB: tl.constexpr,
):  # fmt: skip
    """The state after the full chunk at ``base``, [DIM, COLUMNS]; ``last`` [DIM]: its decay."""
    state = state * tl.exp(last)[:, None]
    inner = tl.zeros((DIM,), tl.float32)
    for index in range(CHUNK // SUB):
        at = base + index * SUB
        key, _, total = _keys(
            k, g, keys, decays, inner, at, first, end, k_row, g_row, DIM, CYCLE, SUB
        )
        inner = _row_of(total, SUB - 1, SUB)
        ring = (at + tl.arange(0, SUB)[:, None]) % CYCLE
        corrected = tl.load(fresh + ring * WIDTH + tl.arange(0, COLUMNS)[None, :])
        written = (key * tl.exp(last[None, :] - total)).to(corrected.dtype)
        state = tl.dot(tl.trans(written), corrected, state, input_precision="ieee")
    return state


@triton.jit
def _kda(
    q, k, v, g, beta, memory, places, keys, decays, fresh, out,
    firsts, rows, anchors, ends, advances, slots, anchor_frames, advance_frames,
    q_row, k_row, v_row, g_row, memory_frame, heads, LIMIT,
    FRAMES: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr, SUB: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of V, heads, sequences)."""
    CYCLE: tl.constexpr = 2 * CHUNK
    left, head, sequence = tl.program_id(0) * COLUMNS, tl.program_id(1), tl.program_id(2)
    first, end = tl.load(firsts + sequence), tl.load(ends + sequence)
    anchor, advance = tl.load(anchors + sequence), tl.load(advances + sequence)
    row = tl.load(rows + sequence).to(tl.int64)
    slot = (tl.load(slots + sequence).to(tl.int64) * heads + head) * CYCLE
    q += row * q_row + head * DIM
    k += row * k_row + head * DIM
    g += row * g_row + head * DIM
    v += row * v_row + head * WIDTH + left
    out += (row * heads + head) * WIDTH + left
    beta += row * heads + head
    keys, decays, fresh = keys + slot * DIM, decays + slot * DIM, fresh + slot * WIDTH + left
    number, offset = tl.load(places + head * 2), tl.load(places + head * 2 + 1)
    cell = offset + tl.arange(0, DIM)[:, None] * WIDTH + left + tl.arange(0, COLUMNS)[None, :]
    frame = tl.load(anchor_frames + sequence * FRAMES + number).to(tl.int64)
    exists = (frame >= 0) & (first < end)
    state = tl.load(memory + frame * memory_frame + cell, mask=exists, other=0.0)
    keep = tl.maximum(first, advance)
    for base in range(anchor, end, CHUNK):
        begin = tl.maximum(first - base, 0) // SUB
        carry = tl.zeros((DIM,), tl.float32)
        for index in range(tl.minimum(begin, CHUNK // SUB)):
            _, _, total = _keys(
                k, g, keys, decays, carry, base + index * SUB, first, end, k_row, g_row,
                DIM, CYCLE, SUB,
            )  # fmt: skip
            carry = _row_of(total, SUB - 1, SUB)
        seen = state.to(q.dtype.element_ty)
        for index in range(begin, tl.cdiv(tl.minimum(end - base, CHUNK), SUB)):
            key, decay, carry = _sub_block(
                q, k, v, g, beta, keys, decays, fresh, out, seen, carry, base, index, first, end,
                q_row, k_row, v_row, g_row, heads, LIMIT,
                DIM, WIDTH, COLUMNS, CYCLE, SUB, BOUNDED,
            )  # fmt: skip
            position = base + index * SUB + tl.arange(0, SUB)[:, None]
            kept = (position >= keep) & (position < end) & (left == 0)
            ring = (position % CYCLE) * DIM + tl.arange(0, DIM)[None, :]
            tl.store(keys + ring, key, mask=kept)
            tl.store(decays + ring, decay, mask=kept)
        if (base + CHUNK < end) | (base + CHUNK == advance):
            state = _advanced(
                k, g, keys, decays, fresh, state, carry, base, first, end, k_row, g_row,
                DIM, WIDTH, COLUMNS, CHUNK, CYCLE, SUB,
            )  # fmt: skip
            if base + CHUNK == advance:
                target = tl.load(advance_frames + sequence * FRAMES + number).to(tl.int64)
                tl.store(memory + target * memory_frame + cell, state, mask=target >= 0)


@dataclass(frozen=True, slots=True)
class OpenRows:
    """Per-slot caches of one layer's open rows, position p in row p % 2 C of a ring: ``keys``
    [slots, H, 2 C, K] and ``fresh`` [slots, H, 2 C, V] in the operands' dtype, ``decays``
    [slots, H, 2 C, K] fp32.

    Derived from raw rows and never part of a checkpoint: rebuilt by a pass from the anchor.
    """

    keys: Tensor
    decays: Tensor
    fresh: Tensor


@dataclass(frozen=True, slots=True)
class Pass:
    """What a step does to each sequence, [S] int32: rows [first, ``end``) are computed, the anchor
    moves to ``advance`` (0: it stays), written to ``advance_frames`` [S, n] (-1: nowhere);
    ``slot`` holds its cache. An empty range [first, first) is padding."""

    end: Tensor
    advance: Tensor
    slot: Tensor
    advance_frames: Tensor


def kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    anchors: Cells,
    cache: OpenRows,
    sequences: Sequences,
    step: Pass,
    *,
    chunk: int,
    lowest: float | None = None,
) -> Tensor:
    """The outputs of a step's rows, [N, H, V] in q's dtype; writes the cache and ordered anchors.

    A sequence either has at most 2 ``chunk`` rows since its anchor, the old ones in the cache, or
    all its rows since the anchor are among the step's (first = anchor): a prefill, or a rebuild.

    Args:
        q, k: [N, H, K], l2-normalised, q scaled. v: [N, H, V], of q's dtype. Rows may be strided.
        g: [N, H, K] fp32, log decays, at most 0. beta: [N, H] fp32, dense.
        anchors: states [H cells of K, V] fp32.
        lowest: a lower bound of g that the model guarantees (part of the bits' definition).
    """
    rows, heads, dim = q.shape
    width = v.shape[2]
    columns = min(_COLUMNS, width)
    assert q.dtype == k.dtype == v.dtype == cache.keys.dtype == cache.fresh.dtype
    assert g.dtype == beta.dtype == anchors.memory.dtype == torch.float32
    assert q.stride(1) == k.stride(1) == g.stride(1) == dim, "heads lie behind each other"
    assert v.stride(1) == width, "heads lie behind each other"
    assert beta.is_contiguous()
    assert chunk % SUB == width % columns == 0, (chunk, width)
    assert cache.keys.shape[1:] == cache.decays.shape[1:] == (heads, 2 * chunk, dim)
    assert cache.fresh.shape[1:] == (heads, 2 * chunk, width)
    assert anchors.places.shape == (heads, 2)
    assert step.advance_frames.shape == sequences.anchor_frames.shape
    for table in (step.end, step.advance, step.slot, step.advance_frames):
        assert table.dtype == torch.int32
        assert table.is_contiguous()
    aligned(q, k, v, g, anchors.memory, cache.keys, cache.decays, cache.fresh)
    out = torch.empty(rows, heads, width, dtype=q.dtype, device=q.device)
    _kda[(blocks(width, columns), heads, sequences.first.shape[0])](
        q, k, v, g, beta, anchors.memory, anchors.places, cache.keys, cache.decays, cache.fresh,
        out, sequences.first, sequences.row, sequences.anchor, step.end, step.advance, step.slot,
        sequences.anchor_frames, step.advance_frames,
        q.stride(0), k.stride(0), v.stride(0), g.stride(0), anchors.memory.stride(0), heads,
        _EXPONENT,
        FRAMES=step.advance_frames.shape[1], DIM=dim, WIDTH=width, COLUMNS=columns, CHUNK=chunk,
        SUB=SUB, BOUNDED=lowest is not None and -lowest * (SUB - 1) <= _EXPONENT,
        num_warps=8, num_stages=1, enable_fp_fusion=False,
    )  # fmt: skip
    return out
