"""Agents over one cache: how much of their prompts each retention restores, budget by budget.

No model runs. The core, the scheduler and the engine's loop are the real ones; the device double
knows token counts alone, so that hours of traffic take seconds. The state's sizes are those of
GLM-5.3-Flash in bf16 on one rank: a token's attention rows take 11.6 KB, an anchor 147.6 MB, an
open row 1.9 MB.

    python -m bench.agents --plot agents.svg
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random

import numpy as np

from bench.chart import chart
from merestone.core.cache import Cache, CacheSpec
from merestone.core.geometry import GroupSpec
from merestone.engine.api import EngineInfo, Event, Finished, GenerateRequest, TokenEvent
from merestone.engine.engine import LocalEngine
from merestone.sched.plan import SamplingParams, StepPlan, StepResult, WorkResult
from merestone.sched.scheduler import Scheduler
from merestone.serve.boundaries import earlier_ends

GIB = 2**30
FRAME = 1_900_000
RETENTIONS = ("boundaries", "aligned:256", "aligned:2048")
UNLIMITED = "unlimited"
BUDGETS = (6, 8, 12, 16, 24, 48)
VOCAB = 2**17
ROLES = ("system", "user", "assistant", "tool")
STEP_S, ROW_S = 0.02, 1e-4
"""Simulated seconds of a step, and of each row in it."""


@dataclass(frozen=True, slots=True)
class Trace:
    """What the agents do. Lengths in tokens, shares of turns in [0, 1]."""

    agents: int = 20
    turns: int = 30
    head: int = 6000
    task: int = 400
    thought: int = 90
    call: int = 40
    result: tuple[int, int] = (80, 900)
    turns_a_task: int = 8
    branches: float = 0.08
    retries: float = 0.05
    pause_s: tuple[float, float] = (0.5, 8.0)
    seed: int = 0


class CountingDevice:
    """Answers plans with tokens that depend on the prompt and the position alone."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.rows = 0
        self._seeds: dict[int, int] = {}

    def run(self, plan: StepPlan) -> StepResult:
        for admit in plan.admits:
            ids = np.frombuffer(admit.tokens, np.int32)
            self._seeds[admit.slot] = hash(tuple(ids[: admit.prompt].tolist()))
        rows = sum(work.end - work.start for work in plan.works)
        self.rows += rows
        self.seconds += STEP_S + ROW_S * rows
        results = []
        for work in plan.works:
            drawn = (hash((self._seeds[work.slot], work.end)) % VOCAB,) if work.sample else ()
            results.append(WorkResult(work.slot, drawn))
        return StepResult(plan.step, tuple(results))


@dataclass(slots=True)
class Ask:
    """One request: a prompt, where it may be resumed, and after how many steps to give up."""

    tokens: tuple[int, ...]
    boundaries: tuple[tuple[int, str], ...]
    outputs: int
    patience: int | None
    pause_s: float


class Agent:
    """A conversation that grows: a task, then calls of tools and their results, then another task.

    The thought of a reply is left out of later prompts. Sometimes the agent goes back a few turns
    and tries something else, and sometimes its client gives up and asks again.
    """

    def __init__(self, trace: Trace, number: int, head: list[int]) -> None:
        self._trace = trace
        self._draw = Random(f"{trace.seed}/{number}")
        self._messages: list[tuple[str, list[int]]] = [("system", head)]
        self.reply: list[int] = []

    def asks(self) -> Iterator[Ask]:
        """Requests, each after ``reply`` has been set to the answer of the one before."""
        trace, draw = self._trace, self._draw
        for turn in range(trace.turns):
            if turn % trace.turns_a_task == 0:
                self._messages.append(("user", self._text(trace.task)))
            elif len(self._messages) > 12 and draw.random() < trace.branches:
                del self._messages[-2 * draw.choice((1, 2, 5)) :]
                self._messages.append(("tool", self._text(draw.randint(*trace.result))))
            else:
                self._messages.append(("tool", self._text(draw.randint(*trace.result))))
            if draw.random() < trace.retries:
                yield self._ask(draw.randint(2, 40))
            yield self._ask(None)
            self._messages.append(("assistant", self.reply[trace.thought :]))

    def _text(self, length: int) -> list[int]:
        return [self._draw.randrange(VOCAB) for _ in range(length)]

    def _ask(self, patience: int | None) -> Ask:
        tokens: list[int] = []
        ends = [0]
        for role, text in self._messages:
            tokens += [ROLES.index(role), *text]
            ends.append(len(tokens))
        roles = [role for role, _ in self._messages]
        found = {ends[1]: "instruction", len(tokens): "turn"}
        for count in earlier_ends(roles):
            found.setdefault(ends[count], "tool" if roles[count - 1] == "tool" else "message")
        pause = self._draw.uniform(*self._trace.pause_s)
        outputs = self._trace.thought + self._trace.call
        return Ask(
            (*tokens, ROLES.index("assistant")),
            tuple(sorted(found.items())),
            outputs,
            patience,
            pause,
        )


@dataclass(slots=True)
class Result:
    """What one retention did within one budget. Tokens; ``hit`` = restored / prompt."""

    retention: str
    gib: float
    prompt: int = 0
    restored: int = 0
    computed: int = 0
    recomputed: int = 0
    hit: float = 0.0
    evicted: int = 0
    sealed: int = 0
    preemptions: int = 0
    simulated_s: float = 0.0
    lost: dict[str, int] = field(default_factory=dict)


class Simulation:
    """All agents against one engine, in simulated time."""

    def __init__(self, trace: Trace, retention: str, frames: int) -> None:
        # 128 tokens of attention rows fill a frame, as one open row or 1/78 of an anchor does.
        groups = (GroupSpec("full", 128), GroupSpec("open", 1, open=True))
        self.cache = Cache(CacheSpec(frames, FRAME, groups, 64, 78, 200))
        self.device = CountingDevice()
        self.scheduler = Scheduler(self.cache, slots=trace.agents, token_budget=4096)
        info = EngineInfo("simulated", self.cache.capacity(), VOCAB, (), retention)
        clock = lambda: self.device.seconds  # noqa: E731
        self.engine = LocalEngine(info, self.cache, self.scheduler, self.device, clock=clock)
        draw = Random(f"{trace.seed}/head")
        head = [draw.randrange(VOCAB) for _ in range(trace.head)]
        self.agents = [Agent(trace, number, head) for number in range(trace.agents)]
        self.result = Result(retention, frames * FRAME / GIB)
        self._pauses: dict[int, float] = {}
        self._count = 0

    def run(self) -> Result:
        """Until every agent has done its turns."""
        talks = {number: agent.asks() for number, agent in enumerate(self.agents)}
        due = {number: 0.2 * number for number in talks}
        waiting: dict[int, tuple[str, int]] = {}  # who gives up when, by agent
        finished: dict[int, Finished] = {}
        while talks:
            for number in [n for n, at in due.items() if at <= self.device.seconds]:
                del due[number]
                ask = next(talks[number], None)
                if ask is None:
                    del talks[number]
                    continue
                name = self._submit(number, ask, finished)
                if ask.patience is not None:
                    waiting[number] = name, self.scheduler.step + ask.patience
            self.engine.take()
            if self.scheduler.busy:
                self.engine.step()
            elif due:
                self.device.seconds = max(self.device.seconds, min(due.values()))
            for number, (name, limit) in list(waiting.items()):
                if self.scheduler.step >= limit and number not in finished:
                    self.engine.abort(name)
                    self.engine.take()
                if number in finished:
                    del waiting[number]
            for number in list(finished):
                self._account(finished.pop(number))
                due[number] = self.device.seconds + self._pauses[number]
        return self._summary()

    def _submit(self, number: int, ask: Ask, finished: dict[int, Finished]) -> str:
        self._count += 1
        name, agent = f"{number}/{self._count}", self.agents[number]
        agent.reply = []

        def sink(events: list[Event]) -> None:
            for event in events:
                if isinstance(event, Finished):
                    finished[number] = event
                elif isinstance(event, TokenEvent):
                    agent.reply.append(event.token)

        self._pauses[number] = ask.pause_s
        request = GenerateRequest(
            name, ask.tokens, SamplingParams(), ask.outputs, boundaries=ask.boundaries
        )
        self.engine.submit(request, sink)
        return name

    def _account(self, end: Finished) -> None:
        result, report = self.result, end.cache
        assert end.reason in ("length", "abort"), end
        result.prompt += end.prompt_tokens
        result.restored += report.restored
        if report.lost:
            lost = report.matched - report.restored
            result.lost[report.lost] = result.lost.get(report.lost, 0) + lost

    def _summary(self) -> Result:
        result, counters = self.result, self.cache.counters
        result.hit = round(result.restored / result.prompt, 4)
        result.computed = self.device.rows
        result.evicted = sum(counters.evicted.values())
        result.sealed = sum(counters.sealed.values())
        result.preemptions = self.scheduler.counters["preemptions"]
        result.simulated_s = round(self.device.seconds, 1)
        return result


def sweep(trace: Trace, budgets: Sequence[float]) -> list[Result]:
    """Every retention within every budget (GiB), the unlimited cache first."""
    most = Simulation(trace, "boundaries", 2_000_000).run()
    most.retention, most.gib = UNLIMITED, 0.0
    found = [most]
    for retention in RETENTIONS:
        for gib in budgets:
            found.append(Simulation(trace, retention, int(gib * GIB) // FRAME).run())
    for result in found:
        result.recomputed = result.computed - most.computed
    return found


def verdict(results: Sequence[Result]) -> dict[str, object]:
    """The target: where aligned:256 has lost half of what an unlimited cache restores, boundaries
    lose at most 3 %."""
    most = next(r.hit for r in results if r.retention == UNLIMITED)
    halved = [r.gib for r in results if r.retention == "aligned:256" and r.hit <= most / 2]
    if not halved:
        return {"halved_gib": None, "met": False}
    budget = max(halved)
    ours = next(r.hit for r in results if r.retention == "boundaries" and r.gib == budget)
    loss = round(1 - ours / most, 4)
    return {"halved_gib": round(budget, 1), "boundaries_lose": loss, "met": loss <= 0.03}


def table(results: Sequence[Result]) -> str:
    """One line a result, in Markdown."""
    lines = [
        "| retention | GiB | hit rate | recomputed tokens | evicted | preempted |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for r in results:
        size = f"{r.gib:.0f}" if r.gib else "-"
        lines.append(
            f"| {r.retention} | {size} | {r.hit:.1%} | {r.recomputed:,} | {r.evicted:,}"
            f" | {r.preemptions:,} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Sweep, print the table, and one line of JSON at the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", type=int, default=20)
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budgets", type=float, nargs="+", default=list(BUDGETS), help="GiB")
    parser.add_argument("--plot", type=Path, help="write an SVG there")
    options = parser.parse_args()
    trace = Trace(agents=options.agents, turns=options.turns, seed=options.seed)
    began = time.perf_counter()
    results = sweep(trace, options.budgets)
    took = time.perf_counter() - began
    print(table(results))
    if options.plot is not None:
        lines = {
            name: [(r.gib, r.hit) for r in results if r.retention == name] for name in RETENTIONS
        }
        options.plot.write_text(chart(lines, level=(UNLIMITED, results[0].hit)))
    about = {"bench": "agents", "trace": asdict(trace), "seconds": round(took, 1)}
    print(json.dumps({**about, **verdict(results), "results": [asdict(r) for r in results]}))


if __name__ == "__main__":
    main()
