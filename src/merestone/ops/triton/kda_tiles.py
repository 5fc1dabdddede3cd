# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Tiles of delta attention: everything about their rows that does not need the state.

Knows what `merestone.ops.triton.kda` says a tile is, where a pass begins, and rings of old rows.
Must not know states. Products are of TF32 (pieces of it for T, and for fp32 operands): of bf16 keys
and queries nothing is lost, of their decays eleven bits stay.
"""

import triton
import triton.language as tl


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
    zero past the end; where they lie in rings; which rows are new, and their numbers."""
    position = (base + tl.arange(0, SUB))[:, None]
    column = left + tl.arange(0, BLOCK)[None, :]
    old, new = position < first, (position >= first) & (position < end)
    fresh, at_ring = (position - first).to(tl.int64), (position % RING) * DIM + column
    key = tl.load(k + fresh * k_row + column, mask=new, other=0.0)
    key = tl.where(old, tl.load(keys + at_ring, mask=old, other=0.0), key)
    decay = tl.load(g + fresh * g_row + column, mask=new, other=0.0)
    decay = tl.where(old, tl.load(decays + at_ring, mask=old, other=0.0), decay)
    return key, decay, at_ring, new, fresh


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
        key, decay, _, new, fresh = _keys(
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
    q, k, g, beta, keys, decays, strengths, reads, writes, mixes, fades, base, first, end, keep,
    q_row, k_row, g_row, heads, LIMIT,
    DIM: tl.constexpr, BLOCK: tl.constexpr, RING: tl.constexpr, SUB: tl.constexpr,
    BOUNDED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The tile at ``base``: all pointers are at its head, those of results at its place."""
    position = base + tl.arange(0, SUB)
    old, new = position < first, (position >= first) & (position < end)
    kept, ring = new & (position >= keep), position % RING
    share = tl.load(beta + (position - first).to(tl.int64) * heads, mask=new, other=0.0)
    share = tl.where(old, tl.load(strengths + ring, mask=old, other=0.0), share)
    tl.store(strengths + ring, share, mask=kept)
    key, decay, at_ring, fresh_rows, fresh = _keys(
        k, g, keys, decays, 0, base, first, end, k_row, g_row, DIM, DIM, RING, SUB
    )
    column = tl.arange(0, DIM)[None, :]
    query = tl.load(q + fresh * q_row + column, mask=fresh_rows, other=0.0).to(tl.float32)
    tl.store(keys + at_ring, key, mask=kept[:, None])
    tl.store(decays + at_ring, decay, mask=kept[:, None])
    key = key.to(tl.float32)
    total = tl.cumsum(decay, 0)
    grown = tl.exp(total)
    of_key, of_query = key * grown, query * grown
    row, other = tl.arange(0, SUB)[:, None], tl.arange(0, SUB)[None, :]
    dtype = reads.dtype.element_ty
    tl.store(reads + row * DIM + column, of_key.to(dtype))
    tl.store(reads + SUB * DIM + row * DIM + column, of_query.to(dtype))
    right = tl.trans(key * tl.exp(tl.minimum(-total, LIMIT)))
    a = tl.dot(of_key, right, input_precision=PRECISION)
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
    tl.store(mixes + row * SUB + other, mix.to(dtype))
    last = _row_of(total, SUB - 1, SUB)
    faded = key * tl.exp(last[None, :] - total)
    written = tl.dot(tl.trans(t), faded, input_precision=PRECISION)
    tl.store(writes + row * DIM + column, written.to(dtype))
    tl.store(fades + tl.arange(0, DIM), tl.exp(last))


@triton.jit
def prepare(
    q, k, g, beta, keys, decays, strengths, stands, reads, writes, mixes, fades,
    firsts, rows, anchors, ends, advances, slots,
    q_row, k_row, g_row, heads, LIMIT,
    DIM: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, CHUNK: tl.constexpr,
    SUB: tl.constexpr, BOUNDED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid: (any number, heads, sequences). A program takes every so manieth tile of a sequence."""
    RING: tl.constexpr = 2 * CHUNK
    head, sequence = tl.program_id(1), tl.program_id(2)
    first, end = tl.load(firsts + sequence), tl.load(ends + sequence)
    row = tl.load(rows + sequence).to(tl.int64)
    anchor, advance = tl.load(anchors + sequence), tl.load(advances + sequence)
    slot = tl.load(slots + sequence).to(tl.int64) * heads + head
    start, keep = from_to(first, anchor, advance, tl.load(stands + slot * PARTS), CHUNK, SUB)
    if first < end:
        place = row // SUB + sequence * (RING // SUB + 2)
        q += row * q_row + head * DIM
        k += row * k_row + head * DIM
        g += row * g_row + head * DIM
        beta += row * heads + head
        keys, decays = keys + slot * RING * DIM, decays + slot * RING * DIM
        strengths += slot * RING
        for index in range(tl.program_id(0), tl.cdiv(end - start, SUB), tl.num_programs(0)):
            tile = (place + index) * heads + head
            _prepare_tile(
                q, k, g, beta, keys, decays, strengths,
                reads + tile * 2 * SUB * DIM, writes + tile * SUB * DIM, mixes + tile * SUB * SUB,
                fades + tile * DIM, start + index * SUB, first, end, keep,
                q_row, k_row, g_row, heads, LIMIT, DIM, BLOCK, RING, SUB, BOUNDED,
                PRECISION,
            )  # fmt: skip
