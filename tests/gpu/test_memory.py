"""Memory on a device: what is not enough is said with its numbers and options."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator

import pytest
import torch
from bench.asking import ask

import merestone.engine.build as build
import merestone.engine.gpu as gpu
from gpu.machine import BUNDLED, tiny
from merestone.engine.build import EngineOptions, build_engine
from merestone.engine.engine import LocalEngine
from merestone.engine.machine import resolve_device, room
from merestone.engine.ranks.messages import RankOptions
from merestone.probe.streams import stream

GIB = 1 << 30


@pytest.fixture(autouse=True)
def released() -> Iterator[None]:
    """What one engine took of a device is there for the next."""
    yield
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


NUMBERS = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.80 GiB of"
    " which 1.25 GiB is free"
)
SHORT = NUMBERS + (
    ". Including non-PyTorch memory, this process has 138.55 GiB memory in use. Of the allocated"
    " memory 137.00 GiB is allocated by PyTorch. If reserved but unallocated memory is large try"
    " setting PYTORCH_ALLOC_CONF=expandable_segments:True"
)


def rank(options: EngineOptions) -> gpu._Rank:
    """Of frames of 1 MiB, on a device that nobody touches."""
    layout = type("Layout", (), {"frame_bytes": 1 << 20})()
    return gpu._Rank(None, layout, options, "cuda", None)


def test_too_little_memory_names_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = gpu._Sizes(
        free=20 * GIB, weights=96 * GIB, slots=6 * GIB, workspace=6 * GIB, graphs=4 * GIB,
        libraries=3 * GIB,
    )  # fmt: skip
    monkeypatch.setattr(gpu, "_measure", lambda *args: sizes)
    with pytest.raises(ValueError, match=r"20\.00 GiB free") as caught:
        gpu._frames(rank(EngineOptions(device="cuda")))
    words = str(caught.value)
    for part in (
        "weights 96.00",
        "slots 6.00",
        "workspace 6.00",
        "libraries 3.00",
        "--token-budget",
    ):
        assert part in words
    assert "\n" not in words


def test_what_is_left_is_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = gpu._Sizes(
        free=30 * GIB, weights=GIB, slots=GIB, workspace=2 * GIB, graphs=GIB, libraries=GIB
    )
    monkeypatch.setattr(gpu, "_measure", lambda *args: sizes)
    frames, notes = gpu._frames(rank(EngineOptions()))
    assert frames == (30 - 1 - 2 - 1 - 1 - 1) * 1024
    assert "pool 24.00 GiB" in notes[0]
    # What was asked for is not measured.
    assert gpu._frames(rank(EngineOptions(frames=7))) == (7, [])
    assert gpu._frames(rank(EngineOptions(memory=5 << 20))) == (5, [])


def short(*args: object, **options: object) -> None:
    raise torch.OutOfMemoryError(SHORT)


def test_out_of_memory_is_one_line_with_what_was_asked_for_and_is_there() -> None:
    with pytest.raises(ValueError, match="no room") as caught, room("--memory: no room"):
        short()
    assert str(caught.value) == f"--memory: no room: {NUMBERS}"
    with pytest.raises(RuntimeError, match="another"), room("--memory: no room"):
        raise RuntimeError("another failure")


@pytest.mark.parametrize(
    "said", ["Triton Error [CUDA]: out of memory", "CUDA error: out of memory"]
)
def test_memory_that_the_driver_lacks_is_said_in_one_line_too(said: str) -> None:
    """Kernels that are loaded, graphs and page-locked memory do not come from the allocator."""
    with pytest.raises(ValueError, match="no room") as caught, room("--memory: no room"):
        raise RuntimeError(f"{said}\nCompile with `TORCH_USE_CUDA_DSA` to enable assertions.")
    assert str(caught.value) == f"--memory: no room: {said}"


@pytest.mark.parametrize(
    ("module", "name", "said"),
    [
        (build, "load_model", "--device cpu: the weights do not fit"),
        (build, "load_drafter", "--device cpu: the draft's weights do not fit beside the model's"),
        (build, "Arena", "--memory, --frames: a pool of 0.50 GiB does not fit"),
    ],
)
def test_wherever_memory_ends_while_loading(
    monkeypatch: pytest.MonkeyPatch, module: object, name: str, said: str
) -> None:
    monkeypatch.setattr(module, name, short)
    with pytest.raises(ValueError, match=re.escape(f"{said}: {NUMBERS}")):
        build_engine(BUNDLED, EngineOptions())


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("on_gpu", "--device cpu: the weights do not fit"),
        ("GpuState", "--memory, --frames: a pool of 0.50 GiB, slots and graphs do not fit"),
        ("Passes", "--memory, --frames: a pool of 0.50 GiB, slots and graphs do not fit"),
    ],
)
def test_wherever_memory_ends_on_a_device(
    monkeypatch: pytest.MonkeyPatch, name: str, said: str
) -> None:
    model = tiny()
    monkeypatch.setattr(gpu, "on_gpu", lambda model, device: model)
    monkeypatch.setattr(gpu, name, short)
    with pytest.raises(ValueError, match=re.escape(f"{said}: {NUMBERS}")):
        gpu.build_gpu_rank(model, EngineOptions(), "cpu")


def test_a_step_that_does_not_fit_names_what_makes_it_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu, "_measure", short)
    said = "--token-budget 512, --max-running 8: a step does not fit beside the weights"
    with pytest.raises(ValueError, match=re.escape(f"{said}: {NUMBERS}")):
        gpu._frames(rank(EngineOptions()))


def test_a_pool_that_the_host_does_not_have() -> None:
    with pytest.raises(ValueError, match=r"--memory, --frames: a pool of .* allocate \d+ bytes"):
        build_engine(BUNDLED, EngineOptions(memory=1 << 55))


@pytest.mark.gpu
def test_a_pool_that_the_device_does_not_have() -> None:
    with pytest.raises(ValueError, match=r"--memory, --frames: a pool .* [\d.]+ GiB is free"):
        gpu.gpu_rank(tiny(), EngineOptions(memory=1 << 50), "cuda")


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A device that seems to end at 12 GiB: other tests may run on the rest of it."""
    size, total = 12 * GIB, torch.cuda.mem_get_info()[1]

    def free(*device: object) -> tuple[int, int]:
        return size - torch.cuda.memory_reserved(), total

    monkeypatch.setattr(torch.cuda, "mem_get_info", free)
    torch.cuda.set_per_process_memory_fraction(size / total)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.gpu
@pytest.mark.usefixtures("part")
@pytest.mark.parametrize("speculate", ["none", "mtp:3", "dflash"])
def test_graphs_take_no_more_than_was_set_aside(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, speculate: str
) -> None:
    """What they took, and what was set aside for them, is in the log."""
    measure, found = gpu._measure, []

    def measured(rank: gpu._Rank) -> gpu._Sizes:
        found.append(measure(rank))
        return found[-1]

    monkeypatch.setattr(gpu, "_measure", measured)
    options = EngineOptions(
        device="cuda", dtype="bfloat16", speculate=speculate, token_budget=4096, max_running=64
    )
    with caplog.at_level("INFO"):
        engine = build_engine(BUNDLED, options)
    said = re.search(r"\d+ graphs in ([\d,]+) MiB", caplog.text)
    assert said is not None
    passes = engine.device.passes
    assert int(said[1].replace(",", "")) == round(passes.graph_bytes / 2**20)
    assert 0 < passes.graph_bytes <= found[0].graphs
    assert f"graphs {found[0].graphs / GIB:.2f} GiB" in caplog.text
    serves(engine)


def serves(engine: LocalEngine) -> None:
    """The pool took all that was left; the largest steps still fit, and many streams."""
    vocab = engine.info.vocab_size
    engine.start()
    try:
        found = ask(engine, [stream(9000, number, vocab=vocab) for number in range(8)], 20)
    finally:
        engine.stop()
    assert [(len(answer.ids), answer.error) for answer in found] == [(20, None)] * 8


@pytest.mark.multi_gpu
@pytest.mark.parametrize("speculate", ["none", "mtp:3", "dflash"])
@pytest.mark.parametrize("dcp", [1, 2])
def test_what_connects_ranks_is_set_aside_too(dcp: int, speculate: str) -> None:
    options = EngineOptions(
        device="cuda", dtype="bfloat16", speculate=speculate, token_budget=4096, max_running=8,
        ranks=RankOptions(tp=2, dcp=dcp),
    )  # fmt: skip
    serves(build_engine(BUNDLED, options))


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
