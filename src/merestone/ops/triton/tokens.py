# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""A selection of tokens, cut down to those that one of several ranks holds.

Knows positions and how they are dealt. Must not know pages. Nothing is computed but addresses.
Definition: :meth:`merestone.parallel.tokens.Shards.select`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from merestone.ops.triton.launch import power_of_two

_BLOCK = 1024


@triton.jit(do_not_specialize=["rank"])
def _select_own(
    tokens, counts, out, held, rank,
    WIDTH: tl.constexpr, RUN: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (rows)."""
    row = tl.program_id(0).to(tl.int64)
    last = tl.load(counts + row)
    tokens += row * WIDTH
    out += row * WIDTH
    done = tl.zeros((), tl.int32)
    for start in range(0, last, BLOCK):
        at = start + tl.arange(0, BLOCK)
        token = tl.load(tokens + at, mask=at < last, other=-1)
        mine = (token >= 0) & (token // RUN % RANKS == rank)
        own = token // (RUN * RANKS) * RUN + token % RUN
        place = done + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(out + place, own, mask=mine)
        done += tl.sum(mine.to(tl.int32), 0)
    # No choice could be made from damaged keys: every rank says so.
    if tl.load(tokens, mask=last > 0, other=0) < 0:
        tl.store(out, -1)
        done = tl.full((), 1, tl.int32)
    tl.store(held + row, done)


def select_own(
    tokens: Tensor, counts: Tensor, *, run: int, ranks: int, rank: int
) -> tuple[Tensor, Tensor]:
    """Of the first ``counts`` [R] of ``tokens`` [R, W], ascending, those held here, as own rows:
    [R, W], and how many [R]. What follows them is undefined. All int32.

    A row whose first token is negative (see :func:`merestone.ops.triton.index.choose`) keeps one
    such.
    """
    rows, width = tokens.shape
    assert tokens.is_contiguous()
    assert tokens.dtype == counts.dtype == torch.int32
    out, held = torch.empty_like(tokens), torch.empty_like(counts)
    if rows:
        _select_own[(rows,)](
            tokens, counts, out, held, rank, WIDTH=width, RUN=run, RANKS=ranks,
            BLOCK=min(_BLOCK, power_of_two(width)), num_warps=4,
        )  # fmt: skip
    return out, held
