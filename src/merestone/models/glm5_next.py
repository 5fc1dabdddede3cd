"""GLM-5.3-Flash (`glm5_next`): KDA and sparse latent attention in hyper-connections, MoE.

Knows the family's layer order and its checkpoint's names (relative to the text model). Must not
know files or configuration formats.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from merestone.layers.kda import KdaLayer, KdaShape
from merestone.layers.mla import MlaLayer, MlaShape
from merestone.layers.mlp import DenseMlp, MoeMlp
from merestone.layers.state import Batch, Field, StateViews
from merestone.layers.vocabulary import Vocabulary
from merestone.layers.weights import Source, Weights
from merestone.models.config import Glm5NextConfig
from merestone.models.interface import ModelInfo
from merestone.ops.elementwise import rms_norm
from merestone.ops.hyper import coefficients, collapse, expand, mean
from merestone.parallel.world import SINGLE, World


class _Hyper:
    """The hyper-connection around one sublayer, with the sublayer's norm."""

    def __init__(self, config: Glm5NextConfig, prefix: str, norm: str, weights: Weights) -> None:
        n, hidden = config.hc_mult, config.hidden_size
        width = n * (2 + n)
        self._config = config
        self._fn = weights.fp32(f"{prefix}_fn", (width, n * hidden))
        self._base = weights.fp32(f"{prefix}_base", (width,))
        scale = weights.fp32(f"{prefix}_scale", (3,))
        self._scale = torch.cat([scale[i].expand(size) for i, size in enumerate((n, n, n * n))])
        self._norm = weights.take(norm, (hidden,))

    def enter(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T, n, D] -> the sublayer's normed input [T, D], and what :func:`expand` needs."""
        c = self._config
        pre, post, comb = coefficients(
            streams, self._fn, self._base, self._scale, c.hc_eps, c.rms_eps, c.hc_sinkhorn_iters
        )
        return rms_norm(collapse(streams, pre), self._norm, c.rms_eps), post, comb


class _Layer:
    """One decoder layer: attention and feed-forward, each in its hyper-connection."""

    def __init__(self, config: Glm5NextConfig, i: int, weights: Weights) -> None:
        prefix = f"layers.{i}."
        self._attn_hyper = _Hyper(
            config, f"{prefix}hc_attn", f"{prefix}input_layernorm.weight", weights
        )
        self._ffn_hyper = _Hyper(
            config, f"{prefix}hc_ffn", f"{prefix}post_attention_layernorm.weight", weights
        )
        self.attention = _attention(config, i, f"{prefix}self_attn.", weights)
        self._mlp = _mlp(config, i, f"{prefix}mlp.", weights)

    def forward(
        self, streams: Tensor, batch: Batch, state: StateViews, selection: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        x, post, comb = self._attn_hyper.enter(streams)
        if isinstance(self.attention, KdaLayer):
            y, selection = self.attention.forward(x, batch, state), None
        else:
            y, selection = self.attention.forward(x, batch, state, selection)
        streams = expand(streams, y, post, comb)
        x, post, comb = self._ffn_hyper.enter(streams)
        return expand(streams, self._mlp.forward(x), post, comb), selection


def _attention(
    config: Glm5NextConfig, i: int, prefix: str, weights: Weights
) -> KdaLayer | MlaLayer:
    if config.layer_types[i] == "kda":
        kda = KdaShape(
            hidden=config.hidden_size,
            heads=config.kda_heads,
            dim=config.kda_head_dim,
            kernel=config.conv_kernel,
            gate_lower_bound=config.gate_lower_bound,
            rate_shape=(config.kda_heads,),
            rms_eps=config.rms_eps,
        )
        return KdaLayer(kda, i, prefix, weights)
    full = config.indexer_types[i] == "full"
    if not full and (i == 0 or config.layer_types[i - 1] != "mla"):
        raise ValueError(
            f"layer {i} shares the previous layer's index selection, "
            "but the layer before it is not a latent attention layer"
        )
    return MlaLayer(mla_shape(config), i, prefix, full, weights)


def mla_shape(config: Glm5NextConfig) -> MlaShape:
    """Of every latent attention layer, that of the MTP layer included."""
    return MlaShape(
        hidden=config.hidden_size,
        heads=config.num_heads,
        q_rank=config.q_lora_rank,
        kv_rank=config.kv_lora_rank,
        key_dim=config.qk_nope_head_dim,
        value_dim=config.v_head_dim,
        index_heads=config.index_heads,
        index_dim=config.index_head_dim,
        index_topk=config.index_topk,
        index_pool=config.index_kpool,
        rms_eps=config.rms_eps,
    )


def _mlp(config: Glm5NextConfig, i: int, prefix: str, weights: Weights) -> DenseMlp | MoeMlp:
    if config.mlp_types[i] == "dense":
        return DenseMlp(
            config.hidden_size, config.intermediate_size, config.swiglu_limit, prefix, weights
        )
    return moe(config, prefix, weights)


def moe(config: Glm5NextConfig, prefix: str, weights: Weights) -> MoeMlp:
    """A sparse feed-forward; ``prefix`` is its weights' name up to and with the last dot."""
    return MoeMlp(
        hidden=config.hidden_size,
        inner=config.moe_intermediate_size,
        count=config.num_experts,
        chosen=config.experts_per_token,
        shared=config.num_shared_experts,
        normalise=config.norm_topk,
        scaling=config.routed_scaling,
        limit=config.swiglu_limit,
        prefix=prefix,
        weights=weights,
    )


class Glm5Next:
    """The text model: a :class:`merestone.models.interface.Model`.

    Args:
        weights: by checkpoint name relative to the text model ("layers.0.self_attn.q_proj.weight"),
            or what makes them; every one is used, converted to ``dtype`` or, where the family says
            so, to fp32.
        world: the rank whose share of the weights is taken.

    Raises:
        WeightError: a weight is missing, misshapen or left over.
        ValueError: the configuration asks for something that is not supported.
    """

    def __init__(
        self,
        config: Glm5NextConfig,
        weights: Mapping[str, Tensor] | Source,
        dtype: torch.dtype,
        world: World = SINGLE,
    ) -> None:
        _check(config)
        reader = Weights(weights, dtype, world)
        self._config = config
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
            family="glm5_next",
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_layers=config.num_layers,
            max_length=config.max_length,
            eos_ids=config.eos_ids,
            dtype=dtype,
            page_multiple=config.index_kpool,
        )

    def fields(self) -> tuple[Field, ...]:
        """All state, of every layer."""
        return tuple(field for layer in self._layers for field in layer.attention.fields())

    @torch.inference_mode()
    def forward(self, batch: Batch, state: StateViews) -> Tensor:
        """The batch's hidden rows after the final norm, [N, hidden_size] in the model's dtype."""
        streams = self.embed(batch.tokens)[:, None].expand(-1, self._config.hc_mult, -1)
        selection: Tensor | None = None
        for i, layer in enumerate(self._layers):
            streams, selection = layer.forward(streams, batch, state, selection)
            if i in batch.taps:
                batch.features[i] = mean(streams)
        return rms_norm(mean(streams), self._norm, self._config.rms_eps)

    def embed(self, tokens: Tensor) -> Tensor:
        """[N] int64 -> [N, hidden_size] in the model's dtype."""
        return self.vocabulary.embed(tokens)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """[M, hidden_size] -> [M, vocab_size] fp32."""
        return self.vocabulary.logits(hidden)


def _check(config: Glm5NextConfig) -> None:
    """Refuse what the layers do not implement.

    Raises:
        ValueError: naming the option and its value.
    """
    if config.n_group != 1 or config.topk_group != 1:
        raise ValueError(f"expert groups are not supported: n_group is {config.n_group}")
    if config.index_topk % config.index_kpool:
        raise ValueError(
            f"index_topk {config.index_topk} is not a multiple of index_kpool {config.index_kpool}"
        )
    if not config.num_layers == len(config.layer_types) == len(config.mlp_types):
        raise ValueError(f"num_layers is {config.num_layers}, but layer types have another length")
