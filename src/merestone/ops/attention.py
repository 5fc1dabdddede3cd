"""Attention over rows of keys (latents in the absorbed form, which are their own values, or keys
and values), in tiles of keys at fixed places.

Knows rows, keys and how many each row sees. Must not know pages or selections. A row's bits do not
depend on how many masked tiles follow its own: the maximum is exact, and the tiles' sums are added
in order, where trailing zeros change nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from merestone.ops.gemm import bmm

TILE = 64
"""Keys of a tile. A constant of the numerics, like the chunk."""


def attend(
    q: Tensor,
    keys: Tensor,
    seen: Tensor,
    scale: float,
    values: Tensor | None = None,
    first: Tensor | None = None,
) -> Tensor:
    """softmax(scale q keys^T) values over the keys [first, seen) of each row.

    Args:
        q: [G, M, L] fp32. keys: [G, S, L] fp32, S a multiple of TILE, finite everywhere (a masked
            key's weight is zero, but zero times NaN is NaN). seen: [G, M] int64, at least 1.
        values: [G, S, L] fp32, as the keys; None: the keys themselves.
        first: [G, M] int64, below ``seen``; None: 0.

    Returns:
        [G, M, L] fp32.
    """
    mixed, total, _ = _weighted(q, keys, seen, scale, values, first)
    return mixed.div_(total)


def attend_part(q: Tensor, keys: Tensor, seen: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """:func:`attend` over a part of the keys, with the log-sum-exp [G, M] of the scores.

    ``seen`` may be 0: the row is then zero and its log-sum-exp -inf.
    """
    mixed, total, highest = _weighted(q, keys, seen, scale)
    none = total == 0.0
    # The best key's weight is 1. (log1p: a plain log is not known to ignore an element's place.)
    lse = (total - 1.0).log1p_().add_(highest).masked_fill_(none, float("-inf"))
    return mixed.div_(total.masked_fill(none, 1.0)), lse[:, :, 0]


def _weighted(
    q: Tensor,
    keys: Tensor,
    seen: Tensor,
    scale: float,
    values: Tensor | None = None,
    first: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted values [G, M, L], weights' sum [G, M, 1] and the highest score [G, M, 1] (or 0)."""
    groups, rows, dim = q.shape
    count = keys.shape[1] // TILE
    assert keys.shape[1] % TILE == 0, keys.shape
    tiles = keys.reshape(groups * count, TILE, dim)
    if groups == 1:
        each = q.expand(count, rows, dim)
    else:
        each = q[:, None].expand(groups, count, rows, dim).reshape(-1, rows, dim)
    scores = bmm(each, tiles.transpose(1, 2)).view(groups, count, rows, TILE) * scale
    column = torch.arange(count * TILE).view(count, 1, TILE)
    scores.masked_fill_(column >= seen[:, None, :, None], float("-inf"))
    if first is not None:
        scores.masked_fill_(column < first[:, None, :, None], float("-inf"))
    highest = scores.amax((1, 3), keepdim=True)
    highest = highest.masked_fill(highest == float("-inf"), 0.0)
    weights = (scores - highest).exp_()
    total = in_order(weights.sum(-1, keepdim=True))
    if values is not None:
        tiles = values.reshape(groups * count, TILE, dim)
    mixed = bmm(weights.view(-1, rows, TILE), tiles).view(groups, count, rows, dim)
    return in_order(mixed), total, highest[:, 0]


def in_order(parts: Tensor) -> Tensor:
    """[G, n, ...] -> [G, ...], summed over n from the first to the last."""
    total = parts[:, 0].clone()
    for i in range(1, parts.shape[1]):
        total += parts[:, i]
    return total
