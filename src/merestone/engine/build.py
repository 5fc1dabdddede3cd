"""Putting an engine together: model, layout, arena, cache, scheduler, loop.

Knows every room of the doing side by name. Must not know HTTP.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from merestone.core.cache import Cache, CacheSpec
from merestone.device.arena import Arena
from merestone.device.layout import Layout, plan_layout
from merestone.device.runner import Runner
from merestone.engine.api import EngineInfo
from merestone.engine.engine import LocalEngine
from merestone.models.interface import CHUNK, Model
from merestone.models.loader import LOAD_FORMATS, load_model
from merestone.sched.scheduler import Scheduler

log = logging.getLogger("merestone.engine")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SMALL_WEIGHTS = 256 << 20
RETENTIONS = ("auto", "boundaries", "none")


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What an engine is built with. ``memory`` in bytes; ``token_budget`` in rows a step.

    ``dtype`` None takes the checkpoint's. ``load_format``: "auto" reads the directory's weights,
    "random" makes weights in memory, the same ones every time, for measurements at true sizes
    (the directory then needs config.json and a tokenizer only). ``page`` None chooses the page
    size. ``frames`` overrides what ``memory`` would give.
    """

    dtype: str | None = None
    load_format: str = "auto"
    threads: int | None = None
    max_model_len: int | None = None
    max_running: int = 8
    memory: int = 512 << 20
    token_budget: int = 512
    retention: str = "auto"
    page: int | None = None
    frames: int | None = None
    poison: bool = False


def build_engine(directory: Path, options: EngineOptions, name: str | None = None) -> LocalEngine:
    """Load a model and put an engine around it. The engine is not started.

    Raises:
        ValueError: an option that cannot be honoured, by name; a model that cannot be loaded.
        OSError: files that cannot be read.
    """
    if options.retention not in RETENTIONS:
        raise ValueError(f"retention {options.retention!r} is not one of {', '.join(RETENTIONS)}")
    if options.dtype is not None and options.dtype not in DTYPES:
        raise ValueError(f"dtype {options.dtype!r} is not one of {', '.join(DTYPES)}")
    if options.load_format not in LOAD_FORMATS:
        known = ", ".join(LOAD_FORMATS)
        raise ValueError(f"load format {options.load_format!r} is not one of {known}")
    # Part of the configuration: bits may depend on it, so it never changes afterwards.
    torch.set_num_threads(options.threads or default_threads(directory, options.load_format))
    dtype = DTYPES[options.dtype] if options.dtype else None
    model = load_model(directory, dtype, options.max_model_len, options.load_format)
    return assemble(model, options, name or directory.name)


def default_threads(directory: Path, load_format: str = "auto") -> int:
    """One thread for small models, where waking a second one costs more than it computes.

    A model of random weights counts as large: true sizes are what it is for.
    """
    if load_format == "random":
        return torch.get_num_threads()
    weights = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    return 1 if weights < SMALL_WEIGHTS else torch.get_num_threads()


def assemble(model: Model, options: EngineOptions, name: str) -> LocalEngine:
    """An engine around a loaded model."""
    info = model.info
    hidden_bytes = info.hidden_size * info.dtype.itemsize
    layout = plan_layout(
        model.fields(),
        hidden_bytes=hidden_bytes,
        chunk=CHUNK,
        page_multiple=info.page_multiple,
        full_page=options.page,
    )
    frames = options.frames or options.memory // layout.frame_bytes
    spec = CacheSpec(
        frames=frames,
        frame_bytes=layout.frame_bytes,
        groups=layout.groups,
        chunk=CHUNK,
        anchor_frames=layout.anchor_frames,
        hidden_rows=layout.hidden_rows,
    )
    cache = Cache(spec)
    capacity = cache.capacity()
    if capacity < 2:
        raise ValueError(
            f"memory of {frames} frames of {layout.frame_bytes:,} B holds no request at all: "
            f"one token takes {cache.frames_needed(1)} frames; raise --memory"
        )
    limit = min(info.max_length, capacity)
    for line in [*layout.explain(), f"pool {frames} frames, at most {limit:,} tokens a request"]:
        log.info(line)
    arena = Arena(layout, model.fields(), frames, hidden_dtype=info.dtype, poison=options.poison)
    scheduler = Scheduler(cache, slots=options.max_running, token_budget=options.token_budget)
    return LocalEngine(
        _info(model, options, layout, limit, name), cache, scheduler, Runner(model, arena)
    )


def _info(
    model: Model, options: EngineOptions, layout: Layout, limit: int, name: str
) -> EngineInfo:
    info = model.info
    auto = options.retention == "auto"
    return EngineInfo(
        model=name,
        context_limit=limit,
        vocab_size=info.vocab_size,
        eos_ids=info.eos_ids,
        retention="boundaries" if auto else options.retention,
        retention_reason="boundaries are exact on one CPU rank" if auto else "as asked for",
        pages=tuple((group.name, group.page) for group in layout.groups),
        dtype=str(info.dtype).removeprefix("torch."),
        device="cpu",
    )
