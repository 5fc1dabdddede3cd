"""merestone's kimi_linear against transformers' (5.23.0), fp32, prefill and decode.

Where the reference misleads, or is not usable as one:

- The latent's norm has an epsilon of 1e-6 whatever ``rms_norm_eps`` says (the published code has
  this too); every other norm has ``rms_norm_eps``. One variant makes the difference large.
- Without ``linear_attn_config`` or ``layer_types`` it falls back to a schedule that no checkpoint
  has. We insist on one of them.
- Saving renames the dense layer's ``mlp`` to ``block_sparse_moe``. We read both.
- It adds a token's experts in ascending expert order in the model's dtype, and expands keys and
  values where we keep them absorbed: equal to about 1e-6 of the logits' size. We compare within
  1e-4.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from merestone.models.kimi_config import read_kimi_config
from merestone.models.kimi_linear import KimiLinear
from merestone.models.loader import load_model
from merestone.models.tiny import write_tiny_kimi
from models.plain_loop import PlainLoop
from models.reference import LONG, Pair, Variant, check, transformers
from models.test_kimi_config import PUBLISHED


def load(directory: Path) -> Pair:
    theirs = transformers.KimiLinearForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return Pair(PlainLoop(load_model(directory, torch.float32)), theirs.eval())


VARIANTS = [
    Variant("default"),
    Variant("nothing shared", {"shared_dim": 0}),
    Variant("raw router weights", {"norm_topk": False}),
    Variant("more experts", {"experts": 16, "experts_per_token": 5, "shared_experts": 2}),
    Variant("small", {"hidden_size": 32, "layers": 5}),
    Variant("two shards", {"shards": 2, "seed": 7}),
]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_published_layout(tmp_path: Path, variant: Variant) -> None:
    write_tiny_kimi(tmp_path, **variant.options)
    check(load(tmp_path), LONG if variant.name == "default" else 200)


HF: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32,
    "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 4,
    "num_shared_experts": 1, "num_experts": 8, "num_experts_per_token": 2, "kv_lora_rank": 32,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "model_max_length": 4096,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "linear_attn_config": {
        "head_dim": 16, "num_heads": 4, "short_conv_kernel_size": 4,
        "kda_layers": [1, 2, 3, 5, 6, 7], "full_attn_layers": [4, 8],
    },
}  # fmt: skip


def save_reference(directory: Path, **options: Any) -> None:
    """A checkpoint as transformers initialises and saves it; constants are shaken, so that none is
    an accidental 0 or 1, and the head is scaled to spread the logits. An option of ... is left out.
    """
    torch.manual_seed(0)
    given = {name: value for name, value in (HF | options).items() if value is not ...}
    model = transformers.KimiLinearForCausalLM(transformers.KimiLinearConfig(**given))
    with torch.no_grad():
        for name, value in model.model.state_dict().items():
            if value.unique().numel() == 1:
                value.add_(0.2 * torch.randn_like(value))
            elif value.dim() > 1 and "conv1d" not in name and "A_log" not in name:
                value.mul_(4.0)
        model.lm_head.weight.mul_(6.0)
    model.save_pretrained(directory)


def words(full: tuple[int, ...]) -> list[str]:
    return ["full_attention" if i in full else "linear_attention" for i in range(8)]


FLAT = {"linear_head_dim": 16, "linear_num_heads": 6, "linear_conv_kernel_dim": 2}
HF_VARIANTS = [
    Variant("default"),
    Variant("a large epsilon, which the latent's norm ignores", {"rms_norm_eps": 0.05}),
    Variant(
        "words and flat keys, two MLA layers in a row, other sizes",
        {"linear_attn_config": ..., "layer_types": words((3, 4)), **FLAT},
    ),
    Variant("all dense layers", {"mlp_layer_types": ["dense"] * 8}),
    Variant("all expert layers", {"mlp_layer_types": ["sparse"] * 8}),
    Variant("three dense layers", {"first_k_dense_replace": 3}),
    Variant("unequal heads", {"qk_nope_head_dim": 24, "v_head_dim": 8, "qk_rope_head_dim": 16}),
]


@pytest.mark.parametrize("variant", HF_VARIANTS, ids=lambda variant: variant.name)
def test_saved_by_transformers(tmp_path: Path, variant: Variant) -> None:
    save_reference(tmp_path, **variant.options)
    check(load(tmp_path), 200)


def test_what_saving_renames(tmp_path: Path) -> None:
    """The quirk is real: the dense layer of a saved model is named like one with experts."""
    save_reference(tmp_path)
    names = set(load_file(tmp_path / "model.safetensors"))
    assert "model.layers.0.block_sparse_moe.gate_proj.weight" in names
    assert not any(name.startswith("model.layers.0.mlp.") for name in names)
    assert json.loads((tmp_path / "config.json").read_text())["mlp_layer_types"][0] == "dense"


class Declared:
    """A source that makes shapes only, and counts."""

    def __init__(self) -> None:
        self.count = 0

    def draw(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = torch.empty(shape, device="meta")
        self.count += tensor.numel()
        return tensor


def test_the_published_shape_has_all_its_parameters(tmp_path: Path) -> None:
    """Kimi-Linear-48B-A3B, on paper: as many parameters as in the reference."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    declared = Declared()
    model = KimiLinear(read_kimi_config(tmp_path), declared, torch.bfloat16)
    options = {k: v for k, v in PUBLISHED.items() if k not in ("rope_scaling", "rope_theta")}
    with torch.device("meta"):
        theirs = transformers.KimiLinearForCausalLM(transformers.KimiLinearConfig(**options))
    buffers = (v.numel() for n, v in theirs.named_buffers() if "e_score_correction_bias" in n)
    total = sum(v.numel() for v in theirs.parameters()) + sum(buffers)
    assert declared.count == total
    assert 48e9 < total < 50e9
    # What a token leaves behind: 576 values in each of 7 layers; an anchor, 2 MiB in each of 20.
    rows = [field for field in model.fields() if field.home == "full"]
    assert sum(field.bytes for field in rows) == 7 * 1152
    states = [field for field in model.fields() if field.name == "state"]
    assert sum(field.bytes for field in states) == 20 << 21
