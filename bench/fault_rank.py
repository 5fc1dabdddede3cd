"""The process of a real rank that ends by SIGKILL in a seal, when it is told to.

``python -m bench.fault_rank RANK FILE``: the rank RANK dies right after the copies of a step that
seals, once FILE exists.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from merestone.engine.facts import Facts
from merestone.engine.ranks.loop import serve_rank
from merestone.engine.ranks.messages import RankConfig, Welcome
from merestone.engine.ranks.worker import WorkerRank, build, runs_with
from merestone.sched.plan import StepPlan, StepResult


class DyingRank:
    """A rank that obeys every plan, and does not live to report one that seals."""

    def __init__(self, rank: WorkerRank, order: Path) -> None:
        self.rank = rank
        self.order = order

    @property
    def collectives(self) -> int:
        return self.rank.collectives

    def run(self, plan: StepPlan) -> StepResult:
        result = self.rank.run(plan)
        if (plan.saves or plan.after) and self.order.exists():
            self.order.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return result


def build_dying(config: RankConfig, welcome: Welcome) -> tuple[WorkerRank | DyingRank, Facts]:
    rank, facts = build(config, welcome)
    if config.rank == int(sys.argv[1]):
        return DyingRank(rank, Path(sys.argv[2])), facts
    return rank, facts


if __name__ == "__main__":
    serve_rank(runs_with, build_dying)
