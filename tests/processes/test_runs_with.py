"""What ranks compare before they begin: any difference that changes results shows, by name."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from merestone.engine.build import EngineOptions
from merestone.engine.ranks import worker
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


def test_the_drafts_weights(model: Path, tmp_path: Path) -> None:
    """Ranks may find them at the same path, and not find the same."""
    found = []
    for seed in (0, 1):
        write_tiny(tmp_path, seed=seed)  # any files will do
        options = {"speculate": "dflash", "draft": str(tmp_path)}
        found.append(runs_with(config(model, **options)))
    assert differing(*found) == ["the model's files"]


def test_ranks_that_share_a_gpu_are_told_how_much_of_it(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would take all that is left. With a GPU for each they measure it, over NCCL."""
    monkeypatch.setattr(worker, "resolve_device", lambda device: device)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    ranks = RankOptions(tp=2)
    bare, told = EngineOptions(device="cuda"), EngineOptions(device="cuda", memory=1 << 30)
    given = RankConfig(1, 1, ranks, "", str(model), msgspec.Raw(b"{}"))
    with pytest.raises(ValueError, match=r"--tp 2: 2 ranks share 1 GPU.*give --memory"):
        worker._place(bare, given)
    assert worker._place(told, given) == ("cuda:0", "gloo")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert worker._place(bare, given) == ("cuda:1", None)
