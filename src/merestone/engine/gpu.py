"""Putting the doing side together on a GPU: layout, arena, slots, passes and runner.

Knows every room of it by name. Imported only where a GPU is asked for: Triton is needed here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from merestone.device.gpu_dflash import GpuDFlashDrafter, GpuDFlashDrafting
from merestone.device.gpu_drafting import GpuDrafting, GpuMtpDrafter
from merestone.device.gpu_passes import MIXED, Passes
from merestone.device.gpu_runner import GpuRunner, OnDevice
from merestone.device.gpu_state import GpuState, current
from merestone.device.layout import Layout, plan_layout
from merestone.engine.build import CPU_MEMORY, EngineOptions, speculation_of
from merestone.engine.facts import Facts
from merestone.engine.machine import room
from merestone.models.gpu import GpuModel, fields, on_gpu, slot_fields
from merestone.models.gpu_dflash import GpuDFlash
from merestone.models.gpu_mtp import GpuMtp
from merestone.models.interface import CHUNK, Model
from merestone.spec.dflash import DFlashDrafter
from merestone.spec.interface import Drafter
from merestone.spec.mtp import MtpDrafter

Placed = GpuMtpDrafter | GpuDFlashDrafter
"""Drafters whose weights are on a device."""

MARGIN = 1 << 30
"""Bytes that are left to the driver, to libraries and to fragmentation."""
GRAPH_SLACK = 1.25
"""What graphs share: the workspace of the largest, and what does not fit into its gaps."""
GRAPH_BYTES = 8 << 20
"""What each graph takes for itself."""
SHARED_ENTRIES = 2 * CHUNK
"""Tokens of a page table beyond the longest sequence."""


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Bytes on the device: free before anything but weights, and what takes part of it.
    ``libraries``: what is not torch's, such as the buffers of ranks' messages."""

    free: int
    weights: int
    slots: int
    workspace: int
    graphs: int
    libraries: int

    @property
    def left(self) -> int:
        taken = self.slots + self.workspace + self.graphs + self.libraries
        return self.free - taken - MARGIN

    def words(self) -> str:
        parts = (
            ("weights", self.weights),
            ("slots", self.slots),
            ("workspace", self.workspace),
            ("graphs", self.graphs),
            ("libraries", self.libraries),
            ("reserve", MARGIN),
        )
        return ", ".join(f"{name} {size / 2**30:.2f} GiB" for name, size in parts)


def build_gpu_rank(
    model: Model, options: EngineOptions, device: str, drafter: Drafter | None = None
) -> tuple[GpuRunner, Facts]:
    """The doing side of one rank on ``device``. Takes the weights of model and drafter away.

    Raises:
        ValueError: a family or a drafter without GPU layers; memory that does not suffice.
    """
    with current(device):
        with room(f"--device {device}: the weights do not fit"):
            placed = on_gpu(model, device)
            drafting = draft_on_gpu(drafter, device) if drafter else None
        return gpu_rank(placed, options, device, drafting)


def draft_on_gpu(drafter: Drafter, device: str) -> Placed:
    """``drafter`` with its weights on ``device``.

    Raises:
        ValueError: a drafter without GPU layers.
    """
    if isinstance(drafter, MtpDrafter):
        return mtp_on_gpu(drafter, device)
    if isinstance(drafter, DFlashDrafter):
        draft = GpuDFlash(drafter.draft, device)
        return GpuDFlashDrafter(draft, drafter.groups, chances=drafter.chances)
    raise ValueError(f"--device {device}: a {type(drafter).__name__} drafts on the CPU only")


def mtp_on_gpu(drafter: MtpDrafter, device: str) -> GpuMtpDrafter:
    """``drafter`` with its layer on ``device``. Takes the layer's experts away. Ranks that share
    tokens do not share the layer's here: one of twelve layers' keys, and a pass over copies."""
    groups = tuple(replace(group, dealt=False) for group in drafter.groups)
    layer = GpuMtp(drafter.layer, device)
    return GpuMtpDrafter(layer, drafter.depth, groups, chances=drafter.chances)


def gpu_rank(
    placed: GpuModel,
    options: EngineOptions,
    device: str,
    drafter: Drafter | Placed | None = None,
) -> tuple[GpuRunner, Facts]:
    """Layout, arena, slots and runner around a model that is on ``device``. Raises ValueError."""
    info = placed.info
    graphs = options.graphs and device != "cpu" and not placed.world.ranks.staged
    own = fields(placed) + (drafter.fields() if drafter else ())
    layout = plan_layout(
        own,
        hidden_bytes=info.hidden_size * info.dtype.itemsize,
        chunk=CHUNK,
        page_multiple=info.page_multiple,
        full_page=options.page,
        dcp=placed.world.dcp,
        draft_groups=drafter.groups if drafter else (),
        lag=drafter.lag if drafter else 0,
    )
    rank = _Rank(placed, layout, options, device, drafter)
    frames, notes = _frames(rank)
    # What is free differs a little; all ranks obey the same plans.
    frames = placed.world.least(frames)
    full = next(group.span for group in layout.groups if group.name == "full")
    longest = min(info.max_length, frames * full)
    size = frames * layout.frame_bytes / 2**30
    with room(f"--memory, --frames: a pool of {size:.2f} GiB, slots and graphs do not fit"):
        state = rank.state(frames, longest, options.poison)
        passes = rank.passes(state, graphs)
        count = passes.capture_all(options.token_budget, longest)
        drafting = rank.drafting(state, passes)
        if isinstance(drafting, OnDevice):
            count += drafting.capture_all(longest)
    if count:
        notes.append(f"{count} graphs in {passes.graph_bytes / 2**20:,.0f} MiB")
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
        drafts=drafter.depth if drafter else 0,
        layout=repr(own),
    )
    rejecting = speculation_of(options).rejecting
    return GpuRunner(placed, state, passes, drafting, rejecting=rejecting), facts


@dataclass(frozen=True, slots=True)
class _Rank:
    """What the parts of one rank are made of."""

    model: GpuModel
    layout: Layout
    options: EngineOptions
    device: str
    drafter: Drafter | Placed | None

    def state(self, frames: int, longest: int, poison: bool = False) -> GpuState:
        """An arena and slots; ``longest``: tokens that may lie in it."""
        info = self.model.info
        return GpuState(
            self.layout,
            fields(self.model) + (self.drafter.fields() if self.drafter else ()),
            slot_fields(self.model),
            frames=frames,
            slots=self.options.max_running,
            longest=longest + SHARED_ENTRIES,
            hidden=info.hidden_size,
            hidden_dtype=info.dtype,
            device=self.device,
            poison=poison,
            rank=self.model.world.neighbours.rank,
        )

    def passes(self, state: GpuState, graphs: bool) -> Passes:
        return Passes(
            self.model,
            state,
            rows=self.options.token_budget,
            slots=self.options.max_running,
            graphs=graphs,
            drafts=self.drafter.depth if self.drafter else 0,
            taps=self.drafter.features if self.drafter else (),
        )

    def drafting(self, state: GpuState, passes: Passes) -> Drafter | OnDevice | None:
        """The drafter, with memory for its steps if it drafts on the device."""
        rest = self.model, state, passes, self.options.max_running
        if isinstance(self.drafter, GpuMtpDrafter):
            return GpuDrafting(self.drafter, *rest)
        if isinstance(self.drafter, GpuDFlashDrafter):
            return GpuDFlashDrafting(self.drafter, *rest)
        return self.drafter


def _frames(rank: _Rank) -> tuple[int, list[str]]:
    """Frames of the pool, as asked for or as measured, and lines for the log."""
    options, frame_bytes = rank.options, rank.layout.frame_bytes
    if options.frames is not None or options.memory is not None or rank.device == "cpu":
        memory = options.memory or CPU_MEMORY
        return options.frames or memory // frame_bytes, []
    with room(
        f"--token-budget {options.token_budget}, --max-running {options.max_running}: a step does"
        " not fit beside the weights"
    ):
        sizes = _measure(rank)
    frames = sizes.left // frame_bytes
    if frames < 2:
        raise ValueError(
            f"--device {rank.device}: nothing is left for the pool of {sizes.free / 2**30:.2f} GiB"
            f" free beside the weights: {sizes.words()}; lower --token-budget or --max-running"
        )
    return frames, [f"memory: {sizes.words()}, pool {sizes.left / 2**30:.2f} GiB"]


def _measure(rank: _Rank) -> _Sizes:
    """Run the largest steps on padding alone, with a pool of almost nothing."""
    torch.cuda.empty_cache()
    weights, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    free = torch.cuda.mem_get_info()[0]
    # Page tables as long as the whole memory would allow (of the rank with least: ranks exchange
    # the same messages here, too).
    group = next(group for group in rank.layout.groups if group.name == "full")
    most = rank.model.world.least(free // rank.layout.row_bytes["full"] * group.shard)
    longest, budget = min(rank.model.info.max_length, most), rank.options.token_budget
    probe = rank.state(1, longest)
    passes = rank.passes(probe, graphs=False)
    drafting = rank.drafting(probe, passes)
    slots = torch.cuda.memory_allocated() - weights
    steps: list[Passes | OnDevice] = [passes]
    count = passes.graph_count(budget, longest)
    if isinstance(drafting, OnDevice):
        steps.append(drafting)
        count += len(drafting.keys(longest))
    # What a pass leaves is still there when drafts are made.
    workspace = sum(step.measure(budget, longest) for step in steps)
    graphs = 0
    if rank.options.graphs:
        shared = sum(step.measure(min(MIXED[-1], budget), longest) for step in steps)
        graphs = int(GRAPH_SLACK * shared) + GRAPH_BYTES * count
    del passes, drafting, steps, probe
    torch.cuda.empty_cache()
    # Libraries take theirs when they are first used, and keep it: kernels, connections of ranks.
    grown = torch.cuda.memory_reserved() - reserved
    libraries = max(free - torch.cuda.mem_get_info()[0] - grown, 0)
    return _Sizes(free, weights, slots, workspace, graphs, libraries)
