"""Where a decoding step's time goes on the device, kernel by kernel."""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from bench.inprocess import InProcess
from merestone.probe.streams import stream

STEPS = 32
MOST = 40


def kernels(asked: InProcess, streams: int, prompt: int) -> dict[str, Any]:
    """Of a step in which ``streams`` streams decode behind ``prompt`` tokens: device time in all,
    and launches and microseconds of each kernel and grid, the slowest first. Prompts are cached
    beforehand; restoring them is counted with the steps."""
    prompts = [stream(prompt, 400 + n, vocab=asked.vocab) for n in range(streams)]
    salt = f"profile-{streams}"
    for count in (1, STEPS + 1):
        asked.generate(prompts, count, salt)
    with profile(activities=[ProfilerActivity.CUDA]) as taken:
        # The first token is a restored boundary's: no step computes it.
        asked.generate(prompts, STEPS + 1, salt)
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "trace.json"
        taken.export_chrome_trace(str(path))
        return _by_kernel(json.loads(path.read_text())["traceEvents"])


def _by_kernel(events: list[dict[str, Any]]) -> dict[str, Any]:
    spent: dict[tuple[str, str], list[float]] = defaultdict(list)
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            grid = "x".join(map(str, event["args"].get("grid", ())))
            spent[event["name"], grid].append(event["dur"])
    rows = [
        {"kernel": name, "grid": grid, "launches": len(each) / STEPS, "us": sum(each) / STEPS}
        for (name, grid), each in spent.items()
    ]
    rows.sort(key=lambda row: -row["us"])
    return {
        "device_us": sum(row["us"] for row in rows),
        "launches": sum(row["launches"] for row in rows),
        "kernels": rows[:MOST],
    }
