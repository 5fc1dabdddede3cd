"""The life of a rank's process: report, build, obey plans, end when the deciding process does.

Knows messages and sockets. Must not know tensors: what is built is handed in.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import NoReturn, Protocol

import msgspec
import zmq

from merestone.engine.facts import Facts
from merestone.engine.ranks.attention import PULSES, Attention
from merestone.engine.ranks.merge import check_sums
from merestone.engine.ranks.messages import (
    Done,
    Failed,
    FromRank,
    Hello,
    Pulse,
    RankConfig,
    Ready,
    Refused,
    Run,
    Stop,
    ToRank,
    Welcome,
)
from merestone.sched.plan import StepPlan, StepResult

log = logging.getLogger("merestone.ranks")
AGAIN_S = 2.0
"""How often a rank reports that nobody answers."""
UNWANTED = 5
"""Exit status of a rank that node 0 refused, or that found no node 0 in time."""


class Rank(Protocol):
    """What the process of a rank is there for."""

    def run(self, plan: StepPlan) -> StepResult: ...

    @property
    def collectives(self) -> int:
        """How many collectives were run since the start. Equal on all ranks between two plans."""
        ...


Build = Callable[[RankConfig, Welcome], tuple[Rank, Facts]]
RunsWith = Callable[[RankConfig], dict[str, str]]


def serve_rank(runs_with: RunsWith, build: Build) -> NoReturn:
    """Be the rank that standard input describes, until told to stop; never returns.

    ``runs_with`` says what must be equal on all ranks; ``build`` makes the rank once they agree.
    Standard input stays open as long as whoever started this process lives: its end is ours.
    """
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=RankConfig)
    logging.basicConfig(
        level=logging.WARNING,
        format=f"%(asctime)s %(levelname)s %(name)s [rank {config.rank}]: %(message)s",
    )
    # What all ranks would say alike, rank 0 says.
    quiet = config.rank > 0 and config.log_level == "info"
    logging.getLogger("merestone").setLevel("WARNING" if quiet else config.log_level.upper())
    threading.Thread(target=_end_with_starter, daemon=True).start()
    channel = Channel(config)
    code = 1
    try:
        code = _serve(channel, config, runs_with, build)
    finally:
        channel.close()
        # Not sys.exit: threads of libraries may wait for ranks that are gone.
        sys.stderr.flush()
        os._exit(code)


def _serve(channel: Channel, config: RankConfig, runs_with: RunsWith, build: Build) -> int:
    try:
        found = runs_with(config)
    except (ValueError, OSError) as error:
        found = {"its own files": str(error)}
    welcome = _meet(channel, Hello(config.rank, os.getpid(), socket.gethostname(), found), config)
    if not isinstance(welcome, Welcome):
        if not isinstance(welcome, Stop):
            log.error("%s", welcome.reason if isinstance(welcome, Refused) else "nobody answers")
        return 0 if isinstance(welcome, Stop) else UNWANTED
    threading.Thread(target=_beat, args=(config, welcome), daemon=True).start()
    try:
        rank, facts = build(config, welcome)
    except Exception as error:
        refusal = isinstance(error, ValueError | OSError)
        if not refusal:
            log.exception("the rank could not be built")
        text = str(error) if refusal else f"{type(error).__name__}: {error}"
        channel.send(Failed(config.rank, None, text, refusal=refusal))
        return 1
    channel.send(Ready(config.rank, facts))
    while isinstance(order := channel.receive(), Run):
        channel.send(_obey(config.rank, rank, order.plan))
    return 0


def _meet(channel: Channel, hello: Hello, config: RankConfig) -> ToRank | None:
    """Report until somebody answers: what was said to a session that had ended is lost."""
    until = time.monotonic() + config.ranks.start_s
    answer = None
    while answer is None and time.monotonic() < until:
        channel.send(hello)
        answer = channel.receive(AGAIN_S)
    return answer


def _obey(number: int, rank: Rank, plan: StepPlan) -> Done | Failed:
    try:
        result = rank.run(plan)
    except Exception as error:
        log.error("step %d failed: %s", plan.step, traceback.format_exc())
        return Failed(number, plan.step, f"{type(error).__name__}: {error}", rank.collectives)
    sums = check_sums(result.works)
    if number != 0:
        result = msgspec.structs.replace(result, works=())
    return Done(number, result, sums, rank.collectives)


class Channel:
    """A rank's end of the socket that carries plans."""

    def __init__(self, config: RankConfig) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 2000)
        self.socket.setsockopt(zmq.IDENTITY, b"%d" % config.rank)
        self.socket.connect(config.endpoint)
        self.encoder = msgspec.msgpack.Encoder()
        self.decoder = msgspec.msgpack.Decoder(ToRank)

    def send(self, message: FromRank) -> None:
        self.socket.send(self.encoder.encode(message))

    def receive(self, seconds: float | None = None) -> ToRank | None:
        """The next order; None when ``seconds`` are over. Without them it waits as long as the
        deciding process lives: a thread ends this process after that."""
        if not self.socket.poll(None if seconds is None else int(seconds * 1000)):
            return None
        return self.decoder.decode(self.socket.recv())

    def close(self) -> None:
        """What was sent still leaves, for at most two seconds."""
        self.socket.close()
        self.context.term()


def _end_with_starter() -> None:
    """The end of standard input is the end of whoever started us, however it came about."""
    sys.stdin.buffer.read()
    os._exit(3)


def _beat(config: RankConfig, welcome: Welcome) -> None:
    """Say that we live, and end the process when nobody answers for ours."""
    line = zmq.Context().socket(zmq.DEALER)
    line.setsockopt(zmq.LINGER, 0)
    line.connect(welcome.pulse)
    pulse = msgspec.msgpack.encode(Pulse(config.rank, welcome.session))
    every = config.ranks.silence_s / PULSES
    attention, heard = Attention(every), 0.0
    while True:
        line.send(pulse)
        until = time.monotonic() + every
        while (left := until - time.monotonic()) > 0:
            if line.poll(int(left * 1000) + 1):
                answer = msgspec.msgpack.decode(line.recv(), type=Pulse)
                if answer.session != welcome.session:
                    _end("the deciding process has begun anew")
                heard = attention.look()
        if attention.look() - heard > config.ranks.silence_s:
            _end(f"the deciding process was silent for {config.ranks.silence_s:g} s")


def _end(reason: str) -> NoReturn:
    log.error("ending: %s", reason)
    sys.stderr.flush()
    os._exit(4)
