# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Tiles of delta attention: everything about their rows that does not need the state.

Knows what `merestone.ops.triton.kda` says a tile is, where a pass begins, and rings of old rows.
Must not know states. Products are of TF32 (pieces of it for T, and for fp32 operands): of bf16 keys
and queries nothing is lost, of their decays eleven bits stay.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents


@triton.jit
def _row_of(x, j, SUB: tl.constexpr):
    """Row ``j`` of x [SUB, n]: one term and zeros, exact in any order."""
    return tl.sum(tl.where(tl.arange(0, SUB)[:, None] == j, x, 0.0), 0)


@triton.jit
def from_to(first, anchor, advance, stands, CHUNK: tl.constexpr, SUB: tl.constexpr):
    """Where a pass begins, and where the slot's state shall stand after it.

    anchor ... stands (a multiple of SUB) ... first: rows below it are final ... end
    """
    start = tl.where(first == anchor, anchor, stands)
    limit = tl.where(advance > 0, advance, anchor) + CHUNK
    return start, tl.minimum(tl.maximum(first // SUB * SUB, advance), limit)


@triton.jit
def _inverse(lower, SUB: tl.constexpr):
    """(I + N)^-1 for a strictly lower triangle [SUB, SUB], whose SUBth power is zero: by doubling,
    (I - N)(I + N^2)(I + N^4)(I + N^8)."""
    tl.static_assert(SUB == 16)
    row, column = tl.arange(0, SUB)[:, None], tl.arange(0, SUB)[None, :]
    inverse = tl.where(row == column, 1.0, 0.0) - lower
    power = lower
    for _ in tl.static_range(3):
        power = tl.dot(power, power, input_precision="tf32x3")
        inverse += tl.dot(inverse, power, input_precision="tf32x3")
    return inverse


@triton.jit
def _keys(
    k, g, keys, decays, left, base, first, end, k_row, g_row,
    DIM: tl.constexpr, BLOCK: tl.constexpr, RING: tl.constexpr, SUB: tl.constexpr,
):  # fmt: skip
    """Keys and log decays of the tile at ``base``, columns from ``left`` on: [SUB, BLOCK] each,
    zero past the end; which rows are new, and their numbers."""
    position = (base + tl.arange(0, SUB))[:, None]
    column = left + tl.arange(0, BLOCK)[None, :]
    old, new = position < first, (position >= first) & (position < end)
    fresh, at_ring = (position - first).to(tl.int64), (position % RING) * DIM + column
    key = tl.load(k + fresh * k_row + column, mask=new, other=0.0)
    key = tl.where(old, tl.load(keys + at_ring, mask=old, other=0.0), key)
    decay = tl.load(g + fresh * g_row + column, mask=new, other=0.0)
    decay = tl.where(old, tl.load(decays + at_ring, mask=old, other=0.0), decay)
    return key, decay, new, fresh


@triton.jit
def _pairs(
    a, p, deepest, q, k, g, keys, decays, base, first, end, q_row, k_row, g_row, LIMIT,
    DIM: tl.constexpr, BLOCK: tl.constexpr, RING: tl.constexpr, SUB: tl.constexpr,
):  # fmt: skip
    """``a`` and ``p`` with the rows behind a stronger decay than LIMIT formed pair by pair."""
    row = tl.arange(0, SUB)
    strong = deepest < -LIMIT
    a, p = tl.where(strong[:, None], 0.0, a), tl.where(strong[:, None], 0.0, p)
    for left in range(0, DIM, BLOCK):
        key, decay, new, fresh = _keys(
            k, g, keys, decays, left, base, first, end, k_row, g_row, DIM, BLOCK, RING, SUB
        )
        column = left + tl.arange(0, BLOCK)[None, :]
        query = tl.load(q + fresh * q_row + column, mask=new, other=0.0).to(tl.float32)
        key, total = key.to(tl.float32), tl.cumsum(decay, 0)
        for i in range(SUB):
            fading = tl.exp(tl.minimum(_row_of(total, i, SUB)[None, :] - total, 0.0)) * key
            of_key = tl.sum(_row_of(key, i, SUB)[None, :] * fading, 1)
            of_query = tl.sum(_row_of(query, i, SUB)[None, :] * fading, 1)
            chosen = ((row == i) & strong)[:, None]
            a = tl.where(chosen, a + of_key[None, :], a)
            p = tl.where(chosen, p + of_query[None, :], p)
    return a, p


@triton.jit
def _prepare_tile(
    q, k, g, beta, keys, decays, strengths, stand, reads, writes, mixes, fades, base, place,
    first, end, anchor, advance, q_row, k_row, g_row, heads, LIMIT, zero,
    DIM: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, SUB: tl.constexpr,
    BOUNDED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The tile at ``base``. Pointers are at the head, those of results where memory begins: those
    of the pass's first tile lie at ``place``, of the next ``heads`` further.

    Rows are asked for before ``stand``, where the slot's state stands, is needed. What the scan
    does not use is not written: what an old row or one past the end reads, what a last tile writes.
    """
    RING: tl.constexpr = 2 * CHUNK
    local, column = tl.arange(0, SUB) + zero, tl.arange(0, DIM)[None, :]
    row, other = local[:, None], tl.arange(0, SUB)[None, :]
    position = base + local
    old, new = position < first, (position >= first) & (position < end)
    old_rows, new_rows = old[:, None], new[:, None]
    # A tile lies in one piece in a ring.
    away, turn = (base - first).to(tl.int64), base % RING
    share = tl.load(beta + away * heads + local * heads, mask=new, other=0.0)
    share = tl.where(old, tl.load(strengths + turn + local, mask=old, other=0.0), share)
    at_ring = turn * DIM + (row * DIM + column)
    key = tl.load(k + away * k_row + (row * k_row + column), mask=new_rows, other=0.0)
    key = tl.where(old_rows, tl.load(keys + at_ring, mask=old_rows, other=0.0), key)
    decay = tl.load(g + away * g_row + (row * g_row + column), mask=new_rows, other=0.0)
    decay = tl.where(old_rows, tl.load(decays + at_ring, mask=old_rows, other=0.0), decay)
    query = tl.load(q + away * q_row + (row * q_row + column), mask=new_rows, other=0.0)
    start, keep = from_to(first, anchor, advance, stand, CHUNK, SUB)
    kept = new & (position >= keep)
    tile = place + ((base - start) // SUB).to(tl.int64) * heads
    reads, writes = reads + tile * 2 * SUB * DIM, writes + tile * SUB * DIM
    mixes, fades = mixes + tile * SUB * SUB, fades + tile * DIM
    tl.store(strengths + turn + local, share, mask=kept)
    tl.store(keys + at_ring, key, mask=kept[:, None])
    tl.store(decays + at_ring, decay, mask=kept[:, None])
    key = key.to(tl.float32)
    total = tl.cumsum(decay, 0)
    grown = tl.exp(total)
    dtype = reads.dtype.element_ty
    right = tl.trans(key * tl.exp(tl.minimum(-total, LIMIT)))
    of_key = key * grown
    tl.store(reads + row * DIM + column, of_key.to(dtype), mask=new_rows)
    a = tl.dot(of_key, right, input_precision=PRECISION)
    of_query = query.to(tl.float32) * grown
    tl.store(reads + SUB * DIM + row * DIM + column, of_query.to(dtype), mask=new_rows)
    p = tl.dot(of_query, right, input_precision=PRECISION)
    if not BOUNDED:
        deepest = tl.min(total, 1)
        if tl.min(deepest, 0) < -LIMIT:
            a, p = _pairs(
                a, p, deepest, q, k, g, keys, decays, base, first, end, q_row, k_row, g_row, LIMIT,
                DIM, BLOCK, RING, SUB,
            )  # fmt: skip
    t = _inverse(tl.where(row > other, a * share[:, None], 0.0), SUB) * share[None, :]
    mix = tl.dot(tl.where(row >= other, p, 0.0), t, input_precision=PRECISION)
    tl.store(mixes + row * SUB + other, mix.to(dtype), mask=new_rows)
    followed = (base + SUB < end) | (base < keep)
    last = _row_of(total, SUB - 1, SUB)
    faded = key * tl.exp(last[None, :] - total)
    written = tl.dot(tl.trans(t), faded, input_precision=PRECISION)
    tl.store(writes + row * DIM + column, written.to(dtype), mask=followed)
    tl.store(fades + tl.arange(0, DIM), tl.exp(last), mask=followed)


@triton.jit
def prepare(
    q, k, g, beta, keys, decays, strengths, stands, reads, writes, mixes, fades,
    firsts, rows, anchors, ends, advances, slots,
    q_row, k_row, g_row, heads, LIMIT,
    DIM: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, CHUNK: tl.constexpr,
    SUB: tl.constexpr, BOUNDED: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid: (any number, heads, sequences). A program takes every so manieth tile of a sequence,
    backwards: the last one is there wherever the slot's state stands."""
    if OVERLAP:
        # The scan may begin: it waits for the end of this launch before it reads a result of it,
        # or writes anything at all.
        gdc_launch_dependents()
    RING: tl.constexpr = 2 * CHUNK
    program, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, end = tl.load(firsts + sequence), tl.load(ends + sequence)
    row = tl.load(rows + sequence).to(tl.int64)
    anchor, advance = tl.load(anchors + sequence), tl.load(advances + sequence)
    slot = tl.load(slots + sequence).to(tl.int64) * heads + head
    if first < end:
        stand = tl.load(stands + slot * PARTS)
        place = (row // SUB + sequence * (RING // SUB + 2)) * heads + head
        q += row * q_row + head * DIM
        k += row * k_row + head * DIM
        g += row * g_row + head * DIM
        beta += row * heads + head
        keys, decays = keys + slot * RING * DIM, decays + slot * RING * DIM
        strengths += slot * RING
        base = (end - 1) // SUB * SUB - program * SUB
        going = first < end
        if program > 0:
            # Loaded once more: else the compiler makes every program wait for it.
            going = base >= tl.where(first == anchor, anchor, tl.load(stands + slot * PARTS))
        # Always zero, which the compiler cannot know: it would carry addresses over the loop,
        # which decoding hardly ever takes twice, and run out of registers.
        zero = 0
        while going:
            _prepare_tile(
                q, k, g, beta, keys, decays, strengths, stand, reads, writes, mixes, fades, base,
                place, first, end, anchor, advance, q_row, k_row, g_row, heads, LIMIT, zero,
                DIM, BLOCK, CHUNK, SUB, BOUNDED, PRECISION,
            )  # fmt: skip
            base -= tl.num_programs(0) * SUB
            zero = tl.where(stand == -(1 << 30), 1, 0)
            going = base >= tl.where(first == anchor, anchor, stand)
