"""The process of a real rank that writes down how long its seals and restores take.

``python -m bench.timed_rank DIRECTORY``: a line of JSON for each step that does nothing else, in a
file of the rank's own. A step is over when its result is there, so a GPU's copies are, too.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from merestone.engine.facts import Facts
from merestone.engine.ranks.loop import serve_rank
from merestone.engine.ranks.messages import RankConfig, Welcome
from merestone.engine.ranks.worker import WorkerRank, build, runs_with
from merestone.sched.plan import StepPlan, StepResult


def kind(plan: StepPlan) -> str:
    """What a step does, if it is one thing: "seal" saves a boundary of a sequence that has ended,
    "restore" resumes one from a checkpoint of all its tokens and draws the next."""
    if plan.saves and not (plan.works or plan.admits):
        return "seal"
    computes = any(work.start < work.end for work in plan.works)
    return "restore" if plan.before and plan.works and not computes else ""


class TimedRank:
    """A rank that obeys every plan."""

    def __init__(self, rank: WorkerRank, file: Path) -> None:
        self.rank = rank
        self.file = file.open("a", buffering=1)

    @property
    def collectives(self) -> int:
        return self.rank.collectives

    def run(self, plan: StepPlan) -> StepResult:
        began = time.perf_counter()
        result = self.rank.run(plan)
        if found := kind(plan):
            spent = 1e6 * (time.perf_counter() - began)
            self.file.write(json.dumps([found, round(spent, 1)]) + "\n")
        return result


def build_timed(config: RankConfig, welcome: Welcome) -> tuple[TimedRank, Facts]:
    rank, facts = build(config, welcome)
    return TimedRank(rank, Path(sys.argv[1]) / f"{config.rank}.jsonl"), facts


def medians(directory: Path, ranks: int) -> dict[str, list[dict[str, Any]]]:
    """For each kind of step, and each rank in order: how many there were, and their median."""
    found: dict[str, list[dict[str, Any]]] = {"seal": [], "restore": []}
    for rank in range(ranks):
        lines = map(json.loads, (directory / f"{rank}.jsonl").read_text().splitlines())
        steps = list(lines)
        for what, entries in found.items():
            times = [spent for name, spent in steps if name == what]
            entry = {"steps": len(times), "median_us": median(times) if times else None}
            entries.append(entry)
    return found


if __name__ == "__main__":
    serve_rank(runs_with, build_timed)
