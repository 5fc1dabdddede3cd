"""What ranks compare before they begin: any difference that changes results shows, by name."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from merestone.engine.build import EngineOptions
from merestone.engine.ranks.messages import RankConfig, RankOptions
from merestone.engine.ranks.worker import runs_with
from merestone.models.tiny import write_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("ranks") / "tiny"
    write_tiny(directory)
    return directory


def config(directory: Path, rank: int = 0, node: int = 0, **options) -> RankConfig:
    ranks = RankOptions(tp=2, nodes=2, node=node, master="a:1")
    engine = EngineOptions(ranks=ranks, **options)
    raw = msgspec.Raw(msgspec.json.encode(engine))
    return RankConfig(rank, 0, ranks, "", str(directory), raw)


def differing(one: dict[str, str], other: dict[str, str]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if one[name] != other[name]]


def test_ranks_of_one_engine_agree(model: Path) -> None:
    assert runs_with(config(model)) == runs_with(config(model, rank=1, node=1))


def test_an_option(model: Path) -> None:
    ours = runs_with(config(model))
    assert differing(ours, runs_with(config(model, token_budget=77))) == ["option token_budget"]


def test_weights_of_the_same_shapes(model: Path, tmp_path: Path) -> None:
    write_tiny(tmp_path, seed=1)
    ours, theirs = runs_with(config(model)), runs_with(config(tmp_path))
    assert differing(ours, theirs) == ["the model's files"]
