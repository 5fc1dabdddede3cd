"""Putting the doing side together on a GPU: layout, arena, slots, passes and runner.

Knows every room of it by name. Imported only where a GPU is asked for: Triton is needed here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from merestone.device.gpu_passes import MIXED, Passes
from merestone.device.gpu_runner import GpuRunner
from merestone.device.gpu_state import GpuState
from merestone.device.layout import Layout, plan_layout
from merestone.engine.build import CPU_MEMORY, EngineOptions
from merestone.engine.facts import Facts
from merestone.models.gpu import GpuModel, fields, on_gpu, slot_fields
from merestone.models.interface import CHUNK, Model

MARGIN = 1 << 30
"""Bytes that are left to the driver, to libraries and to fragmentation."""
GRAPH_SLACK = 1.25
"""What graphs take beside the workspace of their largest: their own descriptions, and pools."""
SHARED_ENTRIES = 2 * CHUNK
"""Tokens of a page table beyond the longest sequence."""


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Bytes on the device: free before anything but weights, and what takes part of it."""

    free: int
    weights: int
    slots: int
    workspace: int
    graphs: int

    @property
    def left(self) -> int:
        return self.free - self.slots - self.workspace - self.graphs - MARGIN

    def words(self) -> str:
        parts = (
            ("weights", self.weights),
            ("slots", self.slots),
            ("workspace", self.workspace),
            ("graphs", self.graphs),
            ("reserve", MARGIN),
        )
        return ", ".join(f"{name} {size / 2**30:.2f} GiB" for name, size in parts)


def build_gpu_rank(model: Model, options: EngineOptions, device: str) -> tuple[GpuRunner, Facts]:
    """The doing side of one rank on ``device``. Takes the CPU model's weights away.

    Raises:
        ValueError: a family without GPU layers; memory that does not suffice.
    """
    try:
        placed = on_gpu(model, device)
    except torch.OutOfMemoryError as error:
        raise ValueError(f"--device {device}: the weights do not fit: {_first(error)}") from error
    return gpu_rank(placed, options, device)


def gpu_rank(placed: GpuModel, options: EngineOptions, device: str) -> tuple[GpuRunner, Facts]:
    """Layout, arena, slots and runner around a model that is on ``device``. Raises ValueError."""
    info = placed.info
    graphs = options.graphs and device != "cpu" and not placed.world.ranks.staged
    layout = plan_layout(
        fields(placed),
        hidden_bytes=info.hidden_size * info.dtype.itemsize,
        chunk=CHUNK,
        page_multiple=info.page_multiple,
        full_page=options.page,
        dcp=placed.world.dcp,
    )
    frames, notes = _frames(placed, layout, options, device)
    if placed.world.tp > 1:  # what is free differs a little; all ranks have as many
        mine = torch.tensor([frames], device=device)
        frames = int(placed.world.ranks.gather(mine).min())
    state = _state(placed, layout, options, device, frames)
    passes = Passes(
        placed, state, rows=options.token_budget, slots=options.max_running, graphs=graphs
    )
    passes.capture_ladder()
    if graphs:
        notes.append(f"decoding graphs {passes.graph_bytes / 2**20:,.0f} MiB")
    facts = Facts(
        vocab_size=info.vocab_size,
        max_length=info.max_length,
        eos_ids=info.eos_ids,
        dtype=str(info.dtype).removeprefix("torch."),
        device=device,
        frames=frames,
        frame_bytes=layout.frame_bytes,
        groups=layout.groups,
        anchor_frames=layout.anchor_frames,
        hidden_rows=layout.hidden_rows,
        notes=(*layout.explain(), *notes),
        layout=repr(fields(placed)),
    )
    return GpuRunner(placed, state, passes), facts


def _state(
    model: GpuModel, layout: Layout, options: EngineOptions, device: str, frames: int
) -> GpuState:
    info = model.info
    full = next(group.span for group in layout.groups if group.name == "full")
    return GpuState(
        layout,
        fields(model),
        slot_fields(model),
        frames=frames,
        slots=options.max_running,
        longest=min(info.max_length, frames * full) + SHARED_ENTRIES,
        hidden=info.hidden_size,
        hidden_dtype=info.dtype,
        device=device,
        poison=options.poison,
        rank=model.world.neighbours.rank,
    )


def _frames(
    model: GpuModel, layout: Layout, options: EngineOptions, device: str
) -> tuple[int, list[str]]:
    """Frames of the pool, as asked for or as measured, and lines for the log."""
    if options.frames is not None or options.memory is not None or device == "cpu":
        memory = options.memory or CPU_MEMORY
        return options.frames or memory // layout.frame_bytes, []
    try:
        sizes = _measure(model, layout, options, device)
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"--token-budget {options.token_budget}, --max-running {options.max_running}: a step"
            f" does not fit beside the weights: {_first(error)}"
        ) from error
    frames = sizes.left // layout.frame_bytes
    if frames < 2:
        raise ValueError(
            f"--device {device}: nothing is left for the pool of {sizes.free / 2**30:.2f} GiB free"
            f" beside the weights: {sizes.words()}; lower --token-budget or --max-running"
        )
    return frames, [f"memory: {sizes.words()}, pool {sizes.left / 2**30:.2f} GiB"]


def _measure(model: GpuModel, layout: Layout, options: EngineOptions, device: str) -> _Sizes:
    """Run the largest steps on padding alone, with a pool of almost nothing."""
    torch.cuda.empty_cache()
    weights, free = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
    # Page tables as long as the whole memory would allow.
    group = next(group for group in layout.groups if group.name == "full")
    most, full = free // layout.row_bytes["full"] * group.shard, group.span
    probe = GpuState(
        layout,
        fields(model),
        slot_fields(model),
        frames=1,
        slots=options.max_running,
        longest=min(model.info.max_length, most + full) + SHARED_ENTRIES,
        hidden=model.info.hidden_size,
        hidden_dtype=model.info.dtype,
        device=device,
    )
    slots = torch.cuda.memory_allocated() - weights
    passes = Passes(
        model, probe, rows=options.token_budget, slots=options.max_running, graphs=False
    )
    longest = min(model.info.max_length, most)
    workspace = passes.measure(options.token_budget, longest)
    graphs = 0
    if options.graphs:
        graphs = int(GRAPH_SLACK * passes.measure(min(MIXED[-1], options.token_budget), longest))
    del passes, probe
    torch.cuda.empty_cache()
    return _Sizes(free, weights, slots, workspace, graphs)


def _first(error: Exception) -> str:
    return str(error).split(". ")[0]
