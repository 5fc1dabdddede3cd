"""Tiny random checkpoints in the published layout: the default model, and every test's model.

Knows the files of a checkpoint and a small shape for each family. Must not know how a model is
loaded or run; the weights' values come from `tiny_weights`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from merestone.models.config import (
    CONFIG_FILE,
    GENERATION_FILE,
    WEIGHT_FILE,
    WEIGHT_INDEX_FILE,
    read_config,
)
from merestone.models.kimi_config import read_kimi_config
from merestone.models.tiny_tokenizer import CONTROL_IDS, EOS_IDS, tokenizer_files
from merestone.models.tiny_weights import draw

VOCAB = 320
"""Ids of the tokenizer, padded as real checkpoints are."""

# Kept in fp32 whatever the checkpoint's dtype.
_FP32_NAMES = ("conv1d.weight", "dt_bias", "A_log", "_base", "_scale", "e_score_correction_bias")


def write_tiny(
    directory: Path,
    seed: int = 0,
    *,
    hidden_size: int = 64,
    layers: int = 8,
    dtype: str = "float32",
    max_length: int = 65536,
    index_topk: int = 512,
    index_heads: int = 16,
    index_kpool: int = 4,
    experts: int = 8,
    experts_per_token: int = 2,
    shared_experts: int = 1,
    norm_topk: bool = True,
    gate_lower_bound: float | None = -5.0,
    hc_sinkhorn_iters: int = 20,
    swiglu_limit: float | None = 10.0,
    mtp: bool = True,
    shards: int = 1,
) -> None:
    """Write a random glm5_next checkpoint with tokenizer and chat template into ``directory``.

    The same arguments give the same bytes. Files are replaced one by one, each at once, so that a
    process that has the old ones mapped keeps them. ``dtype``: "float32" | "bfloat16" | "float16",
    of the tensors that the family does not keep in fp32. ``layers`` >= 4: layers 0 to 2 are dense,
    every fourth layer is MLA; with ``mtp`` an MTP layer follows. ``index_topk`` counts tokens.
    ``gate_lower_bound`` None is the softplus gate.

    Raises:
        ValueError: fewer than 4 layers or 1 shard.
        ConfigError: sizes that do not fit together.
        FileExistsError: ``directory`` holds weights in another number of files.
    """
    _check_counts(layers, shards)
    text = _text_config(hidden_size, layers, dtype, max_length)
    text |= {
        "index_topk": index_topk,
        "index_n_heads": index_heads,
        "index_kpool": index_kpool,
        "n_routed_experts": experts,
        "num_experts_per_tok": experts_per_token,
        "n_shared_experts": shared_experts,
        "norm_topk_prob": norm_topk,
        "hc_sinkhorn_iters": hc_sinkhorn_iters,
        "num_nextn_predict_layers": int(mtp),
        "swiglu_limit": swiglu_limit,
    }
    text["linear_attn_config"] = _linear_config(layers, gate_lower_bound)
    _write_words(directory, _outer_config(text, dtype), max_length, shards)
    tensors = draw(read_config(directory), seed)
    _write_weights(directory, "model.language_model.", tensors, dtype, shards)


def write_tiny_kimi(
    directory: Path,
    seed: int = 0,
    *,
    hidden_size: int = 64,
    layers: int = 8,
    dtype: str = "float32",
    max_length: int = 65536,
    shared_dim: int = 8,
    experts: int = 8,
    experts_per_token: int = 2,
    shared_experts: int = 1,
    norm_topk: bool = True,
    shards: int = 1,
) -> None:
    """Write a random kimi_linear checkpoint, as :func:`write_tiny` does.

    ``layers`` >= 4: layer 0 is dense, every fourth layer is MLA. ``shared_dim``: the part of a key
    that all heads share.

    Raises:
        ValueError, ConfigError, FileExistsError: as :func:`write_tiny`.
    """
    _check_counts(layers, shards)
    config = _kimi_config(hidden_size, layers, dtype, max_length)
    config |= {
        "qk_rope_head_dim": shared_dim,
        "num_experts": experts,
        "num_experts_per_token": experts_per_token,
        "num_shared_experts": shared_experts,
        "moe_renormalize": norm_topk,
    }
    _write_words(directory, config, max_length, shards)
    _write_weights(directory, "model.", draw(read_kimi_config(directory), seed), dtype, shards)


ARCHITECTURES: Mapping[str, Callable[[Path, int], None]] = {
    "glm5_next": write_tiny,
    "kimi_linear": write_tiny_kimi,
}
"""By family, what writes its tiny checkpoint of a seed into a directory."""


def _check_counts(layers: int, shards: int) -> None:
    if layers < 4 or shards < 1:
        raise ValueError(f"{layers} layers in {shards} shards: at least 4 and 1 are needed")


def _write_words(directory: Path, config: dict[str, object], max_length: int, shards: int) -> None:
    """Everything but the weights."""
    directory.mkdir(parents=True, exist_ok=True)
    _refuse_other_weights(directory, shards)
    _replace(directory / GENERATION_FILE, _json(_GENERATION))
    _replace(directory / CONFIG_FILE, _json(config))
    for name, content in tokenizer_files(max_length).items():
        _replace(directory / name, content.encode())


def _write_weights(
    directory: Path, prefix: str, tensors: Iterator[tuple[str, Tensor]], dtype: str, shards: int
) -> None:
    stored = getattr(torch, dtype)
    named = {
        name if name == "lm_head.weight" else prefix + name: (
            tensor if name.endswith(_FP32_NAMES) else tensor.to(stored)
        )
        for name, tensor in tensors
    }
    _save(directory, named, shards)


_GENERATION: dict[str, object] = {
    "do_sample": True,
    "eos_token_id": list(EOS_IDS),
    "pad_token_id": CONTROL_IDS["<|endoftext|>"],
    "temperature": 1.0,
    "top_p": 0.95,
}


def _text_config(hidden: int, layers: int, dtype: str, max_length: int) -> dict[str, object]:
    mla = [layer % 4 == 3 for layer in range(layers)]
    return {
        "attention_bias": False,
        "dtype": dtype,
        "eos_token_id": list(EOS_IDS),
        "first_k_dense_replace": 3,
        "hc_eps": 1e-6,
        "hc_mult": 4,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "index_head_dim": 16,
        "index_kpool_always_select_tail": True,
        "index_share_for_mtp_iteration": True,
        "indexer_types": ["full"] * layers,
        "intermediate_size": 2 * hidden,
        "kv_lora_rank": 32,
        "layer_types": [
            "deepseek_sparse_attention" if full else "linear_attention" for full in mla
        ],
        "max_position_embeddings": max_length,
        "mlp_layer_types": ["dense"] * 3 + ["sparse"] * (layers - 3),
        "model_type": "glm5_next_text",
        "moe_intermediate_size": 32,
        "n_group": 1,
        "num_attention_heads": 4,
        "num_hidden_layers": layers,
        "num_key_value_heads": 4,
        "pad_token_id": CONTROL_IDS["<|endoftext|>"],
        "q_lora_rank": 48,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 0,
        "rms_norm_eps": 1e-5,
        "routed_scaling_factor": 2.5,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "v_head_dim": 16,
        "vocab_size": VOCAB,
    }


def _linear_config(layers: int, gate_lower_bound: float | None) -> dict[str, object]:
    return {
        "full_attn_layers": [layer for layer in range(layers) if layer % 4 == 3],
        "gate_lower_bound": gate_lower_bound,
        "head_dim": 16,
        "kda_layers": [layer for layer in range(layers) if layer % 4 != 3],
        "num_heads": 4,
        # transformers takes null for -5 unless this is false.
        "safe_gate": gate_lower_bound is not None,
        "short_conv_kernel_size": 4,
    }


def _outer_config(text: dict[str, object], dtype: str) -> dict[str, object]:
    """The vision part is there for transformers, which always builds a tower; it has no weights."""
    return {
        "architectures": ["Glm5NextForConditionalGeneration"],
        "dtype": dtype,
        "model_type": "glm5_next",
        "text_config": text,
        "tie_word_embeddings": False,
        "vision_config": {
            "depth": 1,
            "hidden_size": 32,
            "image_size": 28,
            "intermediate_size": 64,
            "model_type": "glm5_next_vision",
            "num_heads": 2,
            "out_hidden_size": text["hidden_size"],
            "patch_size": 14,
            "projection_intermediate_size": 64,
        },
    }


def _kimi_config(hidden: int, layers: int, dtype: str, max_length: int) -> dict[str, object]:
    numbers = range(1, layers + 1)
    return {
        "architectures": ["KimiLinearForCausalLM"],
        "bos_token_id": CONTROL_IDS["[gMASK]"],
        "dtype": dtype,
        "eos_token_id": list(EOS_IDS),
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "kv_lora_rank": 32,
        "linear_attn_config": {
            "full_attn_layers": [number for number in numbers if number % 4 == 0],
            "head_dim": 16,
            "kda_layers": [number for number in numbers if number % 4 != 0],
            "num_heads": 4,
            "short_conv_kernel_size": 4,
        },
        "mla_use_nope": True,
        "model_max_length": max_length,
        "model_type": "kimi_linear",
        "moe_intermediate_size": 32,
        "moe_layer_freq": 1,
        "moe_router_activation_func": "sigmoid",
        "num_attention_heads": 4,
        "num_expert_group": 1,
        "num_hidden_layers": layers,
        "num_key_value_heads": 4,
        "num_nextn_predict_layers": 0,
        "pad_token_id": CONTROL_IDS["<|endoftext|>"],
        "q_lora_rank": None,
        "qk_nope_head_dim": 16,
        "rms_norm_eps": 1e-5,
        "routed_scaling_factor": 2.446,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "use_grouped_topk": True,
        "v_head_dim": 16,
        "vocab_size": VOCAB,
    }


def _refuse_other_weights(directory: Path, shards: int) -> None:
    """Leftovers of another layout would lie beside ours and make the directory ambiguous."""
    ours = set(_weight_files(shards))
    for path in directory.glob("model*.safetensors*"):
        if path.name not in ours:
            raise FileExistsError(f"{path}: other weights are here already")


def _weight_files(shards: int) -> list[str]:
    if shards == 1:
        return [WEIGHT_FILE]
    names = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    return [*names, WEIGHT_INDEX_FILE]


def _save(directory: Path, tensors: dict[str, Tensor], shards: int) -> None:
    names = list(tensors)
    each = -(-len(names) // shards)
    weight_map: dict[str, str] = {}
    for part, file_name in enumerate(_weight_files(shards)[:shards]):
        mine = names[part * each : (part + 1) * each]
        weight_map |= dict.fromkeys(mine, file_name)
        content = save({name: tensors[name] for name in mine}, metadata={"format": "pt"})
        _replace(directory / file_name, content)
    if shards > 1:
        total = sum(tensor.nbytes for tensor in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _replace(directory / WEIGHT_INDEX_FILE, _json(index))


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()


def _replace(path: Path, content: bytes) -> None:
    """Write beside ``path`` and move over it: no reader sees half a file."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_bytes(content)
    partial.replace(path)
