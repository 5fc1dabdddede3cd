"""Putting an engine together: model, layout, arena, cache, scheduler, loop.

Knows every room of the doing side by name. Must not know HTTP.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

import msgspec
import torch

from merestone.core.cache import Cache, CacheSpec
from merestone.core.gate import PROVEN_LAYOUTS, Setup, choose, table
from merestone.device.arena import Arena
from merestone.device.layout import plan_layout
from merestone.device.porter import Porter
from merestone.device.runner import Runner
from merestone.engine.api import EngineInfo
from merestone.engine.device import Device, LeadingDevice
from merestone.engine.engine import LocalEngine
from merestone.engine.facts import Facts
from merestone.engine.machine import default_threads, resolve_device, room
from merestone.engine.outside import (
    StoringDevice,
    declared,
    give_stores,
    identity_of,
    keep_outside,
    open_tiers,
)
from merestone.engine.ranks.device import Ranks
from merestone.engine.ranks.launch import WORKER
from merestone.engine.ranks.messages import RankOptions
from merestone.engine.ranks.node import keep_ranks
from merestone.models.fingerprint import fingerprint
from merestone.models.interface import CHUNK, Model
from merestone.models.loader import LOAD_FORMATS, load_model
from merestone.parallel.world import SINGLE, World
from merestone.sched.depth import Depth
from merestone.sched.scheduler import Scheduler
from merestone.spec.build import (
    Speculation,
    draft_directory,
    load_drafter,
    parse_speculation,
)
from merestone.spec.interface import Drafter
from merestone.store.desk import StoreSettings
from merestone.store.lane import Bell
from merestone.store.verify import StateVerifier

log = logging.getLogger("merestone.engine")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CPU_MEMORY = 512 << 20
"""Bytes of the pool on a CPU, if nothing is said."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What an engine is built with. ``token_budget`` in rows a step.

    ``device``: "cpu", "cuda" (or one of several, "cuda:1"), or "auto": a GPU if there is one.
    ``memory`` in bytes; None: what a GPU has left, measured, or ``CPU_MEMORY``. ``graphs``: on a
    GPU, replay steps as CUDA graphs. ``overlap``: where the device can, start the next step before
    the result of the last is there. ``dtype`` None takes the checkpoint's. ``load_format``:
    "auto" reads the directory's weights, "random" makes weights in memory, the same ones every
    time, for measurements at true sizes (the directory then needs config.json and a tokenizer
    only). ``page`` None chooses the page size. ``frames`` overrides what ``memory`` would give.
    ``retention``: see ``core/gate.py``. ``mark_share``: see ``CacheSpec``.
    ``verify``: sum every checkpoint's bytes when it is sealed and when it is restored.
    ``stores``: see ``store/options.py``; a request waits for them ``store_wait`` seconds at most.
    With ``ranks.tp`` above 1, ``memory`` and ``frames`` are those of one rank. ``speculate``,
    ``draft`` and ``accept``: see ``spec/build.py``.
    """

    device: str = "cpu"
    dtype: str | None = None
    load_format: str = "auto"
    threads: int | None = None
    max_model_len: int | None = None
    max_running: int = 8
    memory: int | None = None
    token_budget: int = 512
    retention: str = "auto"
    mark_share: float = 0.25
    verify: bool = False
    page: int | None = None
    frames: int | None = None
    poison: bool = False
    graphs: bool = True
    overlap: bool = True
    stores: tuple[str, ...] = ()
    store_wait: float = 2.0
    ranks: RankOptions = field(default_factory=RankOptions)
    speculate: str = "none"
    draft: str | None = None
    accept: str = "exact"


def build_engine(directory: Path, options: EngineOptions, name: str | None = None) -> LocalEngine:
    """Load a model and put an engine around it. The engine is not started.

    Raises:
        ValueError: an option that cannot be honoured, by name; a model that cannot be loaded.
        OSError: files that cannot be read.
        DeviceLost: a rank of several could not be started.
    """
    choose(gate_setup(options), CHUNK)
    if options.dtype is not None and options.dtype not in DTYPES:
        raise ValueError(f"--dtype {options.dtype!r} is not one of {', '.join(DTYPES)}")
    if options.load_format not in LOAD_FORMATS:
        known = ", ".join(LOAD_FORMATS)
        raise ValueError(f"--load-format {options.load_format!r} is not one of {known}")
    name = name or directory.name
    if options.ranks.tp > 1:
        return over_ranks(directory, options, name)
    set_threads(directory, options)
    weights = weights_of(directory, options) if options.stores else ""
    world = World(device=resolve_device(options.device))
    model = load(directory, options, world)
    drafter = load_draft(directory, options, model, world)
    return assemble(model, options, name, drafter, weights)


def weights_of(directory: Path, options: EngineOptions) -> str:
    """The fingerprint of all weights that ``options`` name."""
    weights = fingerprint(directory, options.load_format)
    if options.speculate == "dflash":
        weights += fingerprint(draft_directory(options.draft, directory))
    return weights


def set_threads(directory: Path, options: EngineOptions, share: int = 1) -> None:
    """Pin the number of threads; ``share`` processes share what the machine has.

    Part of the configuration: bits may depend on it, so it never changes afterwards.
    """
    threads = options.threads or default_threads(directory, options.load_format) // share
    torch.set_num_threads(max(1, threads))


def load(directory: Path, options: EngineOptions, world: World = SINGLE) -> Model:
    """The model that ``options`` name, or a rank's share of it. Raises what
    :func:`build_engine` does."""
    dtype = DTYPES[options.dtype] if options.dtype else None
    limit, load_format = options.max_model_len, options.load_format
    with room(f"--device {world.device}: the weights do not fit"):
        return load_model(directory, dtype, limit, load_format, world=world)


def load_draft(
    directory: Path, options: EngineOptions, model: Model, world: World = SINGLE
) -> Drafter | None:
    """The drafter that ``options`` name, or a rank's share of it.

    Raises:
        ValueError: it does not fit the model.
    """
    speculation, load_format = speculation_of(options), options.load_format
    with room(f"--device {world.device}: the draft's weights do not fit beside the model's"):
        return load_drafter(speculation, options.draft, directory, model, load_format, world)


def lend_ranks(directory: Path, options: EngineOptions) -> str | None:
    """Run this machine's ranks for the engine of node 0; returns when they have ended: why, or
    None if node 0 ended them in order."""
    return keep_ranks(options.ranks, directory, msgspec.json.encode(options))


def over_ranks(
    directory: Path, options: EngineOptions, name: str, command: Sequence[str] = WORKER
) -> LocalEngine:
    """An engine in this process over ranks in processes of their own, each started with
    ``command``. Raises what :func:`build_engine` does."""
    tiers = open_tiers(options.stores)
    ranks = Ranks(options.ranks, directory, msgspec.json.encode(options), command=command)
    try:
        facts = ranks.start()
        engine = engine_over(ranks, facts, options, name)
        if tiers:
            identity = identity_of(weights_of(directory, options), facts, options.ranks.tp)
            settings = StoreSettings(wait_s=options.store_wait)
            stores = keep_outside(engine, options.stores, tiers, identity, settings, Bell())
            stores.closing += [tier.close for tier in tiers]
    except BaseException:
        ranks.close()
        for tier in tiers:
            tier.close()
        raise
    engine.attendant = ranks
    ranks.listen(engine.device_lost, engine.device_back)
    return engine


def speculation_of(options: EngineOptions) -> Speculation:
    """What ``options`` say of speculation."""
    return parse_speculation(options.speculate, options.accept)


def gate_setup(options: EngineOptions) -> Setup:
    """What the retention gate must know of these options."""
    layout = (options.ranks.tp, options.ranks.dcp)
    return Setup(
        asked=options.retention,
        speculation=speculation_of(options).gate,
        tp=options.ranks.tp,
        dcp=options.ranks.dcp,
        store=declared(options.stores),
        proven=layout in PROVEN_LAYOUTS,
    )


def retention_of(options: EngineOptions) -> tuple[str, str, list[tuple[str, str, str, bool]]]:
    """What would be kept with these options, why, and the gate's table.

    Raises:
        ValueError: what was asked for does not exist or cannot be kept.
    """
    setup = gate_setup(options)
    retention, reason = choose(setup, CHUNK)
    return str(retention), reason, table(setup)


def assemble(
    model: Model,
    options: EngineOptions,
    name: str,
    drafter: Drafter | None = None,
    weights: str = "unnamed",
    world: World = SINGLE,
) -> LocalEngine:
    """An engine around a loaded model, in this process. Stores know the model as ``weights``."""
    runner, facts = build_on(resolve_device(options.device), model, options, drafter, world)
    engine = engine_over(runner, facts, options, name)
    if options.stores:
        settings = StoreSettings(wait_s=options.store_wait)
        give_stores(runner, engine, options.stores, identity_of(weights, facts, 1), settings)
    return engine


def build_on(
    device: str, model: Model, options: EngineOptions, drafter: Drafter | None, world: World
) -> tuple[StoringDevice, Facts]:
    """The doing side of one rank, wherever it runs.

    Raises:
        ValueError: what cannot run there, or does not fit.
    """
    runner: StoringDevice
    if device == "cpu":
        runner, facts = build_rank(model, options, drafter, world)
    else:
        runner, facts = build_gpu_rank(model, options, device, drafter)
    if options.verify:
        runner.porter = Porter(runner.arena, (), world.rank, lambda: None)
    return runner, facts


def build_gpu_rank(
    model: Model, options: EngineOptions, device: str, drafter: Drafter | None = None
) -> tuple[StoringDevice, Facts]:
    """The doing side of one rank on a GPU. Needs Triton, which an installation for the CPU does not
    have, hence the late import.

    Raises:
        ValueError: Triton is not there; else as `merestone.engine.gpu` says.
    """
    try:
        gpu = import_module("merestone.engine.gpu")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "triton":
            raise
        raise ValueError(f"--device {device} needs Triton: install merestone[gpu]") from error
    built: tuple[StoringDevice, Facts] = gpu.build_gpu_rank(model, options, device, drafter)
    return built


def build_rank(
    model: Model,
    options: EngineOptions,
    drafter: Drafter | None = None,
    world: World = SINGLE,
) -> tuple[Runner, Facts]:
    """The doing side of one rank: layout, arena and runner around a loaded model."""
    info = model.info
    fields = model.fields() + (drafter.fields() if drafter else ())
    layout = plan_layout(
        fields,
        hidden_bytes=info.hidden_size * info.dtype.itemsize,
        chunk=CHUNK,
        page_multiple=info.page_multiple,
        full_page=options.page,
        draft_groups=drafter.groups if drafter else (),
        lag=drafter.lag if drafter else 0,
        dcp=world.dcp,
    )
    frames = options.frames or (options.memory or CPU_MEMORY) // layout.frame_bytes
    size = frames * layout.frame_bytes
    with room(f"--memory, --frames: a pool of {size / 2**30:.2f} GiB does not fit"):
        arena = Arena(
            layout,
            fields,
            frames,
            hidden_dtype=info.dtype,
            poison=options.poison,
            rank=world.neighbours.rank,
        )
    facts = Facts(
        vocab_size=info.vocab_size,
        max_length=info.max_length,
        eos_ids=info.eos_ids,
        dtype=str(info.dtype).removeprefix("torch."),
        device="cpu",
        frames=frames,
        frame_bytes=layout.frame_bytes,
        groups=layout.groups,
        anchor_frames=layout.anchor_frames,
        hidden_rows=layout.hidden_rows,
        notes=tuple(layout.explain()),
        drafts=drafter.depth if drafter else 0,
        layout=f"{torch.get_num_threads()} threads, {fields!r}",
    )
    rejecting = speculation_of(options).rejecting
    return Runner(model, arena, drafter, rejecting=rejecting), facts


def engine_over(device: Device, facts: Facts, options: EngineOptions, name: str) -> LocalEngine:
    """The deciding side: cache, scheduler and loop over whatever runs the plans.

    Raises:
        ValueError: the device's memory holds no request.
    """
    spec = CacheSpec(
        frames=max(facts.frames, 1),  # less than one is too little, too: said below
        frame_bytes=facts.frame_bytes,
        groups=facts.groups,
        chunk=CHUNK,
        anchor_frames=facts.anchor_frames,
        hidden_rows=facts.hidden_rows,
        drafts=facts.drafts,
        mark_share=options.mark_share,
    )
    cache = Cache(spec)
    capacity = cache.capacity()
    if capacity < 2:
        raise ValueError(
            f"memory of {facts.frames} frames of {facts.frame_bytes:,} B holds no request at all: "
            f"one token takes {cache.frames_needed(1)} frames; raise --memory"
        )
    limit = min(facts.max_length, capacity)
    for line in [*facts.notes, f"pool {facts.frames} frames, at most {limit:,} tokens a request"]:
        log.info(line)
    if speculation_of(options).rejecting:
        log.info("--accept rejection: at a temperature above 0, tokens depend on what was drafted")
    scheduler = Scheduler(
        cache,
        slots=options.max_running,
        token_budget=options.token_budget,
        depth=Depth(facts.drafts, adaptive=speculation_of(options).adaptive),
    )
    if options.verify:
        scheduler.verifier = StateVerifier(spec)
    retention, reason = choose(gate_setup(options), CHUNK)
    info = EngineInfo(
        model=name,
        context_limit=limit,
        vocab_size=facts.vocab_size,
        eos_ids=facts.eos_ids,
        retention=str(retention),
        retention_reason=reason,
        smallest_reusable=retention.grid or 1,
        speculation=options.speculate + ", rejection" * speculation_of(options).rejecting,
        pages=tuple((group.name, group.span) for group in facts.groups),
        dtype=facts.dtype,
        device=facts.device,
    )
    overlap = options.overlap and isinstance(device, LeadingDevice)
    return LocalEngine(info, cache, scheduler, device, overlap=overlap)
