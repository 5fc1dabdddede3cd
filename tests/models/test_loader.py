"""From a directory to a running model: dtypes, lengths, and errors that name what is wrong."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from merestone.models.loader import ConfigError, LoadError, load_model
from merestone.models.tiny import VOCAB, write_tiny
from merestone.models.tiny_tokenizer import EOS_IDS
from models.plain_loop import PlainLoop

PROMPT = [256, 257, *b"A merestone marks a boundary."]
NORM = "model.language_model.norm.weight"


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    write_tiny(tmp_path, layers=4, experts=2)
    return tmp_path


def change(directory: Path, **tensors: Tensor | None) -> None:
    path = directory / "model.safetensors"
    stored = {name: value.clone() for name, value in load_file(path).items()} | tensors
    save_file({name: value for name, value in stored.items() if value is not None}, path)


def set_config(directory: Path, **keys: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def test_info(tiny: Path) -> None:
    info = load_model(tiny).info
    assert (info.vocab_size, info.hidden_size, info.max_length) == (VOCAB, 64, 65536)
    assert (info.family, info.eos_ids, info.dtype) == ("glm5_next", EOS_IDS, torch.float32)
    assert load_model(tiny, max_length=100).info.max_length == 100


@pytest.mark.parametrize("length", [0, 65537])
def test_bad_length(tiny: Path, length: int) -> None:
    with pytest.raises(ConfigError, match=rf"a length of {length} tokens is outside 1\.\.65536"):
        load_model(tiny, max_length=length)


@pytest.mark.parametrize(
    ("stored", "asked", "computed"),
    [
        ("float32", None, torch.float32),
        ("float32", torch.bfloat16, torch.bfloat16),
        ("bfloat16", None, torch.bfloat16),
        ("bfloat16", torch.float32, torch.float32),
        ("float16", None, torch.float32),
        ("float16", torch.float16, torch.float32),
    ],
)
def test_dtypes(
    tmp_path: Path, stored: str, asked: torch.dtype | None, computed: torch.dtype
) -> None:
    write_tiny(tmp_path, layers=4, experts=2, dtype=stored)
    model = load_model(tmp_path, asked)
    assert model.info.dtype is computed
    loop = PlainLoop(model)
    assert loop.hidden(PROMPT).dtype is computed
    logits = loop.logits(PROMPT)
    assert logits.dtype is torch.float32
    assert logits.isfinite().all()


def test_dtype_of_the_embedding_when_none_is_named(tmp_path: Path) -> None:
    write_tiny(tmp_path, layers=4, experts=2, dtype="bfloat16")
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["dtype"], config["text_config"]["dtype"]
    path.write_text(json.dumps(config))
    assert load_model(tmp_path).info.dtype is torch.bfloat16
    change(tmp_path, **{"model.language_model.embed_tokens.weight": None})
    with pytest.raises(LoadError, match=r"embed_tokens\.weight is missing"):
        load_model(tmp_path)


def test_float16_weights_are_computed_exactly(tmp_path: Path) -> None:
    """A float16 checkpoint gives the bits of the same values stored as float32."""
    write_tiny(tmp_path, layers=4, experts=2, dtype="float16")
    half = PlainLoop(load_model(tmp_path)).logits(PROMPT)
    path = tmp_path / "model.safetensors"
    save_file({name: value.float() for name, value in load_file(path).items()}, path)
    assert torch.equal(PlainLoop(load_model(tmp_path, torch.float32)).logits(PROMPT), half)


def test_shards_change_no_bit(tiny: Path, tmp_path: Path) -> None:
    write_tiny(tmp_path / "sharded", layers=4, experts=2, shards=3)
    whole = PlainLoop(load_model(tiny)).logits(PROMPT)
    assert torch.equal(PlainLoop(load_model(tmp_path / "sharded")).logits(PROMPT), whole)


def test_tied_head(tiny: Path) -> None:
    config = json.loads((tiny / "config.json").read_text())
    config["text_config"]["tie_word_embeddings"] = True
    set_config(tiny, text_config=config["text_config"], tie_word_embeddings=True)
    embedding = load_file(tiny / "model.safetensors")["model.language_model.embed_tokens.weight"]
    change(tiny, **{"lm_head.weight": None})
    loop = PlainLoop(load_model(tiny))
    expected = loop.hidden(PROMPT) @ embedding.T
    torch.testing.assert_close(loop.logits(PROMPT), expected, rtol=0, atol=1e-4)


def test_unknown_family(tiny: Path) -> None:
    set_config(tiny, model_type="llama")
    with pytest.raises(ConfigError, match="model_type 'llama' is not one of glm5_next"):
        load_model(tiny)


def test_missing_tensor(tiny: Path) -> None:
    change(tiny, **{NORM: None})
    with pytest.raises(LoadError, match=r"norm\.weight is missing"):
        load_model(tiny)


def test_leftover_tensor(tiny: Path) -> None:
    change(tiny, **{"model.language_model.layers.0.self_attn.ghost.weight": torch.zeros(1)})
    with pytest.raises(LoadError, match=r"layers\.0\.self_attn\.ghost\.weight"):
        load_model(tiny)


def test_wrong_shape(tiny: Path) -> None:
    change(tiny, **{NORM: torch.zeros(63)})
    with pytest.raises(LoadError, match=r"norm\.weight has shape \(63,\), expected \(64,\)"):
        load_model(tiny)


def test_a_layer_too_many(tiny: Path) -> None:
    """The configuration counts one layer less than the file has: not an MTP layer, so an error."""
    config = json.loads((tiny / "config.json").read_text())["text_config"]
    for key in ("layer_types", "mlp_layer_types", "indexer_types"):
        config[key] = config[key][1:]
    set_config(tiny, text_config=config | {"num_hidden_layers": 3})
    with pytest.raises(LoadError):
        load_model(tiny)


def test_skipped_tensors_are_reported(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_tiny(tiny, layers=4, experts=2, mtp=False)
    change(tiny, **{"model.visual.patch_embed.proj.bias": torch.zeros(2)})
    with caplog.at_level(logging.INFO, logger="merestone"):
        load_model(tiny)
    assert "1 tensors skipped: ['model.visual.patch_embed.proj.bias']" in caplog.text
