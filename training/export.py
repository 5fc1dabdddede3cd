"""From training parameters to a checkpoint in the published layout, and back.

    python -m training.export --weights DIR --tokenizer DIR --out DIR

Knows the published tensor names. Matrices are stored in bf16; what the family keeps in fp32 stays.
The draft goes to ``draft`` below ``--out``.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from training.draft import Draft
from training.model import Target
from training.shape import TINY, Shape
from training.vocabulary import CONTROL, MASK

SHARD_BYTES = 15 * 2**20
PREFIX = "model.language_model."
_FP32 = ("conv1d.weight", "dt_bias", "A_log", "_base", "_scale", "e_score_correction_bias")
_INDEX_BARE = ("index_kpool_compress_gate", "index_kpool_compress_ape")


def published(state: Mapping[str, Tensor], shape: Shape) -> Iterator[tuple[str, Tensor]]:
    """Published names and tensors from a `Target`'s state, stacked experts taken apart."""
    for name, tensor in state.items():
        if name == "lm_head":
            yield "lm_head.weight", tensor
        elif name in ("embed_tokens", "norm"):
            yield f"{PREFIX}{name}.weight", tensor
        elif name.startswith("mtp."):
            rest = name.removeprefix("mtp.")
            rest = "shared_head.norm" if rest == "norm" else rest
            yield from _layer(f"{PREFIX}layers.{shape.layers}.", rest, tensor, shape)
        else:
            _, number, rest = name.split(".", 2)
            yield from _layer(f"{PREFIX}layers.{number}.", rest, tensor, shape)


def _layer(prefix: str, rest: str, tensor: Tensor, shape: Shape) -> Iterator[tuple[str, Tensor]]:
    block, _, leaf = rest.rpartition(".")
    if block in ("hc_attn", "hc_ffn"):
        yield f"{prefix}{block}_{leaf}", tensor
    elif leaf in ("A_log", "dt_bias", *_INDEX_BARE):
        yield prefix + rest, tensor
    elif leaf == "conv":
        for part, rows in zip("qkv", tensor.chunk(3), strict=True):
            yield f"{prefix}{block}.{part}_conv1d.weight", rows[:, None]
    elif leaf == "k_norm_bias":
        yield f"{prefix}{block}.k_norm.bias", tensor
    elif rest == "mlp.gate_bias":
        yield f"{prefix}mlp.gate.e_score_correction_bias", tensor
    elif block == "mlp" and leaf != "gate" and _stacked(tensor, shape):
        middle = shape.moe_intermediate
        stack = torch.split(tensor, middle, dim=1 if leaf == "down_proj" else 0)
        for expert, matrix in enumerate(stack[:-1]):
            yield f"{prefix}mlp.experts.{expert}.{leaf}.weight", matrix
        yield f"{prefix}mlp.shared_experts.{leaf}.weight", stack[-1]
    else:
        yield f"{prefix}{rest}.weight", tensor


def _stacked(tensor: Tensor, shape: Shape) -> bool:
    return (shape.experts + 1) * shape.moe_intermediate in tensor.shape


def restored(
    tensors: Mapping[str, Tensor], like: Mapping[str, Tensor], shape: Shape
) -> dict[str, Tensor]:
    """The inverse of `published`, for a state with the names and shapes of ``like``, in fp32.

    Raises:
        KeyError: a tensor is missing.
    """
    return {
        name: _assemble(
            name, [tensors[part].float() for part, _ in published({name: value}, shape)]
        )
        for name, value in like.items()
    }


def _assemble(name: str, parts: list[Tensor]) -> Tensor:
    if name.endswith(".conv"):
        return torch.cat([part[:, 0] for part in parts])
    return torch.cat(parts, dim=1 if name.endswith("down_proj") else 0)


def stored(name: str, tensor: Tensor) -> Tensor:
    return tensor.float() if name.endswith(_FP32) else tensor.to(torch.bfloat16)


def write_shards(tensors: Mapping[str, Tensor], directory: Path) -> None:
    """model-0000x-of-0000y.safetensors of at most `SHARD_BYTES`, and their index."""
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if size + tensor.nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor.contiguous()
        size += tensor.nbytes
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(shard, directory / file, metadata={"format": "pt"})
        places |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def read_shards(directory: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in sorted(directory.glob("model-*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def split_draft(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What training leaves, as the states of a `Target` and of a `Draft`."""
    drafted = {n.removeprefix("draft."): t for n, t in tensors.items() if n.startswith("draft.")}
    return {n: t for n, t in tensors.items() if not n.startswith("draft.")}, drafted


def config(shape: Shape, ids: Mapping[str, int]) -> dict[str, object]:
    """config.json. ``ids``: of the control tokens, by name."""
    mla = [shape.is_mla(layer) for layer in range(shape.layers)]
    ends = [ids[name] for name in ("<|endoftext|>", "<|user|>", "<|observation|>")]
    text: dict[str, object] = {
        "attention_bias": False,
        "dtype": "bfloat16",
        "eos_token_id": ends,
        "first_k_dense_replace": shape.dense_layers,
        "hc_eps": shape.hc_eps,
        "hc_mult": shape.streams,
        "hc_sinkhorn_iters": shape.sinkhorn,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "index_head_dim": shape.index_size,
        "index_kpool": shape.pool,
        "index_kpool_always_select_tail": True,
        "index_n_heads": shape.index_heads,
        "index_share_for_mtp_iteration": True,
        "index_topk": shape.index_topk,
        "indexer_types": ["full"] * shape.layers,
        "intermediate_size": shape.intermediate,
        "kv_lora_rank": shape.kv_rank,
        "layer_types": ["deepseek_sparse_attention" if m else "linear_attention" for m in mla],
        "linear_attn_config": {
            "full_attn_layers": [layer for layer, m in enumerate(mla) if m],
            "gate_lower_bound": shape.gate_bound,
            "head_dim": shape.kda_size,
            "kda_layers": [layer for layer, m in enumerate(mla) if not m],
            "num_heads": shape.kda_heads,
            "safe_gate": True,
            "short_conv_kernel_size": shape.conv,
        },
        "max_position_embeddings": shape.max_length,
        "mlp_layer_types": [
            "dense" if layer < shape.dense_layers else "sparse" for layer in range(shape.layers)
        ],
        "model_type": "glm5_next_text",
        "moe_intermediate_size": shape.moe_intermediate,
        "n_group": 1,
        "n_routed_experts": shape.experts,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": shape.heads,
        "num_experts_per_tok": shape.experts_per_token,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.heads,
        "num_nextn_predict_layers": 1,
        "pad_token_id": ids["<|endoftext|>"],
        "q_lora_rank": shape.q_rank,
        "qk_nope_head_dim": shape.qk_size,
        "qk_rope_head_dim": 0,
        "rms_norm_eps": shape.eps,
        "routed_scaling_factor": shape.routed_scaling,
        "swiglu_limit": shape.swiglu_limit,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "v_head_dim": shape.v_size,
        "vocab_size": shape.vocab,
    }
    return {
        "architectures": ["Glm5NextForConditionalGeneration"],
        "dtype": "bfloat16",
        "model_type": "glm5_next",
        "text_config": text,
        "tie_word_embeddings": False,
        # transformers always builds a vision tower; this one has no weights.
        "vision_config": {
            "depth": 1,
            "hidden_size": 32,
            "image_size": 28,
            "intermediate_size": 64,
            "model_type": "glm5_next_vision",
            "num_heads": 2,
            "out_hidden_size": shape.hidden,
            "patch_size": 14,
            "projection_intermediate_size": 64,
        },
    }


def published_draft(state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Published names and tensors from a `Draft`'s state."""
    bare = ("base_kernel", "predecessor_codebook", "successor_codebook")
    for name, tensor in state.items():
        block, _, leaf = name.rpartition(".")
        if leaf in ("predecessor_codebook", "successor_codebook", "hidden_projection"):
            name = f"candidate_selector.{leaf}"
        elif leaf in ("gate_proj", "up_proj", "down_proj"):
            name = f"{block}.mlp.{leaf}"
        yield (name if leaf in bare else f"{name}.weight"), tensor


def draft_config(shape: Shape, mask: int) -> dict[str, object]:
    """config.json of the draft, as DFlash2 drafts are published."""
    return {
        "architectures": ["DFlash2DraftModel"],
        "attention_bias": False,
        "dflash_config": {
            "block_size": shape.draft_block,
            "conv_group_size": shape.draft_conv_group,
            "conv_kernel_size": shape.draft_conv,
            "mask_token_id": mask,
            "selector_rank": shape.selector_rank,
            "selector_top_k": shape.selector_topk,
            "target_layer_ids": list(shape.draft_taps),
        },
        "dtype": "bfloat16",
        "head_dim": shape.draft_size,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.draft_intermediate,
        "is_causal": False,
        "layer_types": ["sliding_attention"] * shape.draft_layers,
        "max_position_embeddings": shape.max_length,
        "max_window_layers": shape.draft_layers,
        "model_type": "qwen3",
        "num_attention_heads": shape.draft_heads,
        "num_hidden_layers": shape.draft_layers,
        "num_key_value_heads": shape.draft_heads,
        "num_target_layers": shape.layers,
        "rms_norm_eps": shape.eps,
        "rope_parameters": {"rope_theta": shape.rope_theta, "rope_type": "default"},
        "sliding_window": shape.draft_window,
        "tie_word_embeddings": False,
        "use_sliding_window": True,
        "vocab_size": shape.vocab,
    }


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")


def export(weights: Path, tokenizer: Path, out: Path, shape: Shape) -> None:
    """Write the whole model directory.

    Raises:
        RuntimeError: tensors are missing or misshapen.
    """
    tensors = read_shards(weights)
    target, drafted = split_draft(tensors)
    # Loading is the check that nothing is missing or left over.
    Target(shape).load_state_dict(target)
    Draft(shape).load_state_dict(drafted)
    (out / "draft").mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if tokenizer != out:
            shutil.copy(tokenizer / name, out / name)
    vocabulary = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    ids = {name: number for name, number in vocabulary.get_vocab().items() if name in CONTROL}
    described = config(shape, ids)
    _write_json(out / "config.json", described)
    ends = [ids[name] for name in ("<|endoftext|>", "<|user|>", "<|observation|>")]
    _write_json(
        out / "generation_config.json",
        {"do_sample": False, "eos_token_id": ends, "pad_token_id": ends[0], "temperature": 0.0},
    )
    _write_json(out / "draft" / "config.json", draft_config(shape, ids[MASK]))
    write_shards({n: stored(n, t) for n, t in published(target, shape)}, out)
    compact = {n: t.bfloat16().contiguous() for n, t in published_draft(drafted)}
    save_file(compact, out / "draft" / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", type=Path, required=True, help="what training left")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    export(options.weights, options.tokenizer, options.out, TINY)


if __name__ == "__main__":
    main()
