# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The scan of delta attention: a state passes over the tiles of a sequence.

Knows what `merestone.ops.triton.kda` says a tile is, slots and anchors. Must not know how a tile is
prepared. Every way through it takes the same products, of one shape and orientation: the same bits.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from merestone.ops.triton.kda_tiles import from_to


@triton.jit
def _read(state, value, known, read_k, read_q, mix, old):
    """z and outputs [COLUMNS, SUB] of a tile."""
    seen = state.to(read_k.dtype)
    z = value.to(tl.float32) - tl.dot(seen, tl.trans(read_k), input_precision="tf32x3")
    # Rounded as the ring holds it: an old row must count as it did when it was new.
    z = tl.where(old, known, z.to(read_k.dtype))
    result = tl.dot(seen, tl.trans(read_q), input_precision="tf32x3")
    return z, tl.dot(z, tl.trans(mix), result, input_precision="tf32x3")


@triton.jit
def _scanned(
    state, v, ring, out, reads, writes, mixes, fades, start, begin, stop, first, end, keep,
    v_row, out_row, tile_rows,
    DIM: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, RING: tl.constexpr,
    SUB: tl.constexpr,
):  # fmt: skip
    """The state [COLUMNS, DIM] after the tiles of [begin, stop): stores outputs of new rows and
    their z. Pointers are at the head, those of tiles at the one of ``start``."""
    local, column = tl.arange(0, SUB), tl.arange(0, DIM)[None, :]
    width, near = tl.arange(0, COLUMNS)[:, None], tl.arange(0, SUB)[None, :]
    at = local[:, None] * DIM + column
    for base in range(begin, stop, SUB):
        tile = ((base - start) // SUB).to(tl.int64) * tile_rows
        position = base + local
        old, fresh = (position < first)[None, :], (position >= first) & (position < end)
        new, prepared = fresh[None, :], fresh[:, None]
        # A tile lies in one piece in a ring.
        away, turn = (base - first).to(tl.int64), ring + (base % RING) * WIDTH
        read_k = tl.load(reads + tile * 2 * SUB * DIM + at, mask=prepared, other=0.0)
        read_q = tl.load(reads + tile * 2 * SUB * DIM + SUB * DIM + at, mask=prepared, other=0.0)
        at_mix = mixes + tile * SUB * SUB + local[:, None] * SUB + near
        mix = tl.load(at_mix, mask=prepared, other=0.0)
        # Nobody reads the state after a last tile, so what that writes is not prepared.
        followed = (base + SUB < end) | (base < keep)
        written = tl.load(writes + tile * SUB * DIM + at, mask=followed, other=0.0)
        fade = tl.load(fades + tile * DIM + tl.arange(0, DIM), mask=followed, other=0.0)
        value = tl.load(v + away * v_row + (near * v_row + width), mask=new, other=0.0)
        known = tl.load(turn + (near * WIDTH + width), mask=old, other=0.0)
        z, result = _read(state, value, known, read_k, read_q, mix, old)
        state = tl.dot(z, written, state * fade[None, :], input_precision="tf32x3")
        at_out = out + away * out_row + (near * out_row + width)
        tl.store(at_out, result.to(out.dtype.element_ty), mask=new)
        tl.store(turn + (near * WIDTH + width), z, mask=new & (position >= keep)[None, :])
    return state


@triton.jit
def _pass(
    v, reads, writes, mixes, fades, memory, places, own, stand, ring, out,
    anchor_frames, advance_frames, first, end, anchor, advance, start, keep, head, left,
    v_row, memory_frame, heads,
    DIM: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, RING: tl.constexpr,
    SUB: tl.constexpr,
):  # fmt: skip
    """Any pass: all its tiles, the anchors and the slot's state."""
    width, column = tl.arange(0, COLUMNS)[:, None], tl.arange(0, DIM)[None, :]
    number, offset = tl.load(places + head * 2), tl.load(places + head * 2 + 1)
    cell = memory + offset + column * WIDTH + left + width
    if first == anchor:
        frame = tl.load(anchor_frames + number).to(tl.int64)
        state = tl.load(cell + frame * memory_frame, mask=frame >= 0, other=0.0)
    else:
        state = tl.load(own + width * DIM + column)
    at = start
    # To the new anchor, to where the slot's state shall stand, to the end. Not as a loop around
    # a pipelined one, which gave wrong sums on the device.
    for phase in tl.static_range(3):
        stop = tl.maximum(advance, start) if phase == 0 else (keep if phase == 1 else end)
        state = _scanned(
            state, v, ring, out, reads, writes, mixes, fades, start, at, stop, first, end, keep,
            v_row, heads * WIDTH, heads, DIM, WIDTH, COLUMNS, RING, SUB,
        )  # fmt: skip
        at = tl.maximum(at, stop)
        # Other threads may have read what these write, or read what they wrote.
        tl.debug_barrier()
        if phase == 0 and advance > 0:
            frame = tl.load(advance_frames + number).to(tl.int64)
            tl.store(cell + frame * memory_frame, state, mask=frame >= 0)
        if phase == 1 and ((keep > start) | (first == anchor)):
            tl.store(own + width * DIM + column, state)
            tl.store(stand, keep)


@triton.jit
def scan(
    v, reads, writes, mixes, fades, memory, places, states, stands, ring, out,
    firsts, rows, anchors, ends, advances, slots, anchor_frames, advance_frames,
    v_row, memory_frame, heads,
    FRAMES: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    PARTS: tl.constexpr, CHUNK: tl.constexpr, SUB: tl.constexpr, FEW: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid: (PARTS of V, heads, sequences).

    FEW: nearly every pass reads the slot's state in one tile and moves nothing. All it needs is
    asked for at once, before it is known whether the pass is such a one; the others ask again.
    OVERLAP: may begin while tiles are prepared. Up to the wait it reads only what the launch before
    `prepare` left (tables, the slot's state, its ring of z, v), none of which `prepare` writes, and
    writes nothing. Every program waits, so that the end of this launch is the end of both:
    what comes next is an ordinary launch, as `prepare` is.
    """
    RING: tl.constexpr = 2 * CHUNK
    part, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, end = tl.load(firsts + sequence), tl.load(ends + sequence)
    anchor, advance = tl.load(anchors + sequence), tl.load(advances + sequence)
    row = tl.load(rows + sequence).to(tl.int64)
    slot = tl.load(slots + sequence).to(tl.int64) * heads + head
    if first < end:
        left = part * COLUMNS
        width, column = tl.arange(0, COLUMNS)[:, None], tl.arange(0, DIM)[None, :]
        local, near = tl.arange(0, SUB), tl.arange(0, SUB)[None, :]
        own, stand = states + (slot * WIDTH + left) * DIM, stands + slot * PARTS + part
        stood = tl.load(stand)
        v += row * v_row + head * WIDTH + left
        ring += slot * RING * WIDTH + left
        out += (row * heads + head) * WIDTH + left
        last = (end - 1) // SUB * SUB
        position = last + local
        old, fresh = (position < first)[None, :], (position >= first) & (position < end)
        new, prepared = fresh[None, :], fresh[:, None]
        away, turn = (last - first).to(tl.int64), ring + (last % RING) * WIDTH
        state = tl.load(own + width * DIM + column, mask=first != anchor, other=0.0)
        value = tl.load(v + away * v_row + (near * v_row + width), mask=new, other=0.0)
        known = tl.load(turn + (near * WIDTH + width), mask=old, other=0.0)
        start, keep = from_to(first, anchor, advance, stood, CHUNK, SUB)
        tile = (row // SUB + sequence * (RING // SUB + 2)) * heads + head
        reads, writes = reads + tile * 2 * SUB * DIM, writes + tile * SUB * DIM
        mixes, fades = mixes + tile * SUB * SUB, fades + tile * DIM
        if OVERLAP:
            gdc_wait()
        moves = (keep > start) | (first == anchor) | (advance > 0)
        if moves | (start < last) | (not FEW):
            _pass(
                v, reads, writes, mixes, fades, memory, places, own, stand, ring, out,
                anchor_frames + sequence * FRAMES, advance_frames + sequence * FRAMES,
                first, end, anchor, advance, start, keep, head, left,
                v_row, memory_frame, heads, DIM, WIDTH, COLUMNS, RING, SUB,
            )  # fmt: skip
        else:
            at = local[:, None] * DIM + column
            read_k = tl.load(reads + at, mask=prepared, other=0.0)
            read_q = tl.load(reads + SUB * DIM + at, mask=prepared, other=0.0)
            mix = tl.load(mixes + local[:, None] * SUB + near, mask=prepared, other=0.0)
            z, result = _read(state, value, known, read_k, read_q, mix, old)
            at_out = out + away * heads * WIDTH + (near * (heads * WIDTH) + width)
            tl.store(at_out, result.to(out.dtype.element_ty), mask=new)
            tl.store(turn + (near * WIDTH + width), z, mask=new & (position >= keep)[None, :])
    elif OVERLAP:
        gdc_wait()
