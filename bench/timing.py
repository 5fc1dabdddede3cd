"""Times on a CUDA device: graphs of many calls over rotating inputs, so that no launch gap and no
warm cache is measured."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from statistics import median
from typing import Any

import torch
import triton

from merestone import __version__

COLD_BYTES = 256 << 20
"""Inputs rotate through at least this much memory: several times the L2 cache of a Hopper chip."""
_LEAST_CALLS = 16
_REPEATS = 9

Call = Callable[[], object]


def copies(size: int) -> int:
    """How many sets of inputs of ``size`` bytes make every call find the cache cold."""
    return max(1, min(64, -(-COLD_BYTES // max(size, 1))))


def microseconds(calls: Sequence[Call], *, graph: bool = True) -> float:
    """The median time of one call, the calls taken in turn. ``graph``: replayed from a CUDA graph
    (a call may then not wait for the device)."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    rounds = max(1, _LEAST_CALLS // len(calls)) if graph else 1

    def every() -> None:
        for _ in range(rounds):
            for call in calls:
                call()

    run: Callable[[], object] = every
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            every()
        run = captured.replay
    run()
    times = []
    for _ in range(_REPEATS):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        run()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended))
        if sum(times) > 400 and len(times) >= 3:
            break
    return median(times) * 1000 / (rounds * len(calls))


def about_device() -> dict[str, Any]:
    """What the figures belong to."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    return {
        "device": name,
        "began": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {
            "merestone": __version__,
            "torch": torch.__version__,
            "triton": triton.__version__,
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
        },
    }
