"""Directories with the configurations of published models, for weights made in memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from merestone.models.tiny import write_tiny, write_tiny_kimi

KIMI_LAYERS = 27
_KIMI_FULL = (4, 8, 12, 16, 20, 24, 27)


def write_kimi(directory: Path) -> None:
    """Kimi-Linear-48B-A3B, as published."""
    write_tiny_kimi(directory)
    kda = [n for n in range(1, KIMI_LAYERS + 1) if n not in _KIMI_FULL]
    linear = {"head_dim": 128, "num_heads": 32, "kda_layers": kda}
    _change(
        directory,
        {
            "dtype": "bfloat16", "hidden_size": 2304, "intermediate_size": 9216,
            "kv_lora_rank": 512, "moe_intermediate_size": 1024, "num_attention_heads": 32,
            "num_key_value_heads": 32, "num_hidden_layers": KIMI_LAYERS, "num_experts": 256,
            "num_experts_per_token": 8, "num_shared_experts": 1, "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 163840,
        },
        linear | {"full_attn_layers": list(_KIMI_FULL)},
    )  # fmt: skip


def write_glm_slice(directory: Path, experts: int = 64, layers: int = 8, mtp: bool = False) -> None:
    """The first ``layers`` of GLM-5.3-Flash at their true dimensions, with ``experts`` of 288
    experts, and its MTP layer."""
    write_tiny(directory, layers=layers, mtp=mtp, index_heads=32, index_topk=2048, experts=experts)
    _change(
        directory,
        {
            "dtype": "bfloat16", "hidden_size": 4096, "intermediate_size": 12288,
            "kv_lora_rank": 512, "moe_intermediate_size": 2048, "num_attention_heads": 64,
            "num_key_value_heads": 64, "num_experts_per_tok": 8, "q_lora_rank": 1536,
            "qk_nope_head_dim": 256, "v_head_dim": 256, "index_head_dim": 128,
            "vocab_size": 154880,
        },
        {"head_dim": 128, "num_heads": 64},
    )  # fmt: skip


def _change(directory: Path, values: dict[str, Any], linear: dict[str, Any]) -> None:
    """Other values in config.json (in its text part, if it has one); no weights stay."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    text = config.get("text_config", config)
    unknown = values.keys() - text.keys()
    assert not unknown, sorted(unknown)
    text.update(values)
    config["dtype"] = text["dtype"]  # the outer one counts
    text["linear_attn_config"].update(linear)
    path.write_text(json.dumps(config))
    for weights in directory.glob("*.safetensors"):
        weights.unlink()
