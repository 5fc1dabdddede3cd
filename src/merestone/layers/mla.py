"""Multi-head latent attention without positions, with the pooled sparse index.

Knows its weights' roles and its state: one latent a token, one pooled index key a pool, and the
raw index rows of the open chunk. Must not know who owns pages.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from merestone.layers.attend import BLOCK_ELEMENTS, attend_all, attend_chosen, gather, room
from merestone.layers.spans import Spans, spans
from merestone.layers.state import Batch, Field, Homes, StateViews
from merestone.layers.weights import Weights
from merestone.ops.attention import TILE
from merestone.ops.elementwise import layer_norm, rms_norm
from merestone.ops.gemm import bmm, linear
from merestone.ops.index import (
    candidates,
    choose,
    choose_candidates,
    members,
    pool,
    pool_scores,
)
from merestone.parallel.products import summed_linear
from merestone.parallel.tokens import join, merge

_INDEX_EPS = 1e-6
_TARGET = Homes()


@dataclass(frozen=True, slots=True)
class MlaShape:
    """``index_topk`` counts tokens, a multiple of ``index_pool``, the tokens of a pool."""

    hidden: int
    heads: int
    q_rank: int
    kv_rank: int
    key_dim: int
    value_dim: int
    index_heads: int
    index_dim: int
    index_topk: int
    index_pool: int
    rms_eps: float

    @property
    def scale(self) -> float:
        scale: float = self.key_dim**-0.5
        return scale

    @property
    def dense_limit(self) -> int:
        """A row that sees at most this many tokens selects them all."""
        return self.index_topk + self.index_pool - 1

    @property
    def width(self) -> int:
        """Keys gathered for a row that selects, in whole tiles."""
        return -(-self.dense_limit // TILE) * TILE


class Indexer:
    """Chooses tokens. ``prefix`` ends in "indexer."."""

    def __init__(
        self, shape: MlaShape, layer: int, prefix: str, weights: Weights, homes: Homes
    ) -> None:
        self.neighbours = weights.world.neighbours
        self.shape = shape
        self.layer = layer
        self.homes = homes
        heads, dim = shape.index_heads, shape.index_dim
        self._query = weights.take(f"{prefix}wq_b.weight", (heads * dim, shape.q_rank))
        inputs = ("wk.weight", "index_kpool_compress_gate", "weights_proj.weight")
        self._splits = [dim, dim, heads]
        self._inputs = weights.stack(
            tuple(prefix + name for name in inputs), (dim, dim, heads), shape.hidden
        )
        self._norm = weights.take(f"{prefix}k_norm.weight", (dim,))
        self._shift = weights.take(f"{prefix}k_norm.bias", (dim,))
        self._positions = weights.fp32(f"{prefix}index_kpool_compress_ape", (shape.index_pool, dim))

    def fields(self) -> tuple[Field, ...]:
        s, homes, dtype = self.shape, self.homes, self._query.dtype
        return (
            Field(self.layer, "pool", homes.rows, (s.index_dim,), dtype, every=s.index_pool),
            Field(self.layer, "kk", homes.raw, (s.index_dim,), dtype),
            Field(self.layer, "ga", homes.raw, (s.index_dim,), dtype),
        )

    def forward(self, x: Tensor, residual: Tensor, plan: Spans, state: StateViews) -> Tensor | None:
        """Choose tokens for the sparse rows: [N, width] int64, or None if there are none.

        x [N, hidden], residual [N, q_rank]. Keeps the batch's raw rows and the pools they complete.
        """
        s = self.shape
        raw, gate, weights = torch.split(linear(x, self._inputs), self._splits, 1)
        key = layer_norm(raw, self._norm, self._shift, _INDEX_EPS)
        keys, gates = self._keep("kk", key, plan, state), self._keep("ga", gate, plan, state)
        if plan.members.shape[0]:
            pages = state.rows(self.layer, "pool")
            plan.pool_writes.write(pages, pool(keys, gates, self._positions))
        if not plan.sparse:
            return None
        query = linear(residual, self._query).float().view(-1, s.index_heads, s.index_dim)
        weights = weights.float() * s.index_heads**-0.5
        best = self._best(query, weights, plan, state)
        return members(best, plan.seen // s.index_pool, s.index_pool, s.width)

    def _keep(self, name: str, rows: Tensor, plan: Spans, state: StateViews) -> Tensor:
        """Store raw rows; return those of the pools that become complete, [n, pool, dim]."""
        view = state.rows(self.layer, name)
        table = torch.cat([plan.open_reads.read(view), rows])
        plan.open_writes.write(view, rows[plan.kept])
        return table[plan.members]

    def _best(self, query: Tensor, weights: Tensor, plan: Spans, state: StateViews) -> Tensor:
        """The sparse rows' best pools, [N, k] ascending. Other rows of it mean nothing.

        Ranks that share the pools score their own, and then choose from all ranks' candidates.
        """
        s = self.shape
        shards, k = state.shards(self.homes.rows), s.index_topk // s.index_pool
        pages = state.rows(self.layer, "pool")
        best = torch.zeros(query.shape[0], k, dtype=torch.int64)
        values = None if shards.whole else torch.zeros(query.shape[0], k)
        for group in plan.sparse:
            keys = gather(pages, group.frames, group.ends // s.index_pool, TILE)
            size = BLOCK_ELEMENTS // (keys.shape[0] * keys.shape[1] * s.index_heads)
            for block in group.blocks(max(size, 8)):
                scores = pool_scores(query[block.rows], weights[block.rows], keys).flatten(0, 1)
                complete = block.seen.flatten() // s.index_pool
                if values is None:
                    own = choose(scores, complete, k)
                else:
                    value, own = candidates(scores, complete, k)
                    block.put(values, value.view(*block.rows.shape, k))
                    own = shards.rows(own * s.index_pool) // s.index_pool
                block.put(best, own.view(*block.rows.shape, k))
        if values is not None:
            every = join(values, self.neighbours), join(best, self.neighbours)
            best = choose_candidates(*every, k)
        return best


class MlaLayer:
    """One layer; ``prefix`` is its weights' name up to and with the last dot. A layer without an
    own index (``full`` False) uses the previous layer's choice.

    Ranks share the heads; ``shape`` counts this rank's. Latents and the index belong to no head:
    every rank computes them.
    """

    def __init__(
        self,
        shape: MlaShape,
        layer: int,
        prefix: str,
        full: bool,
        weights: Weights,
        homes: Homes = _TARGET,
    ) -> None:
        s = shape
        self.world = weights.world
        own = self.world.heads(s.heads, "latent attention")
        self.shape = replace(s, heads=own)
        self.layer = layer
        self.homes = homes
        self._splits = [s.q_rank, s.kv_rank]
        self._inputs = weights.stack(
            (f"{prefix}q_a_proj.weight", f"{prefix}kv_a_proj_with_mqa.weight"),
            (s.q_rank, s.kv_rank),
            s.hidden,
        )
        self._q_norm = weights.take(f"{prefix}q_a_layernorm.weight", (s.q_rank,))
        self._kv_norm = weights.take(f"{prefix}kv_a_layernorm.weight", (s.kv_rank,))
        self._query = weights.take(
            f"{prefix}q_b_proj.weight", (s.heads * s.key_dim, s.q_rank), split=0
        )
        both = weights.fp32(
            f"{prefix}kv_b_proj.weight", (s.heads * (s.key_dim + s.value_dim), s.kv_rank), split=0
        ).view(own, -1, s.kv_rank)
        self._absorb = both[:, : s.key_dim].contiguous()  # [H, key_dim, kv_rank]
        self._values = both[:, s.key_dim :].contiguous()  # [H, value_dim, kv_rank]
        self._out = weights.take(
            f"{prefix}o_proj.weight", (s.hidden, s.heads * s.value_dim), split=1
        )
        self.indexer = Indexer(s, layer, f"{prefix}indexer.", weights, homes) if full else None

    def fields(self) -> tuple[Field, ...]:
        latent = Field(
            self.layer, "latent", self.homes.rows, (self.shape.kv_rank,), self._out.dtype
        )
        return (latent, *(self.indexer.fields() if self.indexer else ()))

    def forward(
        self, x: Tensor, batch: Batch, state: StateViews, selection: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """[N, hidden] -> [N, hidden] and the tokens chosen; ``selection``: the previous layer's."""
        s = self.shape
        plan = spans(batch, state, s.index_pool, s.dense_limit, self.homes)
        residual, latent = self.inputs(x)
        pages = state.rows(self.layer, "latent")
        plan.writes.write(pages, latent)
        if self.indexer is not None:
            selection = self.indexer.forward(x, residual, plan, state)
        query = self.queries(residual)
        shards = state.shards(self.homes.rows)
        if not shards.whole:
            query = join(query, self.world.neighbours)
        mixed = room(query, shards)  # [N, H, kv_rank], parts have one more column
        for group in plan.dense:
            attend_all(group, query, pages, s.scale, shards, mixed)
        if plan.sparse:
            assert selection is not None
            counts = (s.index_topk + plan.seen % s.index_pool)[:, None]
            for group in plan.sparse:
                attend_chosen(group, selection, counts, query, pages, s.scale, shards, mixed)
        if not shards.whole:
            mixed = merge(mixed, self.world.neighbours)
        return self.outputs(mixed), selection

    def inputs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[N, hidden] -> what queries are made of, [N, q_rank], and the latents [N, kv_rank]."""
        q, kv = torch.split(linear(x, self._inputs), self._splits, 1)
        eps = self.shape.rms_eps
        return rms_norm(q, self._q_norm, eps), rms_norm(kv, self._kv_norm, eps)

    def queries(self, residual: Tensor) -> Tensor:
        """[N, q_rank] -> [N, H, kv_rank] fp32: each head's query, seen through its keys."""
        query = linear(residual, self._query).float().view(-1, self.shape.heads, self.shape.key_dim)
        return bmm(query.transpose(0, 1), self._absorb).transpose(0, 1).contiguous()

    def outputs(self, mixed: Tensor) -> Tensor:
        """Mixed latents [N, H, kv_rank] fp32 -> [N, hidden]."""
        out = bmm(mixed.transpose(0, 1), self._values.transpose(1, 2))  # [H, N, value_dim]
        out = out.transpose(0, 1).reshape(mixed.shape[0], -1).to(self._out.dtype)
        return summed_linear(out, self._out, self.world)
