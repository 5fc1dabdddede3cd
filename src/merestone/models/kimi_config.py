"""What Kimi-Linear's config.json says, read strictly and frozen afterwards.

Knows the published and the transformers spelling of the `kimi_linear` configuration, and which
variants are not served. Must not know tensors' names or a model's arithmetic.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from merestone.models.config import CONFIG_FILE, read_generation_config, refuse_quantization
from merestone.models.strict_json import Section, read_object

log = logging.getLogger(__name__)

_LAYER_TYPES = {"linear_attention": "kda", "full_attention": "mla"}
_MLP_TYPES = {"dense": "dense", "sparse": "moe"}

# Keys that change nothing in what we compute. Those of the rotation are among them: nothing is
# rotated. With a single group of experts it does not matter how groups would be chosen.
_COSMETIC = frozenset({
    "_name_or_path", "architectures", "attention_dropout", "auto_map", "bos_token_id", "dtype",
    "ep_size", "head_dim", "initializer_range", "num_nextn_predict_layers", "output_router_logits",
    "pad_token_id", "pretraining_tp", "qk_head_dim", "rope_parameters", "rope_scaling",
    "rope_theta", "torch_dtype", "transformers_version", "use_cache", "use_grouped_topk",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class KimiLinearConfig:
    """Kimi-Linear. Sizes in elements, lengths in tokens, one entry a layer in ``layer_types``
    ("kda" | "mla") and ``mlp_types`` ("dense" | "moe"). ``qk_rope_head_dim``: the part of a key
    that all heads share; it is not rotated."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    layer_types: tuple[str, ...]
    mlp_types: tuple[str, ...]
    intermediate_size: int
    moe_intermediate_size: int
    num_experts: int
    experts_per_token: int
    num_shared_experts: int
    routed_scaling: float
    norm_topk: bool
    num_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    kda_heads: int
    kda_head_dim: int
    conv_kernel: int
    rms_eps: float
    max_length: int
    eos_ids: tuple[int, ...]
    tie_embeddings: bool


def read_kimi_config(directory: Path) -> KimiLinearConfig:
    """Read and check ``directory``'s config.json (and the end ids of generation_config.json).

    Source: the published config.json of Kimi-Linear-48B-A3B and transformers' ``KimiLinearConfig``.
    Shapes and the layer schedule have no defaults: the schedule that transformers falls back to is
    not the published one. Defaults of behaviour are those of transformers.

    Raises:
        ConfigError: a missing or mistyped key, or a variant that is not served, by name.
    """
    path = directory / CONFIG_FILE
    keys = Section(read_object(path), str(path))
    refuse_quantization(keys)
    linear = keys.section("linear_attn_config") if "linear_attn_config" in keys else None
    _refuse_variants(keys, linear)
    layers = keys.integer("num_hidden_layers")
    config = KimiLinearConfig(
        vocab_size=keys.integer("vocab_size"),
        hidden_size=keys.integer("hidden_size"),
        num_layers=layers,
        layer_types=_layer_types(keys, linear, layers),
        mlp_types=_mlp_types(keys, layers),
        intermediate_size=keys.integer("intermediate_size"),
        moe_intermediate_size=keys.integer("moe_intermediate_size"),
        num_experts=keys.integer("num_experts"),
        experts_per_token=keys.integer("num_experts_per_token"),
        num_shared_experts=keys.integer("num_shared_experts", least=0),
        routed_scaling=keys.number("routed_scaling_factor"),
        norm_topk=keys.flag("moe_renormalize", True),
        num_heads=keys.integer("num_attention_heads"),
        kv_lora_rank=keys.integer("kv_lora_rank"),
        qk_nope_head_dim=keys.integer("qk_nope_head_dim"),
        qk_rope_head_dim=keys.integer("qk_rope_head_dim", least=0),
        v_head_dim=keys.integer("v_head_dim"),
        kda_heads=_linear(keys, linear, "num_heads", "linear_num_heads"),
        kda_head_dim=_linear(keys, linear, "head_dim", "linear_head_dim"),
        conv_kernel=_linear(keys, linear, "short_conv_kernel_size", "linear_conv_kernel_dim"),
        rms_eps=keys.number("rms_norm_eps", 1e-5),
        max_length=keys.integer("model_max_length"),
        eos_ids=read_generation_config(directory).eos_ids or keys.ids("eos_token_id"),
        tie_embeddings=keys.flag("tie_word_embeddings", False),
    )
    _check(keys, config)
    keys.ignore(_COSMETIC | {"model_type", "eos_token_id"})
    for part, where in ((keys, str(path)), (linear, "linear_attn_config")):
        if part is not None and (unknown := part.unread()):
            log.debug("%s: unknown keys ignored: %s", where, ", ".join(sorted(unknown)))
    return config


def _refuse_variants(keys: Section, linear: Section | None) -> None:
    """Variants of the family whose arithmetic we do not have. The last argument is what absence
    means."""
    if "q_lora_rank" in keys:
        raise keys.error("q_lora_rank", "is not supported: queries come from one full projection")
    if linear is not None and linear.number_or_none("gate_lower_bound", None) is not None:
        raise linear.error("gate_lower_bound", "is not supported: the gate is a softplus")
    keys.only("hidden_act", "silu", "silu")
    keys.only("attention_bias", False, False)
    keys.only("num_expert_group", 1, 1)
    keys.only("topk_group", 1, 1)
    keys.only("moe_router_activation_func", "sigmoid", "sigmoid")
    keys.only("moe_layer_freq", 1, 1)
    keys.refuse("mla_use_nope", False)
    keys.ignore(frozenset({"q_lora_rank"}))
    heads = keys.integer("num_attention_heads")
    keys.only("num_key_value_heads", heads, heads)


def _linear(keys: Section, linear: Section | None, nested: str, flat: str) -> int:
    """A size of the recurrent layers, from either spelling; both may be there, and then agree."""
    if linear is None:
        return keys.integer(flat)
    value = linear.integer(nested)
    if keys.integer(flat, value) != value:
        raise keys.error(flat, f"differs from linear_attn_config's {nested} {value}")
    return value


def _layer_types(keys: Section, linear: Section | None, layers: int) -> tuple[str, ...]:
    """From the published lists, which count layers from 1, or from transformers' list of words."""
    listed: tuple[str, ...] | None = None
    if linear is not None:
        kinds: dict[int, str] = {}
        for name, kind in (("kda_layers", "kda"), ("full_attn_layers", "mla")):
            for layer in linear.ids(name):
                if layer in kinds or not 1 <= layer <= layers:
                    problem = "is there twice" if layer in kinds else f"is outside 1..{layers}"
                    raise linear.error(name, f"layer {layer} {problem}")
                kinds[layer] = kind
        if kinds:
            if absent := [layer for layer in range(1, layers + 1) if layer not in kinds]:
                raise linear.error("kda_layers", f"and full_attn_layers miss layer {absent[0]}")
            listed = tuple(kinds[layer] for layer in range(1, layers + 1))
    if "layer_types" in keys:
        words = _translate(keys, "layer_types", layers, _LAYER_TYPES)
        if listed is not None and words != listed:
            raise keys.error("layer_types", "differs from linear_attn_config's lists")
        return words
    if listed is None:
        raise keys.error("linear_attn_config", "must list kda_layers and full_attn_layers")
    return listed


def _mlp_types(keys: Section, layers: int) -> tuple[str, ...]:
    dense = keys.integer("first_k_dense_replace", 1, least=0)
    if "mlp_layer_types" in keys:
        return _translate(keys, "mlp_layer_types", layers, _MLP_TYPES)
    return tuple("dense" if layer < dense else "moe" for layer in range(layers))


def _translate(keys: Section, name: str, layers: int, words: dict[str, str]) -> tuple[str, ...]:
    given = keys.texts(name, layers)
    for word in given:
        if word not in words:
            raise keys.error(name, f"has {word!r}, expected one of {', '.join(words)}")
    return tuple(words[word] for word in given)


def _check(keys: Section, config: KimiLinearConfig) -> None:
    """What one key demands of another."""
    if config.experts_per_token > config.num_experts:
        raise keys.error("num_experts_per_token", f"exceeds num_experts {config.num_experts}")
    for eos in config.eos_ids:
        if eos >= config.vocab_size:
            raise keys.error("eos_token_id", f"{eos} is outside the {config.vocab_size} ids")
