# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Delta attention of few rows: the last tile is asked for together with the state.

Knows what `merestone.ops.triton.kda` says a tile is. Must not know requests. Nearly all rows of
decoding and verification need one tile and write no state; tiles before the last, anchors and the
slot's state are a matter of every sixteenth row, and a branch. Tiles come from a launch before,
or are prepared here while the state arrives. Each element's sums are those of the scan of a
prompt, in their order, and so are the bits.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from merestone.ops.triton.kda_tiles import (
    from_to,
    keep_inputs,
    left_behind,
    prepare_tile,
    solved,
    tile_inputs,
)


@triton.jit
def scanned(
    state, v, ring, out, reads, writes, mixes, fades, start, begin, stop, first, end, keep,
    v_row, out_row, tile_rows,
    DIM: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, RING: tl.constexpr,
    SUB: tl.constexpr,
):  # fmt: skip
    """The state [COLUMNS, DIM] after the tiles of [begin, stop): stores outputs of new rows and
    their z. Pointers are at the head, those of tiles at the one of ``start``."""
    local, column = tl.arange(0, SUB), tl.arange(0, DIM)[None, :]
    width = tl.arange(0, COLUMNS)[:, None]
    at = local[:, None] * DIM + column
    for base in range(begin, stop, SUB):
        tile = ((base - start) // SUB).to(tl.int64) * tile_rows
        position = base + local
        old = (position < first)[None, :]
        new = ((position >= first) & (position < end))[None, :]
        fresh = (position - first).to(tl.int64)[None, :]
        at_ring = (position % RING)[None, :] * WIDTH + width
        read_k = tl.load(reads + tile * 2 * SUB * DIM + at)
        read_q = tl.load(reads + tile * 2 * SUB * DIM + SUB * DIM + at)
        written = tl.load(writes + tile * SUB * DIM + at)
        mix = tl.load(mixes + tile * SUB * SUB + local[:, None] * SUB + local[None, :])
        fade = tl.load(fades + tile * DIM + tl.arange(0, DIM))
        value = tl.load(v + fresh * v_row + width, mask=new, other=0.0).to(tl.float32)
        known = tl.load(ring + at_ring, mask=old, other=0.0)
        seen = state.to(read_k.dtype)
        z = value - tl.dot(seen, tl.trans(read_k), input_precision="tf32x3")
        # Rounded as the ring holds it: an old row must count as it did when it was new.
        z = tl.where(old, known, z.to(read_k.dtype))
        result = tl.dot(seen, tl.trans(read_q), input_precision="tf32x3")
        result = tl.dot(z, tl.trans(mix), result, input_precision="tf32x3")
        state = tl.dot(z, written, state * fade[None, :], input_precision="tf32x3")
        tl.store(out + fresh * out_row + width, result.to(out.dtype.element_ty), mask=new)
        tl.store(ring + at_ring, z, mask=new & (position >= keep)[None, :])
    return state


@triton.jit
def _values(
    v, ring, base, first, end, v_row,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, RING: tl.constexpr, SUB: tl.constexpr,
):  # fmt: skip
    """Values of new rows and z of old ones, [SUB, COLUMNS] each, zero elsewhere."""
    position, width = (base + tl.arange(0, SUB))[:, None], tl.arange(0, COLUMNS)[None, :]
    old, new = position < first, (position >= first) & (position < end)
    fresh = (position - first).to(tl.int64)
    value = tl.load(v + fresh * v_row + width, mask=new, other=0.0)
    return value, tl.load(ring + (position % RING) * WIDTH + width, mask=old, other=0.0)


@triton.jit
def _outputs(
    state, value, known, read_k, read_q, mix, ring, out, base, first, end, keep, out_row,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, RING: tl.constexpr, SUB: tl.constexpr,
):  # fmt: skip
    """z [SUB, COLUMNS] of the tile at ``base``; stores outputs of new rows and their z."""
    position, width = (base + tl.arange(0, SUB))[:, None], tl.arange(0, COLUMNS)[None, :]
    old, new = position < first, (position >= first) & (position < end)
    fresh = (position - first).to(tl.int64)
    seen = tl.trans(state.to(read_k.dtype))
    z = value.to(tl.float32) - tl.dot(read_k, seen, input_precision="tf32x3")
    z = tl.where(old, known, z.to(read_k.dtype))
    result = tl.dot(read_q, seen, input_precision="tf32x3")
    result = tl.dot(mix, z, result, input_precision="tf32x3")
    tl.store(out + fresh * out_row + width, result.to(out.dtype.element_ty), mask=new)
    tl.store(ring + (position % RING) * WIDTH + width, z, mask=new & (position >= keep))
    return z


@triton.jit
def _tile(reads, mixes, tile, DIM: tl.constexpr, SUB: tl.constexpr):
    """What a launch before prepared for outputs."""
    row, column, other = tl.arange(0, SUB)[:, None], tl.arange(0, DIM), tl.arange(0, SUB)
    at = row * DIM + column[None, :]
    read_k = tl.load(reads + tile * 2 * SUB * DIM + at)
    read_q = tl.load(reads + tile * 2 * SUB * DIM + SUB * DIM + at)
    return read_k, read_q, tl.load(mixes + tile * SUB * SUB + row * SUB + other[None, :])


@triton.jit
def _behind(writes, fades, tile, DIM: tl.constexpr, SUB: tl.constexpr):
    """What a launch before prepared for the state."""
    row, column = tl.arange(0, SUB)[:, None], tl.arange(0, DIM)
    written = tl.load(writes + tile * SUB * DIM + row * DIM + column[None, :])
    return written, tl.load(fades + tile * DIM + column)


@triton.jit
def _copy(
    own, cell, into_own: tl.constexpr,
    DIM: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, GRAIN: tl.constexpr,
):  # fmt: skip
    """Columns of the slot's state from an anchor's cell [DIM, WIDTH], or to it: a grain at a time,
    so that no program needs registers for two states."""
    column, width = tl.arange(0, DIM)[:, None], tl.arange(0, GRAIN)[None, :]
    # Other threads may read or have read what these write.
    tl.debug_barrier()
    for left in range(0, COLUMNS, GRAIN):
        mine, there = own + (left + width) * DIM + column, cell + column * WIDTH + left + width
        if into_own:
            tl.store(mine, tl.load(there))
        else:
            tl.store(there, tl.load(mine))
    tl.debug_barrier()


@triton.jit
def scan_few(
    v, reads, writes, mixes, fades, memory, places, states, stands, ring, out,
    firsts, rows, anchors, ends, advances, slots, anchor_frames, advance_frames,
    q, k, g, beta, keys, decays, strengths,
    v_row, memory_frame, heads, q_row, k_row, g_row, LIMIT,
    FRAMES: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr, SUB: tl.constexpr, GRAIN: tl.constexpr, BLOCK: tl.constexpr,
    BOUNDED: tl.constexpr, PRECISION: tl.constexpr, FUSED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid: (parts of V, heads, sequences). ``FUSED``: every part prepares its head's tiles, the
    first one keeps the rows. ``OVERLAP``: may begin while the launch that prepares still runs."""
    RING: tl.constexpr = 2 * CHUNK
    GRAINS: tl.constexpr = COLUMNS // GRAIN
    part, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, end = tl.load(firsts + sequence), tl.load(ends + sequence)
    anchor, advance = tl.load(anchors + sequence), tl.load(advances + sequence)
    row = tl.load(rows + sequence).to(tl.int64)
    slot = tl.load(slots + sequence).to(tl.int64) * heads + head
    if first < end:
        left = part * COLUMNS
        width, column = tl.arange(0, COLUMNS)[:, None], tl.arange(0, DIM)[None, :]
        own, inside = states + (slot * WIDTH + left) * DIM, width * DIM + column
        state = tl.load(own + inside, mask=first != anchor, other=0.0)
        stand = stands + (slot * (WIDTH // GRAIN) + part * GRAINS)
        stood = tl.load(stand)
        v += row * v_row + head * WIDTH + left
        ring += slot * RING * WIDTH + left
        out += (row * heads + head) * WIDTH + left
        base = (end - 1) // SUB * SUB
        value, known = _values(v, ring, base, first, end, v_row, WIDTH, COLUMNS, RING, SUB)
        if FUSED:
            q += row * q_row + head * DIM
            k += row * k_row + head * DIM
            g += row * g_row + head * DIM
            beta += row * heads + head
            keys, decays = keys + slot * RING * DIM, decays + slot * RING * DIM
            strengths += slot * RING
            query, key, decay, share = tile_inputs(
                q, k, g, beta, keys, decays, strengths, base, first, end,
                q_row, k_row, g_row, heads, DIM, RING, SUB,
            )  # fmt: skip
        start, keep = from_to(first, anchor, advance, stood, CHUNK, SUB)
        # The first tile's place, as the launch before has it.
        tile = (row // SUB + sequence * (RING // SUB + 2)) * heads + head
        last = tile + (base - start) // SUB * heads
        stored = tl.where(part == 0, keep, end)
        if OVERLAP:
            gdc_wait()
        if not FUSED:
            read_k, read_q, mix = _tile(reads, mixes, last, DIM, SUB)
        moves = (keep > start) | (first == anchor)
        number, offset = tl.load(places + head * 2), tl.load(places + head * 2 + 1)
        cell = memory + offset + left
        tile_reads, tile_writes = reads + tile * 2 * SUB * DIM, writes + tile * SUB * DIM
        tile_mixes, tile_fades = mixes + tile * SUB * SUB, fades + tile * DIM
        if moves | (start < base) | (advance > 0):
            if FUSED:
                for index in range((base - start) // SUB):
                    this = index * heads
                    prepare_tile(
                        q, k, g, beta, keys, decays, strengths,
                        tile_reads + this * 2 * SUB * DIM, tile_writes + this * SUB * DIM,
                        tile_mixes + this * SUB * SUB, tile_fades + this * DIM,
                        start + index * SUB, first, end, stored,
                        q_row, k_row, g_row, heads, LIMIT, DIM, BLOCK, RING, SUB, BOUNDED,
                        PRECISION, False,
                    )  # fmt: skip
                tl.debug_barrier()
            if first == anchor:
                frame = tl.load(anchor_frames + sequence * FRAMES + number).to(tl.int64)
                state = tl.zeros_like(state)
                if frame >= 0:
                    _copy(own, cell + frame * memory_frame, True, DIM, WIDTH, COLUMNS, GRAIN)
                    state = tl.load(own + inside)
            at = start
            for phase in tl.static_range(3):
                stop = advance if phase == 0 else (keep if phase == 1 else base)
                stop = tl.minimum(tl.maximum(stop, start), base)
                state = scanned(
                    state, v, ring, out, tile_reads, tile_writes, tile_mixes, tile_fades,
                    start, at, stop, first, end, keep, v_row, heads * WIDTH, heads,
                    DIM, WIDTH, COLUMNS, RING, SUB,
                )  # fmt: skip
                at = tl.maximum(at, stop)
                # Other threads may have read what these write, or read what they wrote.
                tl.debug_barrier()
                if phase == 0 and (advance > 0) & (advance <= base):
                    # By way of the slot's state, which is written again before the pass is done.
                    frame = tl.load(advance_frames + sequence * FRAMES + number).to(tl.int64)
                    tl.store(own + inside, state)
                    if frame >= 0:
                        _copy(own, cell + frame * memory_frame, False, DIM, WIDTH, COLUMNS, GRAIN)
                if phase == 1 and moves & (keep <= base):
                    tl.store(own + inside, state)
            # Nothing is loaded: the state stays laid out as the load above has it, or all programs
            # would wait for its first bytes before anything else is done.
            state = tl.load(own + inside, mask=end < first, other=state)
            # Asked for again, so that nothing of it occupies registers meanwhile.
            value, known = _values(v, ring, base, first, end, v_row, WIDTH, COLUMNS, RING, SUB)
            if FUSED:
                query, key, decay, share = tile_inputs(
                    q, k, g, beta, keys, decays, strengths, base, first, end,
                    q_row, k_row, g_row, heads, DIM, RING, SUB,
                )  # fmt: skip
            else:
                read_k, read_q, mix = _tile(reads, mixes, last, DIM, SUB)
        if FUSED:
            keep_inputs(
                keys, decays, strengths, key, decay, share, base, first, end, stored,
                DIM, RING, SUB,
            )  # fmt: skip
            key, total = key.to(tl.float32), tl.cumsum(decay, 0)
            of_key, of_query, t, mix = solved(
                query, key, total, share, q, k, g, keys, decays, base, first, end,
                q_row, k_row, g_row, LIMIT, DIM, BLOCK, RING, SUB, BOUNDED, PRECISION,
            )  # fmt: skip
            dtype = ring.dtype.element_ty
            read_k, read_q, mix = of_key.to(dtype), of_query.to(dtype), mix.to(dtype)
        z = _outputs(
            state, value, known, read_k, read_q, mix, ring, out,
            base, first, end, keep, heads * WIDTH, WIDTH, COLUMNS, RING, SUB,
        )  # fmt: skip
        if advance > base:
            # The pass ends where the anchor will stand, and the slot's state with it.
            if FUSED:
                written, fade = left_behind(key, total, t, SUB, PRECISION)
                written = written.to(z.dtype)
            else:
                written, fade = _behind(writes, fades, last, DIM, SUB)
            state = tl.dot(tl.trans(z), written, state * fade[None, :], input_precision="tf32x3")
            frame = tl.load(advance_frames + sequence * FRAMES + number).to(tl.int64)
            tl.debug_barrier()
            tl.store(own + inside, state)
            if frame >= 0:
                _copy(own, cell + frame * memory_frame, False, DIM, WIDTH, COLUMNS, GRAIN)
        if moves:
            tl.debug_barrier()
            tl.store(stand + tl.arange(0, GRAINS), tl.full((GRAINS,), keep, tl.int32))
