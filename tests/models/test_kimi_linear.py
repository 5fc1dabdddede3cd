"""The second family from a directory: strict loading, tiny checkpoints that remember and write
text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from merestone.models.kimi_config import read_kimi_config
from merestone.models.loader import LoadError, load_model
from merestone.models.tiny import ARCHITECTURES, VOCAB, write_tiny_kimi
from merestone.models.tiny_tokenizer import EOS_IDS
from models.plain_loop import PlainLoop, Run
from models.test_power import TRIALS, continue_with, measure_power, run_to
from models.test_power import text as printable

PROMPT = [256, 257, 258, *b"Answer with one word.", 259, *b"What stands at a boundary?", 260]
DENSE = "model.layers.0.mlp.gate_proj.weight"
EXPERT = "model.layers.1.block_sparse_moe.experts.1.w3.weight"


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    write_tiny_kimi(tmp_path, layers=4, experts=2)
    return tmp_path


def change(directory: Path, **tensors: Tensor | None) -> None:
    path = directory / "model.safetensors"
    stored = {name: value.clone() for name, value in load_file(path).items()} | tensors
    save_file({name: value for name, value in stored.items() if value is not None}, path)


def test_published_names_and_shapes(tiny: Path) -> None:
    stored = load_file(tiny / "model.safetensors")
    assert stored["model.layers.0.self_attn.A_log"].shape == (1, 1, 4, 1)
    assert stored["model.layers.3.self_attn.q_proj.weight"].shape == (4 * (16 + 8), 64)
    assert stored["model.layers.3.self_attn.kv_a_proj_with_mqa.weight"].shape == (32 + 8, 64)
    assert {DENSE, EXPERT, "lm_head.weight"} < set(stored)


def test_info(tiny: Path) -> None:
    info = load_model(tiny).info
    assert (info.family, info.vocab_size, info.hidden_size) == ("kimi_linear", VOCAB, 64)
    assert (info.max_length, info.eos_ids, info.page_multiple) == (65536, EOS_IDS, 1)
    assert load_model(tiny, max_length=100).info.max_length == 100


def test_the_command_lines_shape(tmp_path: Path) -> None:
    ARCHITECTURES["kimi_linear"](tmp_path, 0)
    config = read_kimi_config(tmp_path)
    assert [i for i, kind in enumerate(config.layer_types) if kind == "mla"] == [3, 7]
    assert config.mlp_types == ("dense",) + ("moe",) * 7


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (DENSE, None, r"layers\.0\.mlp\.gate_proj\.weight is missing"),
        (EXPERT, None, r"experts\.1\.w3\.weight is missing"),
        ("model.layers.0.self_attn.A_log", torch.zeros(4), r"A_log has shape \(4,\)"),
        ("model.layers.3.self_attn.indexer.wk.weight", torch.zeros(1), r"indexer\.wk\.weight"),
        (
            "model.layers.0.block_sparse_moe.gate_proj.weight",
            torch.zeros(1),
            r"is a second tensor for layers\.0\.mlp\.gate_proj\.weight|second tensor",
        ),
    ],
)
def test_strict(tiny: Path, name: str, value: Tensor | None, message: str) -> None:
    change(tiny, **{name: value})
    with pytest.raises(LoadError, match=message):
        load_model(tiny)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(tmp_path: Path, dtype: str) -> None:
    write_tiny_kimi(tmp_path, dtype=dtype)
    stored = load_file(tmp_path / "model.safetensors")
    kept = {
        n.rpartition("layers.")[2].partition(".")[2]
        for n, v in stored.items()
        if v.dtype is torch.float32
    }
    assert kept == {
        *(f"self_attn.{part}_conv1d.weight" for part in "qkv"),
        "self_attn.dt_bias",
        "self_attn.A_log",
        "block_sparse_moe.gate.e_score_correction_bias",
    }  # fmt: skip
    logits = PlainLoop(load_model(tmp_path)).logits(PROMPT)
    assert logits.dtype is torch.float32
    assert logits.isfinite().all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_decoding_is_prefilling_and_replies_are_text(tmp_path: Path, dtype: str) -> None:
    write_tiny_kimi(tmp_path, dtype=dtype)
    loop = PlainLoop(load_model(tmp_path))
    ids, logits = loop.generate(PROMPT, 120)
    assert torch.equal(loop.logits(PROMPT + ids[:-1])[len(PROMPT) - 1 :], logits)
    chances = logits.softmax(-1)
    end = chances[:, list(EOS_IDS)].sum(-1)
    readable = chances[:, [*range(32, 127), ord("\n")]].sum(-1)
    assert (readable + end).min() > 0.999
    assert 1e-4 < end.mean() < 0.05


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory):
    directory = tmp_path_factory.mktemp("kimi")
    write_tiny_kimi(directory)
    return load_model(directory)


@pytest.mark.parametrize("head", [64, 448, 1984])
def test_wrong_head_changes_the_output(model, head: int) -> None:
    loop = PlainLoop(model)
    assert measure_power(lambda prompt: loop.generate(prompt, 16)[0], head) == TRIALS


def test_wrong_anchor_changes_the_output(model) -> None:
    """Attention sees the right head; only the recurrent anchor at 1024 tokens is another's."""
    generator = torch.Generator().manual_seed(5)
    changed = 0
    for _ in range(TRIALS):
        head, other, last = (printable(n, generator) for n in (1024, 1024, 64))
        right = continue_with(model, run_to(model, head, 96), last, 16)
        damaged, donor = run_to(model, head, 96), run_to(model, other, 96)
        take_anchor(damaged, donor)
        changed += continue_with(model, damaged, last, 16) != right
    assert changed == TRIALS


def take_anchor(run: Run, donor: Run) -> None:
    assert run.anchor_frame is not None
    assert donor.anchor_frame is not None
    for key, value in run.state.anchors.items():
        value[run.anchor_frame] = donor.state.anchors[key][donor.anchor_frame]
