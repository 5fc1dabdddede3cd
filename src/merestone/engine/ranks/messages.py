"""What crosses between the process that decides and the processes of the ranks.

Knows plans, results and plain values. Must not know sockets, processes or tensors.

        decides                                  rank r
           |  <------------ Hello ----------------  |   who am I, what do I run with
           |  ------- Welcome or Refused -------->  |   all agree, or end
           |  <--------- Ready or Failed ---------  |   the model is loaded
           |  ------------- Run(plan) ----------->  |
           |  <--------- Done or Failed ----------  |   one of them for every plan
           |  --------------- Stop -------------->  |
           |  <------------ Pulse --------------->  |   all the while, on a socket of its own
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from msgspec import Raw, Struct

from merestone.engine.facts import Facts
from merestone.sched.plan import StepPlan, StepResult

LONGEST_S = 86400.0
"""A day: what waits longer, waits for ever, and cannot be told to a clock."""


@dataclass(frozen=True, slots=True)
class RankOptions:
    """How an engine is spread over ranks, and how long it waits for one.

    ``tp`` ranks share every layer, ``dcp`` (a divisor of it) share the tokens of the attention
    cache. They run on ``nodes`` machines, this one being ``node``; ``master`` is the HOST:PORT at
    which the ranks of other machines find node 0. ``on_loss``: when a rank is lost, "exit", or
    "restart" all ranks with an empty cache. Times in seconds: a rank is lost when it was silent for
    ``silence_s``, or took ``step_s`` for one step, or ``start_s`` to start.
    """

    tp: int = 1
    dcp: int = 1
    nodes: int = 1
    node: int = 0
    master: str = ""
    on_loss: str = "exit"
    silence_s: float = 15.0
    step_s: float = 300.0
    start_s: float = 900.0

    def __post_init__(self) -> None:
        if self.tp < 1 or self.dcp < 1 or self.tp % self.dcp:
            raise ValueError(f"--dcp {self.dcp} does not divide --tp {self.tp}")
        if self.nodes < 1 or self.tp % self.nodes:
            raise ValueError(f"--nodes {self.nodes} does not divide --tp {self.tp}")
        if not 0 <= self.node < self.nodes:
            raise ValueError(f"--node-rank {self.node} is outside 0..{self.nodes - 1}")
        if (self.nodes > 1) != bool(self.master):
            raise ValueError("--master HOST:PORT belongs to --nodes above 1, and to nothing else")
        if self.on_loss not in ("exit", "restart"):
            raise ValueError(f"--on-rank-loss {self.on_loss!r} is not one of exit, restart")
        if not all(0 < s <= LONGEST_S for s in (self.silence_s, self.step_s, self.start_s)):
            raise ValueError(
                "--rank-timeout, --step-timeout and --start-timeout are seconds above 0, to "
                f"{LONGEST_S:,.0f}"
            )

    @property
    def local(self) -> range:
        """The ranks that run on this machine."""
        each = self.tp // self.nodes
        return range(self.node * each, (self.node + 1) * each)


class RankConfig(Struct, frozen=True):
    """What the process of a rank is started with: one line of JSON on its standard input.

    ``local`` numbers the ranks of one machine. ``options`` are the engine's, read by whoever builds
    the rank.
    """

    rank: int
    local: int
    ranks: RankOptions
    endpoint: str
    directory: str
    options: Raw
    log_level: str = "info"


class Hello(Struct, frozen=True, array_like=True, tag=True):
    """A rank reports. ``runs_with`` must be equal on all ranks, entry by entry."""

    rank: int
    process: int
    host: str
    runs_with: dict[str, str]


class Welcome(Struct, frozen=True, array_like=True, tag=True):
    """All ranks agree. ``rendezvous`` is where their collectives meet, ``pulse`` where each of them
    is to be heard; messages of another ``session`` are not for us. ``frames``: those of the pool
    that ranks which come back must have, whatever their options would lead to now."""

    session: str
    pulse: str
    rendezvous: str
    frames: int | None = None


class Refused(Struct, frozen=True, array_like=True, tag=True):
    """The ranks do not agree: end."""

    reason: str


class Ready(Struct, frozen=True, array_like=True, tag=True):
    """The rank is built."""

    rank: int
    facts: Facts


class Run(Struct, frozen=True, array_like=True, tag=True):
    """Obey a plan."""

    plan: StepPlan


class Done(Struct, frozen=True, array_like=True, tag=True):
    """A plan was obeyed. Rank 0 alone sends the ``works`` of its result; ``sums`` are check sums of
    them, one a work, from every rank. ``collectives``: how many the rank has run in its life."""

    rank: int
    result: StepResult
    sums: tuple[int, ...]
    collectives: int


class Failed(Struct, frozen=True, array_like=True, tag=True):
    """A plan, or with ``step`` None the start, failed on a rank, which lives on (or ends).

    ``refusal``: the fault is the user's, and ``error`` says it all.
    """

    rank: int
    step: int | None
    error: str
    collectives: int = 0
    refusal: bool = False


class Stop(Struct, frozen=True, array_like=True, tag=True):
    """End in order."""


class Pulse(Struct, frozen=True, array_like=True):
    """A sign of life, answered by one."""

    rank: int
    session: str


ToRank = Welcome | Refused | Run | Stop
FromRank = Hello | Ready | Done | Failed


def flat(value: Any, name: str = "") -> dict[str, str]:
    """The leaves of nested JSON by dotted path, as text: two ranks are compared by them."""
    if isinstance(value, dict):
        return {
            path: text
            for key, entry in value.items()
            for path, text in flat(entry, f"{name}.{key}" if name else str(key)).items()
        }
    return {name: str(value)}
