"""What a checkpoint's JSON files say of a model, read strictly and frozen afterwards.

Knows the published and the transformers spelling of GLM-5.3-Flash's configuration (`glm5_next`),
and which variants are not served. Must not know tensors' names or a model's arithmetic.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from merestone.models.interface import CHUNK
from merestone.models.strict_json import ConfigError, Section, read_object

__all__ = [
    "ConfigError",
    "GenerationConfig",
    "Glm5NextConfig",
    "read_config",
    "read_dtype",
    "read_generation_config",
    "read_model_type",
    "refuse_quantization",
]

log = logging.getLogger(__name__)

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
WEIGHT_FILE = "model.safetensors"
WEIGHT_INDEX_FILE = "model.safetensors.index.json"

_LAYER_TYPES = {
    "linear_attention": "kda",
    "deepseek_sparse_attention": "mla",  # published
    "indexed_attention": "mla",  # transformers
    "full_attention": "mla",  # transformers' older spelling
}
_MLP_TYPES = {"dense": "dense", "sparse": "moe"}
_INDEXER_TYPES = {"full": "full", "shared": "shared"}
_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

# Keys that change nothing in what we compute: training, housekeeping, or a restatement of others.
_COSMETIC_OUTER = frozenset({
    "_name_or_path", "architectures", "auto_map", "bos_token_id", "dtype", "eos_token_id",
    "image_end_token_id", "image_start_token_id", "image_token_id", "pad_token_id", "torch_dtype",
    "transformers_version", "use_cache", "video_end_token_id", "video_start_token_id",
    "video_token_id", "vision_config",
})  # fmt: skip
_COSMETIC_TEXT = _COSMETIC_OUTER | {
    "attention_dropout", "ep_size", "head_dim", "indexer_rope_interleave", "initializer_range",
    "model_type",
    "output_router_logits", "pretraining_tp", "qk_head_dim", "rope_interleave", "rope_parameters",
    "rope_scaling", "rope_theta", "router_aux_loss_coef", "seq_aux",
}  # fmt: skip
_COSMETIC_LINEAR = frozenset({"kda_layers", "full_attn_layers", "safe_gate"})


@dataclass(frozen=True, slots=True)
class Glm5NextConfig:
    """The text model of GLM-5.3-Flash. Sizes in elements, lengths in tokens, one entry a layer in
    ``layer_types`` ("kda" | "mla"), ``mlp_types`` ("dense" | "moe") and ``indexer_types`` ("full" |
    "shared"). ``index_topk`` counts tokens, in pools of ``index_kpool``. ``gate_lower_bound`` None
    is the softplus gate; ``swiglu_limit`` None clamps nothing. There is no rotary part.
    ``mtp_layers`` follow the last layer; ``mtp_shares_index``: the passes of a draft all use the
    first one's selection."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    layer_types: tuple[str, ...]
    mlp_types: tuple[str, ...]
    indexer_types: tuple[str, ...]
    intermediate_size: int
    moe_intermediate_size: int
    num_experts: int
    experts_per_token: int
    num_shared_experts: int
    routed_scaling: float
    norm_topk: bool
    n_group: int
    topk_group: int
    num_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    v_head_dim: int
    index_heads: int
    index_head_dim: int
    index_topk: int
    index_kpool: int
    kda_heads: int
    kda_head_dim: int
    conv_kernel: int
    gate_lower_bound: float | None
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    swiglu_limit: float | None
    rms_eps: float
    max_length: int
    eos_ids: tuple[int, ...]
    tie_embeddings: bool
    mtp_layers: int = 0
    mtp_shares_index: bool = False


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """A checkpoint's own sampling defaults; None where it says nothing. ``do_sample`` false asks
    for greedy decoding. ``max_new_tokens`` counts tokens."""

    do_sample: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None
    eos_ids: tuple[int, ...] = ()


def read_model_type(directory: Path) -> str:
    """The ``model_type`` of ``directory``'s config.json. Raises ConfigError."""
    path = directory / CONFIG_FILE
    return Section(read_object(path), str(path)).text("model_type")


def read_dtype(directory: Path) -> torch.dtype | None:
    """The dtype that config.json names (new or old key, outer or text part), None if it names none.

    Raises:
        ConfigError: it names one that we do not compute in.
    """
    path = directory / CONFIG_FILE
    outer = Section(read_object(path), str(path))
    parts = [outer, outer.section("text_config")] if "text_config" in outer else [outer]
    for part in parts:
        for key in ("dtype", "torch_dtype"):
            if key in part:
                name = part.text(key).removeprefix("torch.")
                if name not in _DTYPES:
                    raise part.error(key, f"= {name!r} is not one of {', '.join(_DTYPES)}")
                return _DTYPES[name]
    return None


def read_generation_config(directory: Path) -> GenerationConfig:
    """The sampling defaults of ``directory``'s generation_config.json; all None without the file.

    Raises:
        ConfigError: a value of the wrong type.
    """
    path = directory / GENERATION_FILE
    if not path.exists():
        return GenerationConfig()
    keys = Section(read_object(path), str(path))
    config = GenerationConfig(
        do_sample=keys.flag("do_sample") if "do_sample" in keys else None,
        temperature=keys.number_or_none("temperature", None),
        top_p=keys.number_or_none("top_p", None),
        top_k=keys.integer("top_k", least=0) if "top_k" in keys else None,
        min_p=keys.number_or_none("min_p", None),
        repetition_penalty=keys.number_or_none("repetition_penalty", None),
        max_new_tokens=keys.integer("max_new_tokens") if "max_new_tokens" in keys else None,
        eos_ids=keys.ids("eos_token_id"),
    )
    _log_unread(path, keys)
    return config


def read_config(directory: Path) -> Glm5NextConfig:
    """Read and check ``directory``'s config.json (and the end ids of generation_config.json).

    Source: the published config.json of GLM-5.3-Flash and transformers' ``Glm5NextConfig``. Shapes
    have no defaults; neither has ``index_kpool``, whose default in transformers (16) is not what
    the checkpoint says (4). Defaults of behaviour are those of transformers.

    Raises:
        ConfigError: a missing or mistyped key, or a variant that is not served, by name.
    """
    path = directory / CONFIG_FILE
    outer = Section(read_object(path), str(path))
    if outer.text("model_type") not in ("glm5_next", "glm5_next_text"):
        raise outer.error("model_type", f"= {outer.text('model_type')!r} is not supported")
    nested = "text_config" in outer
    text = outer.section("text_config") if nested else outer
    for part in (outer, text):
        refuse_quantization(part)
    generation = read_generation_config(directory)
    eos_ids = generation.eos_ids or text.ids("eos_token_id") or outer.ids("eos_token_id")
    tied = _tied(outer, text)
    config = _read_text(text, eos_ids, tied)
    if nested:
        outer.ignore(_COSMETIC_OUTER)
        _log_unread(path, outer)
    _log_unread(path, text)
    return config


def _read_text(text: Section, eos_ids: tuple[int, ...], tied: bool) -> Glm5NextConfig:
    _refuse_variants(text)
    layers = text.integer("num_hidden_layers")
    kda_heads, kda_head_dim, conv_kernel, bound = _linear_attention(text)
    config = Glm5NextConfig(
        vocab_size=text.integer("vocab_size"),
        hidden_size=text.integer("hidden_size"),
        num_layers=layers,
        layer_types=_layer_types(text, layers),
        mlp_types=_mlp_types(text, layers),
        indexer_types=_indexer_types(text, layers),
        intermediate_size=text.integer("intermediate_size"),
        moe_intermediate_size=text.integer("moe_intermediate_size"),
        num_experts=text.integer("n_routed_experts"),
        experts_per_token=text.integer("num_experts_per_tok"),
        num_shared_experts=text.integer("n_shared_experts"),
        routed_scaling=text.number("routed_scaling_factor"),
        norm_topk=text.flag("norm_topk_prob", True),
        n_group=text.integer("n_group", 1),
        topk_group=text.integer("topk_group", 1),
        num_heads=text.integer("num_attention_heads"),
        q_lora_rank=text.integer("q_lora_rank"),
        kv_lora_rank=text.integer("kv_lora_rank"),
        qk_nope_head_dim=text.integer("qk_nope_head_dim"),
        v_head_dim=text.integer("v_head_dim"),
        index_heads=text.integer("index_n_heads"),
        index_head_dim=text.integer("index_head_dim"),
        index_topk=text.integer("index_topk"),
        index_kpool=text.integer("index_kpool"),
        kda_heads=kda_heads,
        kda_head_dim=kda_head_dim,
        conv_kernel=conv_kernel,
        gate_lower_bound=bound,
        hc_mult=text.integer("hc_mult"),
        hc_sinkhorn_iters=text.integer("hc_sinkhorn_iters", 20),
        hc_eps=text.number("hc_eps", 1e-6),
        swiglu_limit=text.number_or_none("swiglu_limit", 10.0),
        rms_eps=text.number("rms_norm_eps", 1e-5),
        max_length=text.integer("max_position_embeddings"),
        eos_ids=eos_ids,
        tie_embeddings=tied,
        mtp_layers=text.integer("num_nextn_predict_layers", 0, least=0),
        mtp_shares_index=text.flag("index_share_for_mtp_iteration", False),
    )
    _check(text, config)
    return config


def _linear_attention(text: Section) -> tuple[int, int, int, float | None]:
    """Heads, head size, convolution kernel and gate bound, from the nested or the flat spelling."""
    flat = ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim", "linear_lower_bound")
    if "linear_attn_config" not in text:
        return (
            text.integer(flat[0]),
            text.integer(flat[1]),
            text.integer(flat[2]),
            text.number_or_none(flat[3], -5.0),
        )
    linear = text.section("linear_attn_config")
    for name in flat:
        if name in text:
            raise text.error(name, "is given beside linear_attn_config")
    safe = linear.flag("safe_gate", True)
    bound = linear.number_or_none("gate_lower_bound", -5.0)
    linear.ignore(_COSMETIC_LINEAR)
    values = (
        linear.integer("num_heads"),
        linear.integer("head_dim"),
        linear.integer("short_conv_kernel_size"),
        -5.0 if safe and bound is None else bound,
    )
    _log_unread(Path("linear_attn_config"), linear)
    return values


def _layer_types(text: Section, layers: int) -> tuple[str, ...]:
    if "layer_types" not in text:
        return tuple("mla" if layer % 4 == 3 else "kda" for layer in range(layers))
    return _translate(text, "layer_types", layers, _LAYER_TYPES)


def _mlp_types(text: Section, layers: int) -> tuple[str, ...]:
    dense = text.integer("first_k_dense_replace", 3, least=0)
    if "mlp_layer_types" in text:
        text.ignore(frozenset({"moe_layer_freq"}))
        return _translate(text, "mlp_layer_types", layers, _MLP_TYPES)
    text.only("moe_layer_freq", 1, 1)
    if dense != 3:
        # transformers ignores the number and takes 3; we do not guess who is right.
        raise text.error("first_k_dense_replace", f"= {dense} needs an explicit mlp_layer_types")
    return tuple("dense" if layer < dense else "moe" for layer in range(layers))


def _indexer_types(text: Section, layers: int) -> tuple[str, ...]:
    if "indexer_types" in text:
        text.ignore(frozenset({"index_topk_freq", "index_topk_pattern", "index_skip_topk_offset"}))
        return _translate(text, "indexer_types", layers, _INDEXER_TYPES)
    if "index_topk_pattern" in text:
        raise text.error("index_topk_pattern", "needs an explicit indexer_types")
    text.only("index_topk_freq", 1, 1)
    text.ignore(frozenset({"index_skip_topk_offset", "index_topk_pattern"}))
    return ("full",) * layers


def _translate(text: Section, name: str, layers: int, words: dict[str, str]) -> tuple[str, ...]:
    given = text.texts(name, layers)
    for word in given:
        if word not in words:
            raise text.error(name, f"has {word!r}, expected one of {', '.join(words)}")
    return tuple(words[word] for word in given)


def _tied(outer: Section, text: Section) -> bool:
    parts = {id(part): part for part in (outer, text)}.values()
    given = [p.flag("tie_word_embeddings") for p in parts if "tie_word_embeddings" in p]
    if len(set(given)) > 1:
        raise outer.error("tie_word_embeddings", "differs from text_config's")
    return given[0] if given else False


def refuse_quantization(part: Section) -> None:
    """Raises ConfigError for weights that are stored quantised."""
    for key in ("quantization_config", "compression_config"):
        if key in part:
            raise part.error(key, "is not supported: quantised weights cannot be served")


def _refuse_variants(text: Section) -> None:
    """Variants of the family whose arithmetic we do not have. The last argument is what absence
    means."""
    text.only("qk_rope_head_dim", 0, 0)
    text.only("hidden_act", "silu", "silu")
    text.only("attention_bias", False, False)
    text.only("n_group", 1, 1)
    text.only("topk_group", 1, 1)
    text.only("index_kpool_always_select_tail", True, True)
    text.only("scoring_func", "sigmoid", "sigmoid")
    text.only("topk_method", "noaux_tc", "noaux_tc")
    # Published beside the keys that matter, in forms we need not know; false would be a variant.
    for name in ("index_kpool_compress", "mhc", "mla_use_nope"):
        text.refuse(name, False)
    heads = text.integer("num_attention_heads")
    text.only("num_key_value_heads", heads, heads)


def _check(text: Section, config: Glm5NextConfig) -> None:
    """What one key demands of another."""
    if config.index_topk % config.index_kpool:
        raise text.error(
            "index_topk",
            f"= {config.index_topk} is no multiple of index_kpool {config.index_kpool}",
        )
    if CHUNK % config.index_kpool:
        # An anchor must not fall inside a pool, or the pool's first rows would be gone.
        raise text.error("index_kpool", f"= {config.index_kpool} does not divide {CHUNK}")
    if config.experts_per_token > config.num_experts:
        raise text.error("num_experts_per_tok", f"exceeds n_routed_experts {config.num_experts}")
    if config.gate_lower_bound is not None and config.gate_lower_bound >= 0:
        raise text.error("the gate's lower bound", f"must be negative: {config.gate_lower_bound}")
    if config.swiglu_limit is not None and config.swiglu_limit <= 0:
        raise text.error("swiglu_limit", f"must be positive, found {config.swiglu_limit}")
    for eos in config.eos_ids:
        if eos >= config.vocab_size:
            raise text.error("eos_token_id", f"{eos} is outside the {config.vocab_size} ids")


def _log_unread(path: Path, keys: Section) -> None:
    keys.ignore(_COSMETIC_TEXT)
    if unknown := keys.unread():
        log.debug("%s: unknown keys ignored: %s", path, ", ".join(sorted(unknown)))
