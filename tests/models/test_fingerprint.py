"""What tells two models apart before any of them is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from merestone.models import fingerprint as module
from merestone.models.fingerprint import SAMPLE, fingerprint

COUNT = 5 * SAMPLE


@pytest.fixture(params=["whole", "samples"])
def model(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model whose files are read whole, or in samples as large ones are."""
    if request.param == "samples":
        monkeypatch.setattr(module, "READ_WHOLE", 0)
    (tmp_path / "config.json").write_text("{}")
    write(tmp_path)
    return tmp_path


def write(place: Path, at: int | None = None, name: str = "b") -> None:
    tensors = {"a": torch.zeros(8), name: torch.zeros(COUNT, dtype=torch.uint8)}
    if at is not None:
        tensors[name][at] = 1
    save_file(tensors, place / "model.safetensors")


@pytest.mark.parametrize("at", [0, SAMPLE - 1, COUNT // 2, COUNT - 1])
def test_weights_at_the_begin_middle_and_end_of_a_tensor(model: Path, at: int) -> None:
    before = fingerprint(model)
    write(model)
    assert fingerprint(model) == before
    write(model, at)
    assert fingerprint(model) != before


def test_names_configuration_and_format(model: Path) -> None:
    found = {fingerprint(model), fingerprint(model, "random")}
    write(model, name="c")
    found.add(fingerprint(model))
    (model / "config.json").write_text("{ }")
    found |= {fingerprint(model), fingerprint(model, "random")}
    assert len(found) == 5
    write(model, at=0, name="c")  # weights that are made in memory are not read
    assert fingerprint(model, "random") in found


def test_large_files_are_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "READ_WHOLE", 0)
    (tmp_path / "config.json").write_text("{}")
    write(tmp_path)
    before = fingerprint(tmp_path)
    write(tmp_path, at=SAMPLE + 1)  # between two samples
    assert fingerprint(tmp_path) == before
    (tmp_path / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0[]")
    with pytest.raises(ValueError, match="is no safetensors file"):
        fingerprint(tmp_path)
