"""Kimi Linear (`kimi_linear`): KDA and dense latent attention without positions, MoE.

Knows the family's layer order and its checkpoint's names (relative to the text model). Must not
know files or configuration formats. Source: arXiv 2510.26692 and transformers' `kimi_linear`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from merestone.layers.dense_mla import DenseMlaLayer, DenseMlaShape
from merestone.layers.kda import KdaLayer, KdaShape
from merestone.layers.mlp import DenseMlp, MoeMlp
from merestone.layers.state import Batch, Field, StateViews
from merestone.layers.vocabulary import Vocabulary
from merestone.layers.weights import Source, Weights
from merestone.models.interface import ModelInfo
from merestone.models.kimi_config import KimiLinearConfig
from merestone.ops.elementwise import rms_norm
from merestone.parallel.world import SINGLE, World

# The published code and transformers give this one norm its default, not rms_norm_eps.
_LATENT_EPS = 1e-6


class _Layer:
    """One decoder layer: two sublayers, each normed before and added to the residual."""

    def __init__(self, config: KimiLinearConfig, i: int, weights: Weights) -> None:
        prefix = f"layers.{i}."
        self._eps = config.rms_eps
        self._input_norm = weights.take(f"{prefix}input_layernorm.weight", (config.hidden_size,))
        self.attention = _attention(config, i, f"{prefix}self_attn.", weights)
        self._mlp_norm = weights.take(
            f"{prefix}post_attention_layernorm.weight", (config.hidden_size,)
        )
        self._mlp = _mlp(config, i, prefix, weights)

    def forward(self, x: Tensor, batch: Batch, state: StateViews) -> Tensor:
        x = x + self.attention.forward(rms_norm(x, self._input_norm, self._eps), batch, state)
        return x + self._mlp.forward(rms_norm(x, self._mlp_norm, self._eps))


def _attention(
    config: KimiLinearConfig, i: int, prefix: str, weights: Weights
) -> KdaLayer | DenseMlaLayer:
    if config.layer_types[i] == "kda":
        kda = KdaShape(
            hidden=config.hidden_size,
            heads=config.kda_heads,
            dim=config.kda_head_dim,
            kernel=config.conv_kernel,
            gate_lower_bound=None,
            rate_shape=(1, 1, config.kda_heads, 1),
            rms_eps=config.rms_eps,
        )
        return KdaLayer(kda, i, prefix, weights)
    mla = DenseMlaShape(
        hidden=config.hidden_size,
        heads=config.num_heads,
        kv_rank=config.kv_lora_rank,
        key_dim=config.qk_nope_head_dim,
        shared_dim=config.qk_rope_head_dim,
        value_dim=config.v_head_dim,
        latent_eps=_LATENT_EPS,
    )
    return DenseMlaLayer(mla, i, prefix, weights)


def _mlp(config: KimiLinearConfig, i: int, prefix: str, weights: Weights) -> DenseMlp | MoeMlp:
    if config.mlp_types[i] == "dense":
        return DenseMlp(
            config.hidden_size, config.intermediate_size, None, f"{prefix}mlp.", weights
        )
    return MoeMlp(
        hidden=config.hidden_size,
        inner=config.moe_intermediate_size,
        count=config.num_experts,
        chosen=config.experts_per_token,
        shared=config.num_shared_experts,
        normalise=config.norm_topk,
        scaling=config.routed_scaling,
        limit=None,
        prefix=f"{prefix}block_sparse_moe.",
        weights=weights,
        names=("w1", "w3", "w2"),
    )


class KimiLinear:
    """The text model: a :class:`merestone.models.interface.Model`.

    Args:
        weights: by checkpoint name without "model." ("layers.0.self_attn.q_proj.weight"), or what
            makes them; every one is used, converted to ``dtype`` or, where the family says so, to
            fp32.
        world: the rank whose share of the weights is taken.

    Raises:
        WeightError: a weight is missing, misshapen or left over.
    """

    def __init__(
        self,
        config: KimiLinearConfig,
        weights: Mapping[str, Tensor] | Source,
        dtype: torch.dtype,
        world: World = SINGLE,
    ) -> None:
        reader = Weights(weights, dtype, world)
        self._eps = config.rms_eps
        self.vocabulary = Vocabulary(
            config.vocab_size,
            config.hidden_size,
            "embed_tokens.weight",
            None if config.tie_embeddings else "lm_head.weight",
            reader,
        )
        self._layers = [_Layer(config, i, reader) for i in range(config.num_layers)]
        self._norm = reader.take("norm.weight", (config.hidden_size,))
        reader.finish()
        self.info = ModelInfo(
            family="kimi_linear",
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_layers=config.num_layers,
            max_length=config.max_length,
            eos_ids=config.eos_ids,
            dtype=dtype,
            page_multiple=1,
        )

    def fields(self) -> tuple[Field, ...]:
        """All state, of every layer."""
        return tuple(field for layer in self._layers for field in layer.attention.fields())

    @torch.inference_mode()
    def forward(self, batch: Batch, state: StateViews) -> Tensor:
        """The batch's hidden rows after the final norm, [N, hidden_size] in the model's dtype."""
        x = self.embed(batch.tokens)
        for i, layer in enumerate(self._layers):
            x = layer.forward(x, batch, state)
            if i in batch.taps:
                batch.features[i] = x
        return rms_norm(x, self._norm, self._eps)

    def embed(self, tokens: Tensor) -> Tensor:
        """[N] int64 -> [N, hidden_size] in the model's dtype."""
        return self.vocabulary.embed(tokens)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """[M, hidden_size] -> [M, vocab_size] fp32."""
        return self.vocabulary.logits(hidden)
