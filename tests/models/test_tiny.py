"""Tiny checkpoints: the same bytes every time, tokenizer and shapes as promised."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer

from merestone.models.config import ConfigError, read_config, read_generation_config
from merestone.models.tiny import VOCAB, write_tiny
from merestone.models.tiny_tokenizer import CONTROL_IDS, EOS_IDS

# models.md section 9.
ROLES = ["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]
MARKED = ["think", "tool_call", "arg_key", "arg_value", "tool_response", "tools"]
CONTROL = [*ROLES, "<|endoftext|>", *(mark for m in MARKED for mark in (f"<{m}>", f"</{m}>"))]


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("shards", [1, 3])
def test_same_seed_same_bytes(tmp_path: Path, shards: int) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_tiny(tmp_path / name, seed=seed, shards=shards)
    first, again, other = (contents(tmp_path / name) for name in "abc")
    assert first == again
    differing = {name for name in first if first[name] != other[name]}
    assert differing == {name for name in first if name.endswith(".safetensors")}
    write_tiny(tmp_path / "a", seed=1, shards=shards)
    assert contents(tmp_path / "a") == other


def test_fast_enough(tmp_path: Path) -> None:
    start = time.thread_time()
    write_tiny(tmp_path)
    assert time.thread_time() - start < 2.0


def test_default_shape(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    config = read_config(tmp_path)
    assert (config.hidden_size, config.num_layers, config.vocab_size) == (64, 8, VOCAB)
    assert [i for i, kind in enumerate(config.layer_types) if kind == "mla"] == [3, 7]
    assert config.mlp_types == ("dense",) * 3 + ("moe",) * 5
    assert (config.kda_heads, config.kda_head_dim) == (4, 16)
    assert (config.index_heads, config.index_topk, config.index_kpool) == (16, 512, 4)
    assert (config.max_length, config.gate_lower_bound) == (65536, -5.0)
    assert config.eos_ids == EOS_IDS
    generation = read_generation_config(tmp_path)
    assert (generation.temperature, generation.top_p) == (1.0, 0.95)


def test_options_reach_the_configuration(tmp_path: Path) -> None:
    write_tiny(
        tmp_path,
        hidden_size=32,
        layers=5,
        max_length=1000,
        index_topk=64,
        index_heads=8,
        index_kpool=8,
        experts=4,
        experts_per_token=3,
        shared_experts=2,
        norm_topk=False,
        gate_lower_bound=None,
        hc_sinkhorn_iters=3,
        swiglu_limit=None,
    )
    config = read_config(tmp_path)
    assert (config.hidden_size, config.num_layers, config.max_length) == (32, 5, 1000)
    assert (config.index_topk, config.index_heads, config.index_kpool) == (64, 8, 8)
    assert (config.num_experts, config.experts_per_token) == (4, 3)
    assert (config.num_shared_experts, config.norm_topk) == (2, False)
    assert (config.gate_lower_bound, config.swiglu_limit) == (None, None)
    assert config.hc_sinkhorn_iters == 3


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_keeps_the_familys_fp32(tmp_path: Path, dtype: str) -> None:
    write_tiny(tmp_path, dtype=dtype)
    kept = {
        name.rpartition("layers.")[2].partition(".")[2]
        for name, value in load_file(tmp_path / "model.safetensors").items()
        if value.dtype == torch.float32
    }
    assert kept == {
        *(f"hc_{block}_{part}" for block in ("attn", "ffn") for part in ("base", "scale")),
        *(f"self_attn.{part}_conv1d.weight" for part in "qkv"),
        "self_attn.dt_bias",
        "self_attn.A_log",
        "mlp.gate.e_score_correction_bias",
    }


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"layers": 3}, ValueError, "3 layers in 1 shards"),
    ({"shards": 0}, ValueError, "8 layers in 0 shards"),
    ({"index_topk": 30}, ConfigError, "index_topk = 30 is no multiple of index_kpool 4"),
]


@pytest.mark.parametrize(("options", "error", "message"), BAD)
def test_bad_options(
    tmp_path: Path, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        write_tiny(tmp_path, **options)


def test_other_weights_are_not_mixed_in(tmp_path: Path) -> None:
    write_tiny(tmp_path, shards=2)
    with pytest.raises(FileExistsError, match="other weights are here already"):
        write_tiny(tmp_path)


def test_tokenizer(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert list(CONTROL_IDS) == CONTROL
    assert [tokenizer.token_to_id(token) for token in CONTROL] == list(range(256, 275))
    assert tokenizer.get_vocab_size() == 275
    text = "".join(CONTROL) + " naïve\r\n\t☃ \x00\x7f"
    expected = [*range(256, 275), *" naïve\r\n\t☃ \x00\x7f".encode()]
    assert tokenizer.encode(text).ids == expected
    assert tokenizer.decode(expected, skip_special_tokens=False) == text
    # Roles vanish from what a client reads, thinking and tool marks do not.
    shown = tokenizer.decode(expected[:19], skip_special_tokens=True)
    assert shown == "".join(CONTROL[7:])
    json.loads((tmp_path / "tokenizer_config.json").read_text())


def test_transformers_reads_the_tokenizer(tmp_path: Path) -> None:
    """The reference tokenizer gives the same ids and renders the same template."""
    write_tiny(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Größe?"},
        {"role": "assistant", "reasoning_content": "hm", "content": "", "tool_calls": [
            {"type": "function", "function": {"name": "size", "arguments": {"of": "é", "n": 1}}},
        ]},
        {"role": "tool", "content": "3"},
    ]  # fmt: skip
    text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "[gMASK]<sop><|system|>Be brief.<|user|>Größe?<|assistant|><think>hm</think><tool_call>size"
        "<arg_key>of</arg_key><arg_value>é</arg_value><arg_key>n</arg_key><arg_value>1</arg_value>"
        "</tool_call><|observation|><tool_response>3</tool_response><|assistant|>"
    )
    tokens = theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert tokens == ours.encode(text).ids
    assert theirs.eos_token_id == EOS_IDS[0]
