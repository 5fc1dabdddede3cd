"""The MTP layer of GLM-5.3-Flash: from a token and the hidden row before it to the token after.

Knows the layer's weights and its arithmetic. Must not know how many passes a draft takes or what
becomes of it. An ordinary latent attention layer with experts, without hyper-connections; its state
lives in a group of its own, raw index rows included. Source: the published checkpoint
(``layers.N``, N being the number of the target's layers); transformers leaves the layer out.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from merestone.layers.mla import MlaLayer
from merestone.layers.state import Batch, Field, Homes, StateViews
from merestone.layers.weights import Source, Weights
from merestone.models.config import Glm5NextConfig
from merestone.models.glm5_next import mla_shape, moe
from merestone.ops.attention import TILE, attend
from merestone.ops.elementwise import rms_norm
from merestone.ops.gemm import linear
from merestone.parallel.world import SINGLE, World

GROUP = "mtp"


class Reach:
    """What the rows after row ``last`` of several sequences see: the keys that row saw, and one
    more for each pass. The keys are copies, so nothing is written to a page.

    ``keys`` [S, W, kv_rank] fp32, finite, the first ``seen`` [S] of them visible.
    """

    def __init__(self, keys: Tensor, seen: Tensor) -> None:
        self.keys = keys
        self.seen = seen

    def add(self, latents: Tensor) -> None:
        """One more key of each sequence: [S, kv_rank]."""
        self.keys[torch.arange(self.keys.shape[0]), self.seen] = latents.float()
        self.seen = self.seen + 1


class Glm5NextMtp:
    """Args as those of :class:`merestone.models.glm5_next.Glm5Next`; ``weights`` are the layer's
    own ("layers.N.eh_proj.weight"), every one used.

    Raises:
        WeightError: a weight is missing, misshapen or left over.
    """

    def __init__(
        self,
        config: Glm5NextConfig,
        weights: Mapping[str, Tensor] | Source,
        dtype: torch.dtype,
        world: World = SINGLE,
    ) -> None:
        reader = Weights(weights, dtype, world)
        self._neighbours = world.neighbours
        hidden, prefix = config.hidden_size, f"layers.{config.num_layers}."
        self._eps = config.rms_eps
        self._token_norm = reader.take(f"{prefix}enorm.weight", (hidden,))
        self._hidden_norm = reader.take(f"{prefix}hnorm.weight", (hidden,))
        self._join = reader.take(f"{prefix}eh_proj.weight", (hidden, 2 * hidden))
        self._attention_norm = reader.take(f"{prefix}input_layernorm.weight", (hidden,))
        self._attention = MlaLayer(
            mla_shape(config),
            config.num_layers,
            f"{prefix}self_attn.",
            True,
            reader,
            Homes(rows=GROUP, raw=GROUP),
        )
        self._mlp_norm = reader.take(f"{prefix}post_attention_layernorm.weight", (hidden,))
        self._mlp = moe(config, f"{prefix}mlp.", reader)
        self._norm = reader.take(f"{prefix}shared_head.norm.weight", (hidden,))
        reader.finish()
        self.page_multiple = config.index_kpool

    def fields(self) -> tuple[Field, ...]:
        """All state: latents, pooled and raw index rows, in pages of :data:`GROUP`."""
        return self._attention.fields()

    def forward(
        self, embedded: Tensor, hidden: Tensor, batch: Batch, state: StateViews
    ) -> tuple[Tensor, Tensor | None]:
        """Rows of committed tokens: row p from the embedding of token p + 1 and the target's hidden
        row p, [N, D] each -> the hidden rows whose logits are of token p + 2, [N, D], and the
        tokens that each row chose (see :class:`merestone.layers.mla.Indexer`)."""
        x = self._enter(embedded, hidden)
        y, chosen = self._attention.forward(
            rms_norm(x, self._attention_norm, self._eps), batch, state, None
        )
        return self._leave(x + y), chosen

    def reach(
        self,
        last: Tensor,
        tables: list[Tensor],
        chosen: Tensor | None,
        passes: int,
        state: StateViews,
    ) -> Reach:
        """What ``passes`` rows after row ``last`` [S] see: what that row saw, and one another.

        ``tables``: each sequence's pages. ``chosen`` [S, width]: what the rows ``last`` chose; used
        where such a row sees more tokens than it may attend to.
        """
        shape = self._attention.shape
        dense = last < shape.dense_limit
        picked = shape.index_topk + (last + 1) % shape.index_pool
        seen = torch.where(dense, last + 1, picked)
        width = -(-(int(seen.max()) + passes) // TILE) * TILE
        tokens = torch.arange(width).repeat(last.shape[0], 1)
        if chosen is not None:
            count = min(width, chosen.shape[1])
            tokens[:, :count] = torch.where(dense[:, None], tokens[:, :count], chosen[:, :count])
        # Past a row's count, and where damaged keys allowed no choice: token 0, which is there.
        tokens.masked_fill_((torch.arange(width) >= seen[:, None]) | (tokens < 0), 0)
        return Reach(self._keys(tokens, tables, state), seen)

    def _keys(self, tokens: Tensor, tables: list[Tensor], state: StateViews) -> Tensor:
        """Latents at positions ``tokens`` [S, W], fp32, also those that other ranks hold."""
        pages, shards = state.rows(self._attention.layer, "latent"), state.shards(GROUP)
        page, mine = pages.shape[1], shards.mine(tokens)
        own = shards.own(tokens).masked_fill(~mine, 0)
        frames = torch.stack([table[at // page] for table, at in zip(tables, own, strict=True)])
        keys = pages[frames, own % page].float()
        if shards.whole:
            return keys
        # One rank has the row, the others add zeros: the sum is exact.
        return self._neighbours.sum(keys.masked_fill(~mine[:, :, None], 0.0))

    def recycle(self, embedded: Tensor, hidden: Tensor, reach: Reach) -> Tensor:
        """One more pass: the embedding of a draft [S, D] and the hidden row that drafted it [S, D]
        -> the hidden row [S, D] whose logits are of the next draft. Its key joins ``reach``."""
        x = self._enter(embedded, hidden)
        attention = self._attention
        residual, latents = attention.inputs(rms_norm(x, self._attention_norm, self._eps))
        reach.add(latents)
        query = attention.queries(residual)
        seen = reach.seen[:, None].expand(query.shape[:2])
        mixed = attend(query, reach.keys, seen, attention.shape.scale)
        return self._leave(x + attention.outputs(mixed))

    def _enter(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        parts = (
            rms_norm(embedded, self._token_norm, self._eps),
            rms_norm(hidden, self._hidden_norm, self._eps),
        )
        return linear(torch.cat(parts, 1), self._join)

    def _leave(self, x: Tensor) -> Tensor:
        """The feed-forward, and the norm before the target's head."""
        x = x + self._mlp.forward(rms_norm(x, self._mlp_norm, self._eps))
        return rms_norm(x, self._norm, self._eps)
