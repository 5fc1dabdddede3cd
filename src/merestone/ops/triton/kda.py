# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Kimi delta attention from the anchor: the same two kernels for prefill, decode and verification.

Knows positions, anchors and caches of open rows. Must not know requests. Rows are taken in tiles of
SUB, at multiples of SUB. With S the state before a tile [K, V] and G the log decays cumulated since
its first row:

    N_ij = beta_i sum_d k_i k_j exp(G_i - G_j)  for j < i;  P_ij the same with q_i, for j <= i
    T = (I + N)^-1 diag(beta)
    z_i = v_i - (k_i exp(G_i)) S
    out_i = (q_i exp(G_i)) S + sum_j (P T)_ij z_j
    S' = exp(G_last) S + (T^T (k exp(G_last - G)))^T z

Everything that does not need the state is prepared for all tiles at once; the scan then passes over
them with two short products between a state and the next. Row i of a tile uses rows up to i, each
an element of its own in every product, so it has the same bits whichever rows come after it: a tile
of a prefill and one to which decoding adds row after row go through the same instructions.

Old rows of the first tiles (keys, decays, strengths, z) come from a slot's rings, the state before
them from the slot, too: where it stands is a multiple of SUB below every row that may still be
rolled back, and never above the next anchor until that is ordered. A pass that begins at its anchor
reads the anchor instead and leaves the slot as any other would. Definition:
`merestone.ops.naive.kda_recurrent`. Source: Kimi Linear (arXiv 2510.26692), section 3.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from merestone.ops.triton.kda_tiles import from_to, prepare
from merestone.ops.triton.launch import aligned, blocks
from merestone.ops.triton.rows import Cells, Sequences

SUB = 16
"""Rows of a tile: the smallest of a tensor core, and so free of charge at one row."""
# Columns of V that a program scans, and its warps.
_COLUMNS, _SCAN_WARPS = 64, 4
# Warps that prepare a tile, and the columns that they take at once where pairs have to be formed.
_WARPS, _BLOCK = 2, 32
# Decays are exp(G_i) exp(-G_j) while the second factor stays finite, and formed pair by pair for
# rows behind a stronger decay: as the row's own G says, so whatever rows come after it.
_EXPONENT = 80.0


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
def _scan(
    v, reads, writes, mixes, fades, memory, places, states, stands, ring, out,
    firsts, rows, anchors, ends, advances, slots, anchor_frames, advance_frames,
    v_row, memory_frame, heads,
    FRAMES: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    PARTS: tl.constexpr, CHUNK: tl.constexpr, SUB: tl.constexpr,
):  # fmt: skip
    """Grid: (PARTS of V, heads, sequences)."""
    RING: tl.constexpr = 2 * CHUNK
    part, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, end = tl.load(firsts + sequence), tl.load(ends + sequence)
    anchor, advance = tl.load(anchors + sequence), tl.load(advances + sequence)
    row = tl.load(rows + sequence).to(tl.int64)
    slot = tl.load(slots + sequence).to(tl.int64) * heads + head
    stand = stands + slot * PARTS + part
    start, keep = from_to(first, anchor, advance, tl.load(stand), CHUNK, SUB)
    if first < end:
        left = part * COLUMNS
        tile = (row // SUB + sequence * (RING // SUB + 2)) * heads + head
        width, column = tl.arange(0, COLUMNS)[:, None], tl.arange(0, DIM)[None, :]
        number, offset = tl.load(places + head * 2), tl.load(places + head * 2 + 1)
        cell = memory + offset + column * WIDTH + left + width
        own = states + (slot * WIDTH + left + width) * DIM + column
        if first == anchor:
            frame = tl.load(anchor_frames + sequence * FRAMES + number).to(tl.int64)
            state = tl.load(cell + frame * memory_frame, mask=frame >= 0, other=0.0)
        else:
            state = tl.load(own)
        at = start
        # To the new anchor, to where the slot's state shall stand, to the end. Not as a loop around
        # a pipelined one, which gave wrong sums on the device.
        for phase in tl.static_range(3):
            stop = tl.maximum(advance, start) if phase == 0 else (keep if phase == 1 else end)
            state = _scanned(
                state, v + row * v_row + head * WIDTH + left, ring + slot * RING * WIDTH + left,
                out + (row * heads + head) * WIDTH + left,
                reads + tile * 2 * SUB * DIM, writes + tile * SUB * DIM, mixes + tile * SUB * SUB,
                fades + tile * DIM, start, at, stop, first, end, keep,
                v_row, heads * WIDTH, heads, DIM, WIDTH, COLUMNS, RING, SUB,
            )  # fmt: skip
            at = tl.maximum(at, stop)
            # Other threads may have read what these write, or read what they wrote.
            tl.debug_barrier()
            if phase == 0 and advance > 0:
                frame = tl.load(advance_frames + sequence * FRAMES + number).to(tl.int64)
                tl.store(cell + frame * memory_frame, state, mask=frame >= 0)
            if phase == 1 and ((keep > start) | (first == anchor)):
                tl.store(own, state)
                tl.store(stand, keep)


@dataclass(frozen=True, slots=True)
class OpenRows:
    """Per-slot caches of one layer; position p lies in row p % 2 C of a ring.

    Rings of rows: ``keys`` [slots, H, 2 C, K] and ``values`` (z) [slots, H, 2 C, V] in the
    operands' dtype, ``decays`` [slots, H, 2 C, K] and ``strengths`` [slots, H, 2 C] fp32.
    ``states`` [slots, H, V, K] fp32, and ``stands`` [slots, H, parts] int32: at which position.

    Derived from raw rows and never part of a checkpoint: rebuilt by a pass from the anchor.
    """

    keys: Tensor
    decays: Tensor
    strengths: Tensor
    values: Tensor
    states: Tensor
    stands: Tensor


def open_rows_shapes(
    heads: int, dim: int, width: int, chunk: int, dtype: torch.dtype
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape behind the slots, and dtype, of each tensor of :class:`OpenRows`."""
    ring = 2 * chunk
    return {
        "keys": ((heads, ring, dim), dtype),
        "decays": ((heads, ring, dim), torch.float32),
        "strengths": ((heads, ring), torch.float32),
        "values": ((heads, ring, width), dtype),
        "states": ((heads, width, dim), torch.float32),
        "stands": ((heads, blocks(width, min(_COLUMNS, width))), torch.int32),
    }


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
    out: Tensor | None = None,
) -> Tensor:
    """The outputs of a step's rows, [N, H, V] in q's dtype; writes the cache and ordered anchors.

    A sequence either has at most 2 ``chunk`` rows since its anchor, the old ones in the cache, or
    all its rows since the anchor are among the step's (first = anchor): a prefill, or a rebuild.
    Rows at or after first may be rolled back, except those below an ordered anchor.

    Args:
        q, k: [N, H, K], l2-normalised, q scaled. v: [N, H, V], of q's dtype. Rows may be strided.
        g: [N, H, K] fp32, log decays, at most 0. beta: [N, H] fp32, dense.
        anchors: states [H cells of K, V] fp32.
        lowest: a lower bound of g that the model guarantees.
        out: where the outputs go (several launches may share one), or None.
    """
    rows, heads, dim = q.shape
    width = v.shape[2]
    columns = min(_COLUMNS, width)
    count = sequences.first.shape[0]
    _check(q, k, v, g, beta, anchors, cache, sequences, step, chunk)
    assert width % columns == 0, width
    if out is None:
        out = torch.empty(rows, heads, width, dtype=q.dtype, device=q.device)
    assert out.shape == (rows, heads, width)
    assert out.is_contiguous()
    if rows == 0:
        return out
    # A sequence's tiles begin at row // SUB of its first row, plus room for each one before it: as
    # many tiles as its old rows may take, and two that are not full.
    places = rows // SUB + count * (2 * chunk // SUB + 2)
    reads = torch.empty(places, heads, 2, SUB, dim, dtype=q.dtype, device=q.device)
    writes = torch.empty(places, heads, SUB, dim, dtype=q.dtype, device=q.device)
    mixes = torch.empty(places, heads, SUB, SUB, dtype=q.dtype, device=q.device)
    fades = torch.empty(places, heads, dim, dtype=torch.float32, device=q.device)
    tables = sequences.first, sequences.row, sequences.anchor, step.end, step.advance, step.slot
    parts = blocks(width, columns)
    common = {"DIM": dim, "PARTS": parts, "CHUNK": chunk, "SUB": SUB, "enable_fp_fusion": False}
    prepare[(blocks(rows, SUB * count), heads, count)](
        q, k, g, beta, cache.keys, cache.decays, cache.strengths, cache.stands,
        reads, writes, mixes, fades, *tables,
        q.stride(0), k.stride(0), g.stride(0), heads, _EXPONENT,
        BLOCK=min(_BLOCK, dim), BOUNDED=lowest is not None and -lowest * SUB <= _EXPONENT,
        PRECISION="tf32x3" if q.dtype == torch.float32 else "tf32",
        num_warps=_WARPS, num_stages=1, **common,
    )  # fmt: skip
    _scan[(parts, heads, count)](
        v, reads, writes, mixes, fades, anchors.memory, anchors.places, cache.states, cache.stands,
        cache.values, out, *tables, sequences.anchor_frames, step.advance_frames,
        v.stride(0), anchors.memory.stride(0), heads,
        FRAMES=step.advance_frames.shape[1], WIDTH=width, COLUMNS=columns,
        num_warps=_SCAN_WARPS, num_stages=3, **common,
    )  # fmt: skip
    return out


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    anchors: Cells,
    cache: OpenRows,
    sequences: Sequences,
    step: Pass,
    chunk: int,
) -> None:
    _, heads, dim = q.shape
    width = v.shape[2]
    assert q.dtype == k.dtype == v.dtype
    assert g.dtype == beta.dtype == anchors.memory.dtype == torch.float32
    assert q.stride(1) == k.stride(1) == g.stride(1) == dim, "heads lie behind each other"
    assert v.stride(1) == width, "heads lie behind each other"
    assert beta.is_contiguous()
    assert chunk % SUB == 0, chunk
    for name, (shape, dtype) in open_rows_shapes(heads, dim, width, chunk, q.dtype).items():
        tensor = getattr(cache, name)
        assert tensor.shape[1:] == shape, (name, tensor.shape)
        assert tensor.dtype == dtype, name
        assert tensor.is_contiguous(), name
    assert anchors.places.shape == (heads, 2)
    assert step.advance_frames.shape == sequences.anchor_frames.shape
    for table in (step.end, step.advance, step.slot, step.advance_frames):
        assert table.dtype == torch.int32
        assert table.is_contiguous()
    aligned(q, k, v, g, anchors.memory, cache.keys, cache.decays, cache.values, cache.states)
