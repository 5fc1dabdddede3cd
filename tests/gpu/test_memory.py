"""Memory on a device: what is not enough is said with its numbers and options."""

from __future__ import annotations

import pytest

import merestone.engine.build as build
import merestone.engine.gpu as gpu
from merestone.engine.build import EngineOptions, build_engine
from merestone.engine.machine import resolve_device

GIB = 1 << 30


def rank(options: EngineOptions) -> gpu._Rank:
    """Of frames of 1 MiB, on a device that nobody touches."""
    layout = type("Layout", (), {"frame_bytes": 1 << 20})()
    return gpu._Rank(None, layout, options, "cuda", None)


def test_too_little_memory_names_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = gpu._Sizes(
        free=20 * GIB, weights=96 * GIB, slots=6 * GIB, workspace=9 * GIB, graphs=4 * GIB
    )
    monkeypatch.setattr(gpu, "_measure", lambda *args: sizes)
    with pytest.raises(ValueError, match=r"20\.00 GiB free") as caught:
        gpu._frames(rank(EngineOptions(device="cuda")))
    words = str(caught.value)
    for part in ("weights 96.00", "slots 6.00", "workspace 9.00", "graphs 4.00", "--token-budget"):
        assert part in words
    assert "\n" not in words


def test_what_is_left_is_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = gpu._Sizes(free=30 * GIB, weights=GIB, slots=GIB, workspace=2 * GIB, graphs=GIB)
    monkeypatch.setattr(gpu, "_measure", lambda *args: sizes)
    frames, notes = gpu._frames(rank(EngineOptions()))
    assert frames == (30 - 1 - 2 - 1 - 1) * 1024
    assert "pool 25.00 GiB" in notes[0]
    # What was asked for is not measured.
    assert gpu._frames(rank(EngineOptions(frames=7))) == (7, [])
    assert gpu._frames(rank(EngineOptions(memory=5 << 20))) == (5, [])


def test_an_installation_without_triton_is_told_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def absent(name: str) -> None:
        raise ModuleNotFoundError("No module named 'triton'", name="triton")

    monkeypatch.setattr(build, "import_module", absent)
    with pytest.raises(ValueError, match=r"needs Triton: install merestone\[gpu\]"):
        build.build_gpu_rank(None, EngineOptions(), "cuda")


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "mps"])
def test_an_unknown_device_is_named(device: str) -> None:
    with pytest.raises(ValueError, match="--device"):
        resolve_device(device)


def test_an_absent_device_is_named(tmp_path) -> None:
    with pytest.raises(ValueError, match="--device cuda:77: no such CUDA device"):
        build_engine(tmp_path, EngineOptions(device="cuda:77"))
