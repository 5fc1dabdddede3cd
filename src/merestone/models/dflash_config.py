"""What a DFlash or DFlash2 draft's config.json says, read strictly and frozen afterwards.

Knows the published keys and which variants are not served. Must not know tensors' names. Source:
the published drafts, and the reference package ``dflash`` for what an absent key means.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from merestone.models.config import CONFIG_FILE, refuse_quantization
from merestone.models.strict_json import ConfigError, Section, read_object

_ARCHITECTURES = {"DFlashDraftModel": False, "DFlash2DraftModel": True}
_LAYER_TYPES = ("sliding_attention", "full_attention")


@dataclass(frozen=True, slots=True)
class SelectorConfig:
    """What DFlash2 adds: convolutions inside the block over ``conv_kernel`` tokens, dynamic in
    groups of ``conv_group`` channels, and a choice among the ``selector_topk`` best of each row."""

    conv_kernel: int
    conv_group: int
    selector_rank: int
    selector_topk: int


@dataclass(frozen=True, slots=True)
class DFlashConfig:
    """A draft model. ``windows``: one entry a layer, the distance at which a token is out of sight
    (None: never). ``block`` tokens: the newest one and masks. ``taps``: the target's layers whose
    residuals are its context."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_eps: float
    rope_theta: float
    windows: tuple[int | None, ...]
    block: int
    mask_id: int
    taps: tuple[int, ...]
    target_layers: int
    embedding_scale: float
    logit_scale: float
    selector: SelectorConfig | None
    tie_embeddings: bool = False

    @property
    def context(self) -> int | None:
        """Rows before a block that it reads at most; None: all."""
        lengths = [window for window in self.windows if window is not None]
        return max(lengths) - 1 if len(lengths) == len(self.windows) else None


def read_dflash_config(directory: Path) -> DFlashConfig:
    """Read and check ``directory``'s config.json.

    Raises:
        ConfigError: a missing or mistyped key, or a variant that is not served, by name.
    """
    path = directory / CONFIG_FILE
    keys = Section(read_object(path), str(path))
    refuse_quantization(keys)
    (architecture,) = keys.texts("architectures", 1)
    if architecture not in _ARCHITECTURES:
        raise keys.error("architectures", f"= {architecture!r} is no DFlash draft")
    keys.only("attention_bias", False, False)
    keys.only("hidden_act", "silu", "silu")
    layers, draft = keys.integer("num_hidden_layers"), keys.section("dflash_config")
    windows = _windows(keys, layers)
    causal = any(window is not None for window in windows)
    # Absent, the reference takes sliding layers for causal ones.
    keys.only("is_causal", False, causal)
    draft.refuse("causal", True)
    if draft.number_or_none("final_logit_softcapping", None):
        raise draft.error("final_logit_softcapping", "is not supported")
    heads = keys.integer("num_attention_heads")
    config = DFlashConfig(
        vocab_size=keys.integer("vocab_size"),
        hidden_size=keys.integer("hidden_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=keys.integer("num_key_value_heads", heads),
        head_dim=keys.integer("head_dim"),
        intermediate_size=keys.integer("intermediate_size"),
        rms_eps=keys.number("rms_norm_eps", 1e-6),
        rope_theta=_rope_theta(keys),
        windows=windows,
        block=draft.integer("block_size", least=2),
        mask_id=draft.integer("mask_token_id", least=0),
        taps=draft.ids("target_layer_ids"),
        target_layers=keys.integer("num_target_layers"),
        embedding_scale=draft.number("input_embedding_scale", 1.0),
        logit_scale=draft.number("output_multiplier", 1.0),
        selector=_selector(draft) if _ARCHITECTURES[architecture] else None,
    )
    _check(keys, draft, config)
    return config


def _windows(keys: Section, layers: int) -> tuple[int | None, ...]:
    kinds = keys.texts("layer_types", layers)
    for kind in kinds:
        if kind not in _LAYER_TYPES:
            raise keys.error("layer_types", f"has {kind!r}, expected {' or '.join(_LAYER_TYPES)}")
    if "sliding_attention" not in kinds:
        return (None,) * layers
    window = keys.integer("sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _rope_theta(keys: Section) -> float:
    """From the nested or the flat spelling; no scaling of positions."""
    if "rope_parameters" not in keys:
        if "rope_scaling" in keys:
            raise keys.error("rope_scaling", "is not supported")
        return keys.number("rope_theta")
    rope = keys.section("rope_parameters")
    rope.only("rope_type", "default", "default")
    return rope.number("rope_theta")


def _selector(draft: Section) -> SelectorConfig:
    return SelectorConfig(
        conv_kernel=draft.integer("conv_kernel_size"),
        conv_group=draft.integer("conv_group_size"),
        selector_rank=draft.integer("selector_rank"),
        selector_topk=draft.integer("selector_top_k"),
    )


def _check(keys: Section, draft: Section, config: DFlashConfig) -> None:
    """What one key demands of another."""
    if config.num_heads % config.num_kv_heads:
        raise keys.error("num_attention_heads", f"is no multiple of {config.num_kv_heads}")
    if config.head_dim % 2:
        raise keys.error("head_dim", f"= {config.head_dim} has no two halves")
    if any(window is not None and window < config.block for window in config.windows):
        raise keys.error("sliding_window", f"is smaller than a block of {config.block}")
    if not config.taps or max(config.taps) >= config.target_layers:
        raise draft.error("target_layer_ids", f"must be below {config.target_layers}")
    if config.mask_id >= config.vocab_size:
        raise draft.error("mask_token_id", f"is outside the {config.vocab_size} ids")
    selector = config.selector
    if selector is not None and config.hidden_size % selector.conv_group:
        raise draft.error("conv_group_size", f"does not divide {config.hidden_size}")
    if selector is not None and selector.selector_topk > config.vocab_size:
        raise draft.error("selector_top_k", f"exceeds the {config.vocab_size} ids")


__all__ = ["ConfigError", "DFlashConfig", "SelectorConfig", "read_dflash_config"]
