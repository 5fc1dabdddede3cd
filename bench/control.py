"""What a step over several ranks costs before anything is computed: plans out, results back.

The ranks are processes that answer at once. The last line of the output is one JSON object.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import msgspec
import numpy as np

from merestone.core.geometry import GroupSpec
from merestone.engine.facts import Facts
from merestone.engine.ranks.device import Ranks
from merestone.engine.ranks.loop import serve_rank
from merestone.engine.ranks.messages import RankConfig, RankOptions, Run, Welcome
from merestone.sched.plan import Admit, SamplingParams, StepPlan, StepResult, Work, WorkResult

STEPS = 2000
COMMAND = (sys.executable, "-m", "bench.control", "rank")


class Idle:
    """A rank that computes nothing."""

    collectives = 0

    def run(self, plan: StepPlan) -> StepResult:
        return StepResult(plan.step, tuple(WorkResult(work.slot, (7,)) for work in plan.works))


def build(config: RankConfig, welcome: Welcome) -> tuple[Idle, Facts]:
    groups = (GroupSpec("full", 16),)
    return Idle(), Facts(10, 10, (), "none", "none", 10, 10, groups, 1, 1, ())


def decode(step: int, sequences: int) -> StepPlan:
    """A step in which each sequence has one row, at 1,000 tokens of context."""
    works = tuple(
        Work(slot, 1000, 1001, (17,), (), 960, tuple(range(16)), 960, (), True)
        for slot in range(sequences)
    )
    return StepPlan(step, works=works)


def prompt(step: int, tokens: int) -> StepPlan:
    """A step that admits a long prompt and computes its first 4,096 rows."""
    ids = tuple(range(tokens))
    known = np.arange(tokens, dtype=np.int32).tobytes()
    works = (Work(0, 0, 4096, ids[:4096], (), 0, (), 4096, tuple(range(16)), False),)
    return StepPlan(step, admits=(Admit(0, known, tokens, 0, SamplingParams()),), works=works)


def measure(ranks: int) -> dict[str, object]:
    """Microseconds of a round, by the plan."""
    device = Ranks(RankOptions(tp=ranks), Path(tempfile.mkdtemp()), b"{}", command=COMMAND)
    found: dict[str, object] = {"ranks": ranks}
    try:
        device.start()
        step = 0
        for name, steps, make in (
            ("decode 1", STEPS, lambda n: decode(n, 1)),
            ("decode 64", STEPS, lambda n: decode(n, 64)),
            ("prompt 131072", 50, lambda n: prompt(n, 131072)),
        ):
            times = []
            for _ in range(steps):
                step += 1
                plan = make(step)
                began = time.perf_counter()
                device.run(plan)
                times.append(time.perf_counter() - began)
            times.sort()
            found[name] = {
                "bytes": len(msgspec.msgpack.encode(Run(plan))),
                "median_us": round(1e6 * median(times), 1),
                "p99_us": round(1e6 * times[len(times) * 99 // 100], 1),
            }
    finally:
        device.close()
    return found


def main() -> None:
    results = [measure(ranks) for ranks in (1, 2, 4, 8)]
    for row in results:
        print(row)
    print(json.dumps({"bench": "control", "cores": os.cpu_count(), "rows": results}))


if __name__ == "__main__":
    if sys.argv[1:] == ["rank"]:
        serve_rank(lambda config: {}, build)
    main()
