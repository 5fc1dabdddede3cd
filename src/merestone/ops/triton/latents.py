# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""What latent attention keeps of a row: its normed latent, and columns as they are, into pages.

Knows rows, positions and tables. Must not know requests. The norm has the bits of
`merestone.ops.triton.norms.rms_norm`.
"""

import triton
import triton.language as tl
from torch import Tensor

from merestone.ops.triton.launch import aligned, blocks, power_of_two
from merestone.ops.triton.norms import load_rows, scaled_norm, shape_of


@triton.jit(do_not_specialize=["M", "entries"])
def _write_latents(
    new, weight, pages, table, row_sequence, row_position, M, entries, new_row, page_frame, eps,
    PAGE: tl.constexpr, WIDTH: tl.constexpr, MORE: tl.constexpr, ROWS: tl.constexpr,
    PADDED: tl.constexpr, MORE_PADDED: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of ROWS rows). WIDTH columns are normed, MORE behind them copied."""
    wide, row, column, _ = load_rows(new, new_row, M, WIDTH, ROWS, PADDED)
    sequence = tl.load(row_sequence + row, mask=row < M, other=0).to(tl.int64)
    position = tl.load(row_position + row, mask=row < M, other=-1)
    kept = position >= 0
    entry = table + sequence * entries + position // PAGE
    frame = tl.load(entry, mask=kept, other=0).to(tl.int64)
    to = pages + frame * page_frame + (position % PAGE) * (WIDTH + MORE)
    normed = scaled_norm(wide, weight, column, eps, WIDTH, new.dtype.element_ty)
    tl.store(to + column, normed, mask=kept & (column < WIDTH))
    if MORE:
        column = tl.arange(0, MORE_PADDED)[None, :]
        inside = kept & (column < MORE)
        copied = tl.load(new + row * new_row + WIDTH + column, mask=inside)
        tl.store(to + WIDTH + column, copied, mask=inside)


def write_latents(
    new: Tensor,
    weight: Tensor,
    eps: float,
    pages: Tensor,
    table: Tensor,
    row_sequence: Tensor,
    row_position: Tensor,
) -> None:
    """Store rows [N, W] in the pages of their sequences, their first columns normed by ``weight``
    [R], R <= W. Rows may be strided; those of a negative position are not kept.

    pages [frames, page, W], a view into the arena; table [S, n] int32, frames of each sequence's
    pages.
    """
    (count, width), normed = new.shape, weight.shape[0]
    assert pages.shape[2] == pages.stride(1) == width, (new.shape, pages.shape)
    assert new.dtype == pages.dtype
    assert normed <= width
    assert table.is_contiguous()
    aligned(new, weight, pages)
    if count:
        rows, padded, warps = shape_of(normed)
        more = width - normed
        _write_latents[(blocks(count, rows),)](
            new, weight, pages, table, row_sequence, row_position, count, table.shape[1],
            new.stride(0), pages.stride(0), eps,
            PAGE=pages.shape[1], WIDTH=normed, MORE=more, ROWS=rows, PADDED=padded,
            MORE_PADDED=power_of_two(more), num_warps=warps, enable_fp_fusion=False,
        )  # fmt: skip
