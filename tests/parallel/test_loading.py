"""A rank reads its share of the weight files, and of the others' only names."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from layers.schedules import text
from merestone.layers.weights import WeightError, Weights
from merestone.models.loader import ConfigError, load_model
from merestone.models.tiny import write_tiny
from merestone.parallel.group import Group
from merestone.parallel.world import World
from parallel import passes
from parallel.ranks import Ranks

MATRIX = 32 << 20


def planned(rank: int, tp: int) -> World:
    """A rank's numbers; nothing is exchanged."""
    return World(rank, tp, 1, "cpu", Group("planned", rank, tp))


def mapped(path: Path) -> int:
    """Bytes of a file that this process has in memory; others' come and go with the garbage."""
    return sum(file.rss for file in psutil.Process().memory_maps() if file.path == str(path))


def test_only_a_ranks_rows_are_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    rows = MATRIX // 4096
    save_file({"a": torch.ones(rows, 1024), "b": torch.ones(rows, 1024)}, path)
    with safe_open(path, framework="pt") as file:
        weights = Weights({name: file.get_tensor(name) for name in ("a", "b")}, torch.float32,
                          planned(1, 4))  # fmt: skip
    before = mapped(path)
    part = weights.take("a", (rows, 1024), split=0)
    assert part.shape == (rows // 4, 1024)
    assert float(part.sum()) == MATRIX / 16
    grown = mapped(path) - before
    assert 0.9 * MATRIX / 4 < grown < 1.5 * MATRIX / 4, grown


@pytest.mark.parametrize("split", [0, 1])
def test_parts_make_the_whole(split: int) -> None:
    whole = torch.arange(7 * 6.0).view(7, 6)
    parts = [
        Weights({"a": whole}, torch.float32, planned(rank, 3)).take("a", (7, 6), split=split)
        for rank in range(3)
    ]
    assert torch.equal(torch.cat(parts, split), whole)
    with pytest.raises(WeightError, match=r"weight a .* is too small for 8 ranks"):
        Weights({"a": whole}, torch.float32, planned(7, 8)).take("a", (7, 6), split=split)


def test_files_and_memory_give_the_same_ranks(ranks: Ranks, tmp_path: Path) -> None:
    write_tiny(tmp_path, seed=0, layers=4, index_topk=32, shards=3)
    for hidden, scores in ranks.run(passes.loaded, 2, 2, tmp_path):
        whole, wanted = passes.run(load_model(tmp_path), World(), text(90, 1))
        torch.testing.assert_close(hidden, whole, atol=2e-4, rtol=0)
        torch.testing.assert_close(scores, wanted, atol=2e-3, rtol=0)


def test_heads_that_cannot_be_shared_are_the_users_fault(tmp_path: Path) -> None:
    write_tiny(tmp_path, seed=0, layers=4)
    with pytest.raises(ConfigError, match="--tp 3 does not divide the 4 heads of KDA"):
        load_model(tmp_path, world=planned(0, 3))
