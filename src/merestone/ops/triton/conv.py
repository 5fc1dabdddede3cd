# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The short causal convolution of a recurrent layer, over rows that lie in three places.

Knows positions. Must not know requests. Taps are added from the oldest to the newest, in fp32; the
result is rounded once, after the SiLU, as transformers does. Every element is computed alone, so
its bits follow from its own taps.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from merestone.ops.triton.elementwise import silu
from merestone.ops.triton.launch import aligned, blocks
from merestone.ops.triton.rows import Cells, Sequences

_BLOCK = 1024


@triton.jit(do_not_specialize=["page_entries"])
def _conv(
    new,
    pages,
    memory,
    places,
    weight,
    out,
    row_sequence,
    row_position,
    first,
    row,
    anchor,
    open_pages,
    anchor_frames,
    page_entries,
    ANCHOR_FRAMES: tl.constexpr,
    new_row,
    page_frame,
    memory_frame,
    PAGE: tl.constexpr,
    TAPS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (rows, blocks of channels)."""
    output = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    sequence = tl.load(row_sequence + output).to(tl.int64)
    position = tl.load(row_position + output)
    start, base = tl.load(first + sequence), tl.load(anchor + sequence)
    total = tl.zeros((BLOCK,), tl.float32)
    for tap in tl.static_range(TAPS):
        at = position - (TAPS - 1) + tap
        exists = True
        if at >= start:
            source = new + (tl.load(row + sequence) + at - start).to(tl.int64) * new_row
        elif at >= base:
            frame = tl.load(open_pages + sequence * page_entries + at // PAGE).to(tl.int64)
            source = pages + frame * page_frame + (at % PAGE) * WIDTH
        else:
            cell = places + (at - base + (TAPS - 1)) * 2
            number = sequence * ANCHOR_FRAMES + tl.load(cell)
            frame = tl.load(anchor_frames + number).to(tl.int64)
            exists = frame >= 0
            source = memory + frame * memory_frame + tl.load(cell + 1)
        value = tl.load(source + column, mask=inside & exists, other=0.0).to(tl.float32)
        total += value * tl.load(weight + tap * WIDTH + column, mask=inside, other=0.0)
    to = out + output.to(tl.int64) * WIDTH + column
    tl.store(to, silu(total).to(out.dtype.element_ty), mask=inside)


def conv(
    new: Tensor,
    pages: Tensor,
    tail: Cells,
    weight: Tensor,
    row_sequence: Tensor,
    row_position: Tensor,
    sequences: Sequences,
) -> Tensor:
    """silu(sum over taps) of R rows, anywhere at or after their anchors: [R, W] in new's dtype.

    Args:
        new: [N, W] the step's raw rows. pages: [frames, page, W] those of the open pages (a view
            into the arena). tail: the rows before each anchor, [taps - 1, W] as cells.
        weight: [taps, W] fp32, oldest tap first.
        row_sequence, row_position: [R] int32, the rows wanted.
    """
    taps, width = weight.shape
    rows = row_sequence.shape[0]
    assert new.shape[1] == pages.shape[2] == width, (new.shape, pages.shape, weight.shape)
    assert new.dtype == pages.dtype == tail.memory.dtype
    assert pages.stride(1) == width
    assert tail.places.shape == (taps - 1, 2), tail.places.shape
    assert sequences.anchor_frames.shape[1] > 0, "the zero state is a frame of -1, not none"
    assert row_sequence.dtype == row_position.dtype == torch.int32
    out = torch.empty(rows, width, dtype=new.dtype, device=new.device)
    aligned(new, pages, tail.memory, weight, out)
    if rows == 0:
        return out
    _conv[(rows, blocks(width, _BLOCK))](
        new,
        pages,
        tail.memory,
        tail.places,
        weight,
        out,
        row_sequence,
        row_position,
        sequences.first,
        sequences.row,
        sequences.anchor,
        sequences.open_pages,
        sequences.anchor_frames,
        sequences.open_pages.shape[1],
        sequences.anchor_frames.shape[1],
        new.stride(0),
        pages.stride(0),
        tail.memory.stride(0),
        PAGE=pages.shape[1],
        TAPS=taps,
        WIDTH=width,
        BLOCK=_BLOCK,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out


def conv_naive(rows: Tensor, weight: Tensor) -> Tensor:
    """The definition for one sequence from its zero state: rows [T, W] -> [T, W] fp32."""
    taps = weight.shape[0]
    padded = torch.nn.functional.pad(rows.float(), (0, 0, taps - 1, 0))
    total = sum(padded[i : i + rows.shape[0]] * weight[i] for i in range(taps))
    assert isinstance(total, Tensor)
    return torch.nn.functional.silu(total)
