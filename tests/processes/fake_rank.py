"""The process of a rank over the device double: starts in a fraction of a second, without torch.

Faults are ordered by files in the model directory, named ``RANK.FAULT``; the file is taken away
when it strikes.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parents[1]))
from fake_device import VOCAB, FakeDevice, small_spec
from merestone.engine.facts import Facts
from merestone.engine.ranks.loop import serve_rank
from merestone.engine.ranks.messages import RankConfig, Welcome
from merestone.sched.plan import StepPlan, StepResult

SPEC = small_spec(frames=128)


def facts(frames: int = SPEC.frames) -> Facts:
    return Facts(
        vocab_size=VOCAB,
        max_length=4096,
        eos_ids=(),
        dtype="none",
        device="double",
        frames=frames,
        frame_bytes=SPEC.frame_bytes,
        groups=SPEC.groups,
        anchor_frames=SPEC.anchor_frames,
        hidden_rows=SPEC.hidden_rows,
        notes=(),
    )


class FakeRank:
    def __init__(self, config: RankConfig) -> None:
        self.faults = Path(config.directory)
        self.rank = config.rank
        self.device = FakeDevice(SPEC)
        self.collectives = 0

    def struck(self, fault: str) -> bool:
        """Whether this fault was ordered, for this rank, and strikes now."""
        order = self.faults / f"{self.rank}.{fault}"
        if order.exists():
            order.unlink()
            return True
        return False

    def run(self, plan: StepPlan) -> StepResult:
        decoding = any(work.sample and work.start + 1 == work.end for work in plan.works)
        prefilling = any(work.start + 1 < work.end for work in plan.works)
        for name, here in (("prefill", prefilling), ("decode", decoding), ("step", True)):
            if here and self.struck(f"kill-in-{name}"):
                os.kill(os.getpid(), signal.SIGKILL)
        if self.struck("freeze-in-step"):
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.struck("hang-in-step"):
            time.sleep(3600)  # alive, and heard, but stuck
        if self.struck("fail-before-collective"):
            raise RuntimeError("injected, between two collectives")
        self.collectives += 1
        if self.struck("fail"):
            self.device.fail_next = True
        seals = bool(plan.saves or plan.after)
        if seals and self.struck("bad-seal"):
            self.device.bad_saves = True
        result = self.device.run(plan)
        if seals and self.struck("kill-in-seal"):
            os.kill(os.getpid(), signal.SIGKILL)
        if seals and self.struck("fail-in-seal"):
            raise RuntimeError("injected into a seal")
        if self.struck("other-token"):
            first, *rest = result.works
            first = msgspec.structs.replace(first, tokens=(*first.tokens, VOCAB - 1))
            result = msgspec.structs.replace(result, works=(first, *rest))
        return result


def runs_with(config: RankConfig) -> dict[str, str]:
    other = Path(config.directory) / f"{config.rank}.other-version"
    return {"merestone": "0.9" if other.exists() else "1.0"}


def build(config: RankConfig, welcome: Welcome) -> tuple[FakeRank, Facts]:
    rank = FakeRank(config)
    if rank.struck("refuse"):
        raise ValueError("--memory is too small")
    if rank.struck("crash-at-start"):
        os.kill(os.getpid(), signal.SIGKILL)
    if rank.struck("hang-at-start"):
        time.sleep(3600)
    frames = SPEC.frames - 1 if rank.struck("fewer-frames") else SPEC.frames
    return rank, facts(welcome.frames or frames)


if __name__ == "__main__":
    serve_rank(runs_with, build)
