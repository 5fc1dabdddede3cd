"""Kimi delta attention from the anchor: the same two launches for prefill, decode and verification.

Knows positions, anchors and caches of open rows. Must not know requests. Rows are taken in tiles of
SUB, at multiples of SUB. With S the state before a tile [K, V] and G the log decays cumulated since
its first row:

    N_ij = beta_i sum_d k_i k_j exp(G_i - G_j)  for j < i;  P_ij the same with q_i, for j <= i
    T = (I + N)^-1 diag(beta)
    z_i = v_i - (k_i exp(G_i)) S
    out_i = (q_i exp(G_i)) S + sum_j (P T)_ij z_j
    S' = exp(G_last) S + (T^T (k exp(G_last - G)))^T z

Everything that does not need the state is prepared for all tiles at once; the scan then passes over
them with two short products between a state and the next. Where the device can, the scan begins
beside the preparation: what it reads of the slot is there by the time it may go on. Row i of a tile
uses rows up to i, each an element of its own in every product, so it has the same bits whichever
rows come after it: a tile of a prefill and one to which decoding adds row after row go through the
same instructions.

Old rows of the first tiles (keys, decays, strengths, z) come from a slot's rings, the state before
them from the slot, too: where it stands is a multiple of SUB below every row that may still be
rolled back, and never above the next anchor until that is ordered. A pass that begins at its anchor
reads the anchor instead and leaves the slot as any other would. Definition:
`merestone.ops.naive.kda_recurrent`. Source: Kimi Linear (arXiv 2510.26692), section 3.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from merestone.ops.triton.kda_scan import scan
from merestone.ops.triton.kda_tiles import prepare
from merestone.ops.triton.launch import aligned, blocks, overlaps
from merestone.ops.triton.rows import Cells, Sequences

SUB = 16
"""Rows of a tile: the smallest of a tensor core, and so free of charge at one row."""
# Columns of V that a program scans, its warps, and the loads in flight from tile to tile.
_COLUMNS, _SCAN_WARPS, _STAGES = 64, 4, 3
# Registers of a thread where a pass is one tile: four programs on a multiprocessor, since they all
# wait for memory. Only passes that move a state spill. Not of fp32, whose pieces take them all.
_FEW_REGISTERS = 128
# Warps that prepare a tile, and the columns that they take at once where pairs have to be formed.
_WARPS, _BLOCK = 2, 32
# Decays are exp(G_i) exp(-G_j) while the second factor stays finite, and formed pair by pair for
# rows behind a stronger decay: as the row's own G says, so whatever rows come after it.
_EXPONENT = 80.0


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
    few: bool = True,
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
        few: whether no more rows than a tile for each sequence mean that none has more, as in
            decoding and verification; a piece of a prompt beside them may have all. Chooses the
            kernel, never a bit.
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
    parts, tiles = blocks(width, columns), blocks(rows, SUB * count)
    few, overlap = few and tiles == 1, overlaps(q.device)
    common = {
        "DIM": dim, "PARTS": parts, "CHUNK": chunk, "SUB": SUB, "OVERLAP": overlap,
        "enable_fp_fusion": False,
    }  # fmt: skip
    prepare[(tiles, heads, count)](
        q, k, g, beta, cache.keys, cache.decays, cache.strengths, cache.stands,
        reads, writes, mixes, fades, *tables,
        q.stride(0), k.stride(0), g.stride(0), heads, _EXPONENT,
        BLOCK=min(_BLOCK, dim), BOUNDED=lowest is not None and -lowest * SUB <= _EXPONENT,
        PRECISION="tf32x3" if q.dtype == torch.float32 else "tf32",
        num_warps=_WARPS, num_stages=1, **common,
    )  # fmt: skip
    # Both kernels of the scan have the same bits.
    scan[(parts, heads, count)](
        v, reads, writes, mixes, fades, anchors.memory, anchors.places, cache.states, cache.stands,
        cache.values, out, *tables, sequences.anchor_frames, step.advance_frames,
        v.stride(0), anchors.memory.stride(0), heads,
        FRAMES=step.advance_frames.shape[1], WIDTH=width, COLUMNS=columns, FEW=few,
        num_warps=_SCAN_WARPS, num_stages=_STAGES, launch_pdl=overlap,
        maxnreg=_FEW_REGISTERS if few and q.dtype != torch.float32 else None, **common,
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
