"""Weights made in memory: any configuration serves without files, the same bits every time."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.real import Real, stream
from merestone.engine.build import EngineOptions, build_engine
from merestone.models.interface import Model
from merestone.models.loader import LoadError, load_model
from merestone.models.tiny import ARCHITECTURES
from models.plain_loop import PlainLoop

PROMPT = list(stream(200, 3))


@pytest.fixture(params=sorted(ARCHITECTURES))
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A tiny model's directory without its weights."""
    ARCHITECTURES[request.param](tmp_path, 0)
    (tmp_path / "model.safetensors").unlink()
    return tmp_path


def make(directory: Path, **options: object) -> Model:
    load: Callable[..., Model] = load_model
    return load(directory, load_format="random", **options)


def test_no_file_is_needed(directory: Path) -> None:
    with pytest.raises(LoadError, match=r"neither model\.safetensors nor"):
        load_model(directory)
    model = make(directory)
    assert model.info.dtype is torch.float32
    assert PlainLoop(model).logits(PROMPT).isfinite().all()


def test_the_seed_decides(directory: Path) -> None:
    first, again, other = (PlainLoop(make(directory, seed=s)).logits(PROMPT) for s in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_any_shape(directory: Path) -> None:
    """The configuration alone says what is made: other sizes than the tiny ones."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    text = config.get("text_config", config)
    text |= {"hidden_size": 48, "vocab_size": 1000, "v_head_dim": 24, "moe_intermediate_size": 40}
    path.write_text(json.dumps(config))
    model = make(directory, dtype=torch.bfloat16)
    assert (model.info.vocab_size, model.info.dtype) == (1000, torch.bfloat16)
    assert PlainLoop(model).hidden(PROMPT).shape == (200, 48)


def test_bfloat16_if_no_dtype_is_named(directory: Path) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    for part in (config, config.get("text_config", config)):
        part.pop("dtype", None)
    path.write_text(json.dumps(config))
    assert make(directory).info.dtype is torch.bfloat16


def test_it_remembers(directory: Path) -> None:
    """Power: another head before the same 64 tokens gives another answer."""
    loop = PlainLoop(make(directory))
    tail = list(stream(64, 9))
    answers = {tuple(loop.generate(list(stream(448, key)) + tail, 12)[0]) for key in range(20, 24)}
    assert len(answers) == 4


def test_warm_is_cold(directory: Path) -> None:
    real = Real(make(directory), frames=4000)
    prompt = stream(150, 5)
    for restored in (0, 150):
        assert real.check(prompt, real.ask(prompt, 6)).cache.restored == restored


def test_options(directory: Path) -> None:
    engine = build_engine(directory, EngineOptions(load_format="random", threads=1, frames=2000))
    assert engine.info.model == directory.name
    with pytest.raises(ValueError, match="--load-format 'dummy' is not one of auto, random"):
        build_engine(directory, EngineOptions(load_format="dummy"))
