"""Multi-head latent attention without positions and without an index: every row sees all before it.

Knows its weights' roles and its state: one row a token, the latent and the part of the key that
all heads share. Must not know who owns pages. Kimi Linear keeps the shared part from models that
rotate it, and does not rotate it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from merestone.layers.attend import attend_all, room
from merestone.layers.spans import dense_spans
from merestone.layers.state import Batch, Field, StateViews
from merestone.layers.weights import Weights
from merestone.ops.elementwise import rms_norm
from merestone.ops.gemm import bmm, linear
from merestone.parallel.products import summed_linear
from merestone.parallel.tokens import join, merge


@dataclass(frozen=True, slots=True)
class DenseMlaShape:
    """A head's key has ``key_dim`` values of its own and ``shared_dim`` that are every head's.
    ``latent_eps``: of the latent's norm."""

    hidden: int
    heads: int
    kv_rank: int
    key_dim: int
    shared_dim: int
    value_dim: int
    latent_eps: float

    @property
    def scale(self) -> float:
        scale: float = (self.key_dim + self.shared_dim) ** -0.5
        return scale


class DenseMlaLayer:
    """One layer; ``prefix`` is its weights' name up to and with the last dot.

    The absorbed form: a head's query, seen through its key projection, meets the cached row as it
    is. The shared part of a row is a key only; what it adds to the mix of rows is cut off. Ranks
    share the heads, as in :class:`merestone.layers.mla.MlaLayer`.
    """

    def __init__(self, shape: DenseMlaShape, layer: int, prefix: str, weights: Weights) -> None:
        s = shape
        self.world = weights.world
        own = self.world.heads(s.heads, "latent attention")
        self.shape = replace(s, heads=own)
        self.layer = layer
        query = s.key_dim + s.shared_dim
        self._splits = [own * query, s.kv_rank, s.shared_dim]
        self._inputs = weights.stack(
            (f"{prefix}q_proj.weight", f"{prefix}kv_a_proj_with_mqa.weight"),
            (s.heads * query, s.kv_rank + s.shared_dim),
            s.hidden,
            split=(True, False),
        )
        self._norm = weights.take(f"{prefix}kv_a_layernorm.weight", (s.kv_rank,))
        both = weights.fp32(
            f"{prefix}kv_b_proj.weight", (s.heads * (s.key_dim + s.value_dim), s.kv_rank), split=0
        ).view(own, -1, s.kv_rank)
        self._absorb = both[:, : s.key_dim].contiguous()  # [H, key_dim, kv_rank]
        self._values = both[:, s.key_dim :].contiguous()  # [H, value_dim, kv_rank]
        self._out = weights.take(
            f"{prefix}o_proj.weight", (s.hidden, s.heads * s.value_dim), split=1
        )

    def fields(self) -> tuple[Field, ...]:
        width = self.shape.kv_rank + self.shape.shared_dim
        return (Field(self.layer, "latent", "full", (width,), self._out.dtype),)

    def forward(self, x: Tensor, batch: Batch, state: StateViews) -> Tensor:
        """[N, hidden] -> [N, hidden], model dtype; writes the batch's rows."""
        s = self.shape
        plan = dense_spans(batch, state)
        q, kv, shared = torch.split(linear(x, self._inputs), self._splits, 1)
        pages = state.rows(self.layer, "latent")
        plan.writes.write(pages, torch.cat([rms_norm(kv, self._norm, s.latent_eps), shared], 1))
        own, rest = torch.split(
            q.float().view(-1, s.heads, s.key_dim + s.shared_dim), [s.key_dim, s.shared_dim], 2
        )
        own = bmm(own.transpose(0, 1), self._absorb).transpose(0, 1)
        query = torch.cat([own, rest], 2)  # [N, H, kv_rank + shared_dim]
        shards = state.shards("full")
        if not shards.whole:
            query = join(query, self.world.neighbours)
        mixed = room(query, shards)
        for group in plan.groups:
            attend_all(group, query, pages, s.scale, shards, mixed)
        if not shards.whole:
            mixed = merge(mixed, self.world.neighbours)
        mixed = mixed[:, :, : s.kv_rank].transpose(0, 1)
        out = bmm(mixed, self._values.transpose(1, 2))  # [H, N, value_dim]
        out = out.transpose(0, 1).reshape(x.shape[0], -1).to(x.dtype)
        return summed_linear(out, self._out, self.world)
