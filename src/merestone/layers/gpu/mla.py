"""Multi-head latent attention with the pooled sparse index, and without one, on a GPU.

Knows its CPU counterparts, whose weights and fields it has. Must not know who owns pages. With an
index every row selects; one that sees no more than it may choose selects all, in order, so there is
one path for short and long contexts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from merestone.layers.dense_mla import DenseMlaLayer
from merestone.layers.gpu.ranks import choose_of_all, merge_ranks, summed_linear
from merestone.layers.gpu.step import DeviceState, Step
from merestone.layers.mla import Indexer, MlaLayer
from merestone.layers.state import Field
from merestone.ops.triton.attention import Keys, attend
from merestone.ops.triton.attention_wide import attend_wide, fits
from merestone.ops.triton.gemm import linear
from merestone.ops.triton.index import choose, members, pool_scores, write_pools
from merestone.ops.triton.latents import write_latents
from merestone.ops.triton.norms import layer_norm, rms_norm
from merestone.ops.triton.pages import write_rows
from merestone.parallel.tokens import join
from merestone.parallel.world import World

_INDEX_EPS = 1e-6
# Rows of the indexer's joint projection come in whole vectors.
_VECTOR = 16
# Scores that exist at once: longer contexts are scored a block of rows at a time.
_MOST_SCORES = 1 << 28


class GpuIndexer:
    """Chooses tokens."""

    def __init__(self, indexer: Indexer, device: str) -> None:
        s = self.shape = indexer.shape
        self.layer = indexer.layer
        self._neighbours = indexer.neighbours
        inputs = indexer._inputs.to(device)
        spare = -inputs.shape[0] % _VECTOR
        self._inputs = torch.cat([inputs, inputs.new_zeros(spare, s.hidden)])
        self._splits = [*indexer._splits, spare]
        self._query = indexer._query.to(device)
        self._norm = indexer._norm.to(device)
        self._shift = indexer._shift.to(device)
        self._positions = indexer._positions.to(device)

    def forward(
        self, x: Tensor, residual: Tensor, step: Step, state: DeviceState
    ) -> tuple[Tensor, Tensor]:
        """Tokens chosen for each row, [N, width] int32, and how many [N]: x [N, hidden], residual
        [N, q_rank]. Keeps the batch's raw rows and the pools they complete. Where ranks share
        tokens, those held here, as own rows."""
        s = self.shape
        raw, gate, weights, _ = torch.split(linear(x, self._inputs), self._splits, 1)
        key = layer_norm(raw, self._norm, self._shift, _INDEX_EPS)
        kept = [state.rows(self.layer, name) for name in ("kk", "ga")]
        table = step.sequences.open_pages
        for rows, pages in zip((key, gate), kept, strict=True):
            write_rows(rows, pages, table, step.row_sequence, step.row_position, step.floor)
        pools = state.rows(self.layer, "pool")
        write_pools(
            key, gate, kept[0], kept[1], self._positions, pools, step.full_pages,
            step.pools[0], step.pools[1], step.sequences,
            None if step.held is None else step.held.pools,
        )  # fmt: skip
        query = linear(residual, self._query).view(-1, s.index_heads, s.index_dim)
        longest = (step.longest if step.held is None else step.held.longest) // s.index_pool
        each = max(_MOST_SCORES // max(longest, 1), 1)
        chosen = [
            self._choose(query[at], weights[at], pools, step, at, longest)
            for at in (slice(i, i + each) for i in range(0, x.shape[0], each))
        ]
        if len(chosen) == 1:
            return chosen[0]
        tokens, counts = zip(*chosen, strict=True)
        return torch.cat(tokens), torch.cat(counts)

    def _choose(
        self, query: Tensor, weights: Tensor, pools: Tensor, step: Step, at: slice, longest: int
    ) -> tuple[Tensor, Tensor]:
        s = self.shape
        held, k = step.held, s.index_topk // s.index_pool
        seen = step.seen[at]
        sees = seen if held is None else held.seen[at]
        complete = torch.div(sees, s.index_pool, rounding_mode="floor")
        scores = pool_scores(
            query, weights, pools, step.full_pages, step.row_sequence[at], complete, longest=longest
        )
        if held is None:
            return members(choose(scores, complete, k), seen, s.index_pool, s.width)
        best = choose_of_all(scores, complete, k, s.index_pool, held.shards, self._neighbours)
        return held.select(*members(best, seen, s.index_pool, s.width))


class GpuMla:
    """One layer; the weights of ``layer`` on ``device``."""

    def __init__(self, layer: MlaLayer, device: str) -> None:
        s = self.shape = layer.shape
        self.layer = layer.layer
        self._world = layer.world
        self._fields = layer.fields()
        self._splits = layer._splits
        self._inputs = layer._inputs.to(device)
        self._q_norm = layer._q_norm.to(device)
        self._kv_norm = layer._kv_norm.to(device)
        self._query = layer._query.to(device)
        self._absorb, self._values = absorbed(layer, device)
        self._out = layer._out.to(device)
        self._indexer = GpuIndexer(layer.indexer, device) if layer.indexer else None
        assert s.kv_rank % _VECTOR == 0, s.kv_rank

    def fields(self) -> tuple[Field, ...]:
        return self._fields

    def forward(
        self,
        x: Tensor,
        step: Step,
        state: DeviceState,
        selection: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """[N, hidden] -> [N, hidden] and what was chosen; ``selection``: the previous layer's."""
        s = self.shape
        residual, latents = self.inputs(x)
        pages = state.rows(self.layer, "latent")
        self.keep(latents, pages, step.full_pages, step.row_sequence, step.own_position)
        if self._indexer is not None:
            selection = self._indexer.forward(x, residual, step, state)
        assert selection is not None
        tokens, counts = selection
        mixed = attend_ranks(
            self.queries(residual), Keys(pages, step.full_pages), step, counts, s.scale,
            self._world, longest=s.width, selection=tokens,
        )  # fmt: skip
        return self.outputs(mixed), selection

    def inputs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[N, hidden] -> what queries are made of, [N, q_rank], and raw latents [N, kv_rank]."""
        q, kv = torch.split(linear(x, self._inputs), self._splits, 1)
        return rms_norm(q, self._q_norm, self.shape.rms_eps), kv

    def keep(
        self, latents: Tensor, pages: Tensor, table: Tensor, sequence: Tensor, position: Tensor
    ) -> None:
        """Store raw latents [N, kv_rank], normed, in the pages of their sequences."""
        eps = self.shape.rms_eps
        write_latents(latents, self._kv_norm, eps, pages, table, sequence, position)

    def queries(self, residual: Tensor) -> Tensor:
        """[N, q_rank] -> [N, H, kv_rank]: each head's query, seen through its keys."""
        query = linear(residual, self._query).view(-1, self.shape.heads, self.shape.key_dim)
        return linear(query.transpose(0, 1), self._absorb).transpose(0, 1).contiguous()

    def outputs(self, mixed: Tensor) -> Tensor:
        """Mixed latents [N, H, kv_rank] -> [N, hidden]."""
        return summed_linear(spread(mixed, self._values), self._out, self._world)


class GpuDenseMla:
    """One layer without an index; the weights of ``layer`` on ``device``."""

    def __init__(self, layer: DenseMlaLayer, device: str) -> None:
        self.shape = layer.shape
        self.layer = layer.layer
        self._world = layer.world
        self._fields = layer.fields()
        queries, *latent = layer._splits
        self._splits = [queries, sum(latent)]
        self._inputs = layer._inputs.to(device)
        self._norm = layer._norm.to(device)
        self._absorb, self._values = absorbed(layer, device)
        self._out = layer._out.to(device)

    def fields(self) -> tuple[Field, ...]:
        return self._fields

    def forward(self, x: Tensor, step: Step, state: DeviceState) -> Tensor:
        """[N, hidden] -> [N, hidden]; writes the batch's rows."""
        s = self.shape
        q, row = torch.split(linear(x, self._inputs), self._splits, 1)
        pages = state.rows(self.layer, "latent")
        at = step.full_pages, step.row_sequence, step.own_position
        write_latents(row, self._norm, s.latent_eps, pages, *at)
        by_head = q.view(-1, s.heads, s.key_dim + s.shared_dim)
        own = linear(by_head[:, :, : s.key_dim].transpose(0, 1), self._absorb).transpose(0, 1)
        query = torch.cat([own, by_head[:, :, s.key_dim :]], 2)  # [N, H, kv_rank + shared_dim]
        held = step.held
        seen, longest = (step.seen, step.longest) if held is None else (held.seen, held.longest)
        mixed = attend_ranks(
            query, Keys(pages, step.full_pages), step, seen, s.scale, self._world, longest=longest
        )
        out = spread(mixed[:, :, : s.kv_rank], self._values)
        return summed_linear(out, self._out, self._world)


def attend_ranks(
    query: Tensor,
    keys: Keys,
    step: Step,
    seen: Tensor,
    scale: float,
    world: World,
    *,
    longest: int,
    selection: Tensor | None = None,
) -> Tensor:
    """:func:`merestone.ops.triton.attention.attend` for this rank's heads, in the query's dtype.
    Where ranks share tokens, ``seen`` and ``selection`` are of those held here."""
    together = step.held is not None
    given = join(query, world.neighbours) if together else query, keys, step.work, seen, scale
    out_dtype = torch.float32 if together else None
    if step.wide:
        assert selection is None
        mixed, lse = attend_wide(*given, longest=longest, out_dtype=out_dtype)
    else:
        mixed, lse = attend(
            *given, longest=longest, split=step.split, selection=selection, out_dtype=out_dtype
        )
    return merge_ranks(mixed, lse, world.neighbours, query.dtype) if together else mixed


def takes_wide(layers: Sequence[object], state: DeviceState) -> bool:
    """Whether attention of many rows may take the wide items: no layer of ``layers`` selects what
    it sees, and the pages of all of them fit."""
    dense = [layer for layer in layers if isinstance(layer, GpuDenseMla)]
    selects = any(isinstance(layer, GpuMla) for layer in layers)
    return not selects and all(fits(state.rows(layer.layer, "latent")) for layer in dense)


def absorbed(layer: MlaLayer | DenseMlaLayer, device: str) -> tuple[Tensor, Tensor]:
    """A layer's key and value projections as products of heads, in the model's dtype: [H, kv_rank,
    key_dim] and [H, value_dim, kv_rank]."""
    dtype = layer._out.dtype
    keys = layer._absorb.transpose(1, 2).to(device, dtype).contiguous()
    return keys, layer._values.to(device, dtype).contiguous()


def spread(mixed: Tensor, values: Tensor) -> Tensor:
    """Mixed latents [N, H, kv_rank] through the heads' value projections: [N, H value_dim]."""
    out = linear(mixed.transpose(0, 1), values)  # [H, N, value_dim]
    return out.transpose(0, 1).reshape(mixed.shape[0], -1)
