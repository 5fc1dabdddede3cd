"""Strict reading of Kimi-Linear's config.json: the published file, refusals by name."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from merestone.models.config import ConfigError
from merestone.models.kimi_config import KimiLinearConfig, read_kimi_config

FULL = (4, 8, 12, 16, 20, 24, 27)
# Kimi-Linear-48B-A3B-Instruct as published.
PUBLISHED: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"],
    "bos_token_id": 163584,
    "dtype": "bfloat16",
    "eos_token_id": 163586,
    "first_k_dense_replace": 1,
    "head_dim": 72,
    "hidden_act": "silu",
    "hidden_size": 2304,
    "initializer_range": 0.02,
    "intermediate_size": 9216,
    "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": list(FULL),
        "head_dim": 128,
        "kda_layers": [i for i in range(1, 28) if i not in FULL],
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True,
    "model_max_length": 1048576,
    "model_type": "kimi_linear",
    "moe_intermediate_size": 1024,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 32,
    "num_expert_group": 1,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_hidden_layers": 27,
    "num_key_value_heads": 32,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "pad_token_id": 163839,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 2.446,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_cache": True,
    "use_grouped_topk": True,
    "v_head_dim": 128,
    "vocab_size": 163840,
}


def read(directory: Path, values: dict[str, Any], **changes: Any) -> KimiLinearConfig:
    """``changes`` replace keys; a value of ... takes one out; "linear" changes the nested part."""
    values = copy.deepcopy(values)
    values["linear_attn_config"] |= changes.pop("linear", {})
    values |= changes
    kept = {key: value for key, value in values.items() if value is not ...}
    (directory / "config.json").write_text(json.dumps(kept))
    return read_kimi_config(directory)


def test_published(tmp_path: Path) -> None:
    config = read(tmp_path, PUBLISHED)
    assert [i + 1 for i, kind in enumerate(config.layer_types) if kind == "mla"] == list(FULL)
    assert config.mlp_types == ("dense",) + ("moe",) * 26
    assert (config.kda_heads, config.kda_head_dim, config.conv_kernel) == (32, 128, 4)
    assert (config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim) == (128, 64, 128)
    assert (config.num_experts, config.experts_per_token, config.routed_scaling) == (256, 8, 2.446)
    assert (config.max_length, config.eos_ids) == (1048576, (163586,))


def test_end_ids_of_generation_config_win(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    assert read(tmp_path, PUBLISHED).eos_ids == (1, 2)


def test_both_spellings_may_agree(tmp_path: Path) -> None:
    """As transformers saves: words beside the numbered lists, flat keys beside the nested ones."""
    words = ["full_attention" if i in FULL else "linear_attention" for i in range(1, 28)]
    flat = {"linear_num_heads": 32, "linear_head_dim": 128, "linear_conv_kernel_dim": 4}
    assert read(tmp_path, PUBLISHED, layer_types=words, **flat) == read(tmp_path, PUBLISHED)


ORDER = ["full_attention"] + ["linear_attention"] * 26
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"linear": {"full_attn_layers": [0, *FULL]}}, r"full_attn_layers layer 0 is outside 1\.\.27"),
    ({"linear": {"kda_layers": [1, 2, 3, 28]}}, r"kda_layers layer 28 is outside 1\.\.27"),
    ({"linear": {"full_attn_layers": [*FULL, 1]}}, "full_attn_layers layer 1 is there twice"),
    ({"linear": {"full_attn_layers": list(FULL[1:])}}, "full_attn_layers miss layer 4"),
    ({"linear": {"full_attn_layers": [], "kda_layers": []}}, "must list kda_layers"),
    ({"layer_types": ORDER}, "layer_types differs from linear_attn_config's lists"),
    ({"layer_types": ["sliding"] * 27}, "layer_types has 'sliding'"),
    ({"linear_num_heads": 16}, "linear_num_heads differs from linear_attn_config's num_heads 32"),
    ({"linear": {"gate_lower_bound": -5.0}}, "gate_lower_bound is not supported"),
    ({"q_lora_rank": 1536}, "q_lora_rank is not supported"),
    ({"num_expert_group": 8}, "num_expert_group = 8 is not supported, only 1"),
    ({"moe_router_activation_func": "softmax"}, "'softmax' is not supported, only 'sigmoid'"),
    ({"moe_layer_freq": 2}, "moe_layer_freq = 2 is not supported"),
    ({"mla_use_nope": False}, "mla_use_nope = False is not supported"),
    ({"num_key_value_heads": 8}, "num_key_value_heads = 8 is not supported, only 32"),
    ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
    ({"quantization_config": {"bits": 4}}, "quantization_config is not supported"),
    ({"num_experts_per_token": 300}, "num_experts_per_token exceeds num_experts 256"),
    ({"eos_token_id": 163840}, "163840 is outside the 163840 ids"),
    ({"vocab_size": ...}, "vocab_size is missing"),
    ({"model_max_length": "long"}, "model_max_length must be an integer"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=[message for _, message in WRONG])
def test_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, PUBLISHED, **changes)
