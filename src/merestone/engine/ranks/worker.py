"""``python -m merestone.engine.ranks.worker``: the process of one rank.

Knows how a rank is built from options. Must not know plans or sockets.
"""

from __future__ import annotations

import platform
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import msgspec
import torch

from merestone import __version__
from merestone.device.porter import Porter
from merestone.engine.build import (
    EngineOptions,
    build_on,
    load,
    load_draft,
    set_threads,
    weights_of,
)
from merestone.engine.facts import Facts
from merestone.engine.machine import resolve_device
from merestone.engine.outside import StoringDevice, open_tiers
from merestone.engine.ranks.loop import serve_rank
from merestone.engine.ranks.messages import RankConfig, Welcome, flat
from merestone.parallel.world import World, connect
from merestone.sched.plan import StepPlan, StepResult

LIBRARIES = ("torch", "triton", "numpy", "safetensors", "msgspec", "fla-core")
OWN = ("ranks.node",)
"""Options in which ranks may differ."""


class WorkerRank:
    """A runner, and the world whose collectives it runs."""

    def __init__(self, runner: StoringDevice, world: World) -> None:
        self.runner = runner
        self.world = world

    def run(self, plan: StepPlan) -> StepResult:
        return self.runner.run(plan)

    @property
    def collectives(self) -> int:
        return self.world.collectives


def runs_with(config: RankConfig) -> dict[str, str]:
    """Everything that the bits of a result depend on, as far as it can be seen from outside.

    Raises:
        ValueError, OSError: the model's files cannot be read.
    """
    options, directory = _options(config), Path(config.directory)
    found = {"merestone": __version__, "python": platform.python_version()}
    for library in LIBRARIES:
        try:
            found[library] = metadata.version(library)
        except metadata.PackageNotFoundError:
            found[library] = "absent"
    found["processor"] = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    if resolve_device(options.device) != "cpu":
        found["GPU"] = torch.cuda.get_device_name()
        found["CUDA"] = str(torch.version.cuda)
    for name, value in flat(msgspec.to_builtins(options)).items():
        if name not in OWN:
            found[f"option {name}"] = value
    found["the model's files"] = weights_of(directory, options)
    return found


def build(config: RankConfig, welcome: Welcome) -> tuple[WorkerRank, Facts]:
    """Load this rank's share of the model, and put a runner around it."""
    options, ranks, directory = _options(config), config.ranks, Path(config.directory)
    if welcome.frames is not None:
        options = replace(options, frames=welcome.frames)
    set_threads(directory, options, share=len(ranks.local))
    device, backend = _place(options, config)
    world = connect(
        config.rank,
        ranks.tp,
        ranks.dcp,
        rendezvous=welcome.rendezvous,
        device=device,
        backend=backend,
        timeout_s=ranks.step_s,
    )
    model = load(directory, options, world)
    drafter = load_draft(directory, options, model, world)
    runner, facts = build_on(device, model, options, drafter, world)
    if options.stores:
        tiers = open_tiers(options.stores, owner=False, arena=runner.arena, ranks=ranks.tp)
        # What it has to report it says with the next plan, and is asked before long.
        runner.porter = Porter(runner.arena, tiers, config.rank, lambda: None)
    return WorkerRank(runner, world), facts


def _place(options: EngineOptions, config: RankConfig) -> tuple[str, str | None]:
    """This rank's device, and what carries its messages (None: what suits the device).

    The ranks of a machine are dealt over its GPUs; NCCL does not let two share one, so gloo then
    carries their messages through host memory.

    Raises:
        ValueError: ranks share a GPU, and nobody said how much of it each may have.
    """
    device = resolve_device(options.device)
    if device == "cpu":
        return device, None
    count = torch.cuda.device_count()
    shared = len(config.ranks.local) > count
    if shared and options.memory is None and options.frames is None:
        raise ValueError(
            f"--tp {config.ranks.tp}: {len(config.ranks.local)} ranks share {count} GPU(s), and"
            " none can measure what the others leave; give --memory, the pool of one rank"
        )
    return f"cuda:{config.local % count}", "gloo" if shared else None


def _options(config: RankConfig) -> EngineOptions:
    return msgspec.json.decode(config.options, type=EngineOptions)


if __name__ == "__main__":
    serve_rank(runs_with, build)
