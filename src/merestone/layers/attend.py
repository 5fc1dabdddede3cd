"""Attention of a step's groups over pages: rows that see everything, and rows that choose.

Knows groups, pages and which of a sequence's rows lie here. Must not know projections. Where ranks
share the rows, results are parts: means over the rows held here, with their log-sum-exp as one
more column, for :func:`merestone.parallel.tokens.merge`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from merestone.layers.spans import Group
from merestone.ops.attention import TILE, attend, attend_part
from merestone.parallel.tokens import Shards

# Rows of (token, head) in one dense block, and elements of what a sparse block gathers or scores.
_BLOCK_ROWS = 256
BLOCK_ELEMENTS = 1 << 21


def room(query: Tensor, shards: Shards) -> Tensor:
    """Where the results for query [N, H, D] go: [N, H, D], or [N, H, D + 1] for parts."""
    if shards.whole:
        return torch.empty_like(query)
    return query.new_empty(*query.shape[:2], query.shape[2] + 1)


def attend_all(
    group: Group, query: Tensor, pages: Tensor, scale: float, shards: Shards, mixed: Tensor
) -> None:
    """Rows that see all tokens before them: query [N, H, D] over the rows of pages
    [num_frames, rows, D], into the same rows of ``mixed`` (:func:`room`)."""
    _, heads, width = query.shape
    keys = gather(pages, group.frames, group.ends, TILE)
    for block in group.blocks(max(_BLOCK_ROWS // heads, 1)):
        count, rows = block.rows.shape
        last = -(-max(int(block.seen.max()), 1) // TILE) * TILE
        q = query[block.rows].view(count, rows * heads, width)
        seen = block.seen.repeat_interleave(heads, 1)
        out = _attend(q, keys[:, :last], seen, scale, shards)
        block.put(mixed, out.view(count, rows, heads, -1))


def attend_chosen(
    group: Group,
    chosen: Tensor,
    counts: Tensor,
    query: Tensor,
    pages: Tensor,
    scale: float,
    shards: Shards,
    mixed: Tensor,
) -> None:
    """Rows that see the first ``counts`` [N, 1] of the positions ``chosen`` [N, W], ascending.

    The other arguments as :func:`attend_all` takes them. A row whose first position is negative
    could not choose: its result is not a number.
    """
    _, heads, dim = query.shape
    # Many rows choose from the same keys: bring those together first.
    keys = gather(pages, group.frames, group.ends, TILE)[0] if group.long else None
    size = BLOCK_ELEMENTS // (group.rows.shape[0] * chosen.shape[1] * dim)
    for block in group.blocks(max(size, 1)):
        rows = block.rows.flatten()
        tokens, count = chosen[rows], counts[rows]
        damaged = tokens[:, :1] < 0
        # Past a row's count the tokens are those of nobody: read token 0 instead.
        tokens = tokens.masked_fill((torch.arange(tokens.shape[1]) >= count) | damaged, 0)
        if not shards.whole:
            tokens, count = shards.select(tokens, count, TILE)
        own = _own_keys(block, tokens, pages) if keys is None else keys[tokens.flatten()]
        own = own.view(*tokens.shape, dim)
        if not shards.whole:
            # Here token 0 may be another rank's: what lies in its place may be anything.
            outside = torch.arange(tokens.shape[1]) >= count
            own = own.masked_fill(outside[:, :, None], 0.0)
        out = _attend(query[rows], own, count.expand(-1, heads), scale, shards)
        out = out.masked_fill(damaged[:, :, None], float("nan"))
        block.put(mixed, out.view(*block.rows.shape, heads, -1))


def _own_keys(block: Group, tokens: Tensor, pages: Tensor) -> Tensor:
    """The rows ``tokens`` [G R, V] of the block's segments, fp32."""
    page = pages.shape[1]
    tokens = tokens.view(block.rows.shape[0], -1)
    return pages[block.frames.gather(1, tokens // page), tokens % page].float()


def _attend(q: Tensor, keys: Tensor, seen: Tensor, scale: float, shards: Shards) -> Tensor:
    if shards.whole:
        return attend(q, keys, seen, scale)
    out, lse = attend_part(q, keys, seen, scale)
    return torch.cat([out, lse[:, :, None]], 2)


def gather(pages: Tensor, frames: Tensor, ends: Tensor, multiple: int) -> Tensor:
    """The first ``ends`` rows of several sequences: [G, S, D] fp32, zero past the ends.

    pages [num_frames, rows, D], frames [G, n], ends [G]; S is the next ``multiple`` of rows. What
    lies past an end belongs to nobody and may be anything, NaN included.
    """
    keys = pages[frames].flatten(1, 2)
    size = -(-max(int(ends.max()), 1) // multiple) * multiple
    keys = pad(keys, (0, 0, 0, size - keys.shape[1])).float()
    outside = torch.arange(size) >= ends[:, None]
    return keys.masked_fill_(outside[:, :, None], 0.0)
