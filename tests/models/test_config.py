"""Strict reading of config.json: both spellings, refusals by name, nothing dropped in silence."""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from merestone.models.config import (
    ConfigError,
    Glm5NextConfig,
    read_config,
    read_dtype,
    read_generation_config,
)

# models.md section 0: GLM-5.3-Flash as published.
FLASH: dict[str, Any] = {
    "architectures": ["Glm5NextForConditionalGeneration"],
    "model_type": "glm5_next",
    "dtype": "bfloat16",
    "image_token_id": 154854,
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "glm5_next_text",
        "vocab_size": 154880,
        "hidden_size": 4096,
        "num_hidden_layers": 45,
        "layer_types": [
            "deepseek_sparse_attention" if i % 4 == 3 else "linear_attention" for i in range(45)
        ],
        "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 42,
        "first_k_dense_replace": 3,
        "intermediate_size": 12288,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 288,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 256,
        "qk_rope_head_dim": 0,
        "v_head_dim": 256,
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 2048,
        "index_kpool": 4,
        "index_kpool_compress": True,
        "index_kpool_always_select_tail": True,
        "index_share_for_mtp_iteration": True,
        "indexer_rope_interleave": True,
        "indexer_types": ["full"] * 45,
        "linear_attn_config": {
            "num_heads": 64,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
            "gate_lower_bound": -5.0,
            "kda_layers": [i for i in range(45) if i % 4 != 3],
            "full_attn_layers": [i for i in range(45) if i % 4 == 3],
        },
        "mla_use_nope": True,
        "mhc": True,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "swiglu_limit": 10.0,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 1048576,
        "num_nextn_predict_layers": 1,
        "hidden_act": "silu",
        "attention_bias": False,
        "pad_token_id": 154820,
        "eos_token_id": [154820, 154827, 154829],
    },
    "vision_config": {"depth": 24},
}

ABSENT = object()


def write(directory: Path, config: dict[str, Any], generation: object = None) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory


def flash(**text: object) -> dict[str, Any]:
    """The published configuration with keys of its text part replaced, or taken out by ABSENT."""
    config = copy.deepcopy(FLASH)
    for name, value in text.items():
        if value is ABSENT:
            del config["text_config"][name]
        else:
            config["text_config"][name] = value
    return config


def test_published(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, FLASH))
    assert config == Glm5NextConfig(
        vocab_size=154880,
        hidden_size=4096,
        num_layers=45,
        layer_types=tuple("mla" if i % 4 == 3 else "kda" for i in range(45)),
        mlp_types=("dense",) * 3 + ("moe",) * 42,
        indexer_types=("full",) * 45,
        intermediate_size=12288,
        moe_intermediate_size=2048,
        num_experts=288,
        experts_per_token=8,
        num_shared_experts=1,
        routed_scaling=2.5,
        norm_topk=True,
        n_group=1,
        topk_group=1,
        num_heads=64,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=256,
        v_head_dim=256,
        index_heads=32,
        index_head_dim=128,
        index_topk=2048,
        index_kpool=4,
        kda_heads=64,
        kda_head_dim=128,
        conv_kernel=4,
        gate_lower_bound=-5.0,
        hc_mult=4,
        hc_sinkhorn_iters=20,
        hc_eps=1e-6,
        swiglu_limit=10.0,
        rms_eps=1e-5,
        max_length=1048576,
        eos_ids=(154820, 154827, 154829),
        tie_embeddings=False,
        mtp_layers=1,
        mtp_shares_index=True,
    )
    assert config.layer_types.count("mla") == 11
    assert read_dtype(tmp_path) is torch.bfloat16


def test_transformers_spelling(tmp_path: Path) -> None:
    """The same model as `save_pretrained` writes it."""
    saved = flash(
        linear_attn_config=ABSENT,
        linear_num_heads=64,
        linear_head_dim=128,
        linear_conv_kernel_dim=4,
        linear_lower_bound=-5.0,
        layer_types=["indexed_attention" if i % 4 == 3 else "linear_attention" for i in range(45)],
        head_dim=0,
        qk_head_dim=256,
        output_router_logits=False,
    )
    here, there = tmp_path / "hf", tmp_path / "published"
    here.mkdir()
    there.mkdir()
    assert read_config(write(here, saved)) == read_config(write(there, FLASH))


def test_flat_text_only(tmp_path: Path) -> None:
    flat = FLASH["text_config"] | {"torch_dtype": "float16"}
    here, there = tmp_path / "flat", tmp_path / "nested"
    here.mkdir()
    there.mkdir()
    assert read_config(write(here, flat)) == read_config(write(there, FLASH))
    assert read_dtype(here) is torch.float16


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ({"layer_types": ABSENT}, ("layer_types", FLASH["text_config"]["layer_types"])),
        ({"mlp_layer_types": ABSENT}, ("mlp_types", ("dense",) * 3 + ("moe",) * 42)),
        ({"indexer_types": ABSENT}, ("indexer_types", ("full",) * 45)),
        ({"swiglu_limit": None}, ("swiglu_limit", None)),
        ({"norm_topk_prob": False}, ("norm_topk", False)),
        ({"eos_token_id": 7}, ("eos_ids", (7,))),
        ({"eos_token_id": None}, ("eos_ids", ())),
    ],
)
def test_defaults_and_forms(
    tmp_path: Path, text: dict[str, object], expected: tuple[str, Any]
) -> None:
    name, value = expected
    if name == "layer_types":
        value = tuple("mla" if "sparse" in word else "kda" for word in value)
    assert getattr(read_config(write(tmp_path, flash(**text))), name) == value


@pytest.mark.parametrize(
    ("linear", "bound"),
    [
        ({"gate_lower_bound": -3.0}, -3.0),
        ({"gate_lower_bound": None}, -5.0),  # transformers: a safe gate has a bound
        ({"gate_lower_bound": None, "safe_gate": False}, None),
    ],
)
def test_gate_bound(tmp_path: Path, linear: dict[str, object], bound: float | None) -> None:
    nested = FLASH["text_config"]["linear_attn_config"] | linear
    config = read_config(write(tmp_path, flash(linear_attn_config=nested)))
    assert config.gate_lower_bound == bound


REFUSED = [
    ({"qk_rope_head_dim": 64}, "qk_rope_head_dim = 64 is not supported"),
    ({"attention_bias": True}, "attention_bias = True is not supported"),
    ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
    ({"n_group": 4}, "n_group = 4 is not supported"),
    ({"topk_group": 2}, "topk_group = 2 is not supported"),
    ({"scoring_func": "softmax"}, "scoring_func = 'softmax' is not supported"),
    ({"index_kpool_always_select_tail": False}, "index_kpool_always_select_tail = False"),
    ({"mhc": False}, "mhc = False is not supported"),
    ({"num_key_value_heads": 8}, "num_key_value_heads = 8 is not supported, only 64"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is not supported"),
    ({"index_kpool": ABSENT}, "index_kpool is missing"),
    ({"q_lora_rank": None}, "q_lora_rank is missing"),
    ({"hidden_size": ABSENT}, "hidden_size is missing"),
    ({"hidden_size": "4096"}, "hidden_size must be an integer, found '4096'"),
    ({"hidden_size": True}, "hidden_size must be an integer, found True"),
    ({"hidden_size": 4096.0}, "hidden_size must be an integer, found 4096.0"),
    ({"hidden_size": 0}, "hidden_size must be at least 1, found 0"),
    ({"rms_norm_eps": "small"}, "rms_norm_eps must be a number"),
    ({"norm_topk_prob": 1}, "norm_topk_prob must be true or false, found 1"),
    ({"layer_types": ["linear_attention"]}, "layer_types must have 45 entries, found 1"),
    ({"layer_types": "linear_attention"}, "layer_types must be a list of strings"),
    ({"layer_types": ["mamba"] * 45}, "layer_types has 'mamba', expected one of"),
    ({"mlp_layer_types": ABSENT, "first_k_dense_replace": 1}, "first_k_dense_replace = 1 needs"),
    ({"indexer_types": ABSENT, "index_topk_freq": 4}, "index_topk_freq = 4 is not supported"),
    ({"indexer_types": ABSENT, "index_topk_pattern": "FS"}, "index_topk_pattern needs an explicit"),
    ({"index_topk": 2047}, "index_topk = 2047 is no multiple of index_kpool 4"),
    ({"index_kpool": 3, "index_topk": 2049}, "index_kpool = 3 does not divide 64"),
    ({"num_experts_per_tok": 289}, "num_experts_per_tok exceeds n_routed_experts 288"),
    ({"linear_num_heads": 64}, "linear_num_heads is given beside linear_attn_config"),
    ({"swiglu_limit": -1.0}, "swiglu_limit must be positive"),
    ({"eos_token_id": 154880}, "eos_token_id 154880 is outside the 154880 ids"),
    ({"eos_token_id": [1, "2"]}, "eos_token_id must be token ids, found '2'"),
    ({"tie_word_embeddings": True}, "tie_word_embeddings differs from text_config's"),
]


@pytest.mark.parametrize(("text", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_refused(tmp_path: Path, text: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config(write(tmp_path, flash(**text)))
    assert message in str(caught.value)
    assert str(tmp_path / "config.json") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_refused_outside_the_text_part(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="model_type = 'llama' is not supported"):
        read_config(write(tmp_path, FLASH | {"model_type": "llama"}))
    with pytest.raises(ConfigError, match="quantization_config is not supported"):
        read_config(write(tmp_path, FLASH | {"quantization_config": {}}))
    with pytest.raises(ConfigError, match="text_config must be an object, found a list"):
        read_config(write(tmp_path, FLASH | {"text_config": []}))
    with pytest.raises(ConfigError, match="dtype = 'float8_e4m3fn' is not one of float32"):
        read_dtype(write(tmp_path, FLASH | {"dtype": "float8_e4m3fn"}))


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "no such file"), (b"{", "not JSON"), (b"\xff", "not JSON"), (b"[]", "found a list")],
)
def test_unreadable(tmp_path: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_config(tmp_path)


def test_unknown_keys_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, flash(frobnicate=1))
    with caplog.at_level(logging.DEBUG, logger="merestone"):
        read_config(tmp_path)
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path / 'config.json'}: unknown keys ignored: frobnicate"
    ]


def test_published_keys_are_all_known(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="merestone"):
        read_config(write(tmp_path, FLASH))
    assert not caplog.records


def test_generation_config(tmp_path: Path) -> None:
    assert read_generation_config(tmp_path).temperature is None
    write(tmp_path, FLASH, {"temperature": 1, "top_p": 0.95, "top_k": 40, "eos_token_id": [3, 5]})
    generation = read_generation_config(tmp_path)
    assert (generation.temperature, generation.top_p, generation.top_k) == (1.0, 0.95, 40)
    assert generation.min_p is None
    assert generation.do_sample is None
    # The generation file's end ids win over config.json's.
    assert read_config(tmp_path).eos_ids == (3, 5)
    write(tmp_path, FLASH, {"temperature": "hot"})
    with pytest.raises(ConfigError, match=r"generation_config\.json: temperature must be a number"):
        read_generation_config(tmp_path)
