"""The ranks as one device: a plan goes out to all of them, their results come back as one.

Knows messages, sessions and time-outs; no wait here is without a bound. Must not know tensors,
requests or what a plan means. The ranks' processes hold all memory, and this process runs no
collective: whatever a rank is stuck in, this side answers, ends the processes and may begin anew.
"""

from __future__ import annotations

import logging
import secrets
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path

import msgspec
import zmq

from merestone.engine.device import DeviceLost
from merestone.engine.facts import Facts
from merestone.engine.ranks.launch import WORKER, Processes
from merestone.engine.ranks.merge import RanksApart, different_facts, disagreement, merge
from merestone.engine.ranks.messages import (
    Done,
    Failed,
    FromRank,
    Hello,
    RankOptions,
    Ready,
    Refused,
    Run,
    Stop,
    ToRank,
    Welcome,
)
from merestone.engine.ranks.node import rank_configs
from merestone.engine.ranks.watch import Watch
from merestone.sched.plan import StepPlan, StepResult

log = logging.getLogger("merestone.ranks")
POLL_MS = 50
"""How long a loss may stay unnoticed by a waiting thread."""
LAST_WORDS_MS = 200
"""How long a message may be on its way when nothing else is waited for."""
BEHIND_S = 5.0
"""After one rank has failed in a step, the others get this long: they may wait for it for ever."""
GRACE_S = 3.0
REBIND_S = 30.0
"""How long the port of a session that has ended may still be held, on a thread of the library."""


class Ranks:
    """Implements ``engine.Device`` over the processes of all ranks.

    `start` makes the first session; ``listen`` names who hears of losses. One thread runs plans;
    any may close.
    """

    def __init__(
        self,
        options: RankOptions,
        directory: Path,
        engine_options: bytes,
        *,
        command: Sequence[str] = WORKER,
    ) -> None:
        self.options = options
        self.directory = directory
        self.engine_options = engine_options
        self.command = command
        self.address = _address(options.master) if options.master else ""
        self.private = Path(tempfile.mkdtemp(prefix="merestone-"))
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.encoder = msgspec.msgpack.Encoder()
        self.decoder = msgspec.msgpack.Decoder(FromRank)
        self.socket: zmq.Socket[bytes] | None = None
        self.processes: Processes | None = None
        self.meeting: socket.socket | None = None
        """Keeps the port at which the ranks' collectives meet from being given to others."""
        self.turn = threading.RLock()
        """Held by whoever uses the socket or changes the session."""
        self.facts: Facts | None = None
        self.hellos: dict[int, Hello] = {}
        self.sessions = 0
        self.up = False
        self.closed = False
        self.anew: threading.Thread | None = None
        self.told: tuple[str, bool] | None = None
        """What there is to say of a loss, until the ranks are back."""
        self.on_lost: Callable[[str, bool], None] = _nobody
        self.on_back: Callable[[Callable[[], None]], None] = _nobody
        self.reason = "the ranks have ended"
        """Why there are none, or were none the last time."""
        self.planned_for = 0
        """The session that whoever plans knows to be there: none obeys a plan for another one."""
        pulse = f"tcp://{self.address}:*" if self.address else f"ipc://{self.private}/pulse"
        self.watch = Watch(self.context, pulse, options.silence_s, self._lost)

    def listen(
        self, on_lost: Callable[[str, bool], None], on_back: Callable[[Callable[[], None]], None]
    ) -> None:
        """``on_lost`` gets the reason and whether the ranks come back, at once if they are lost
        already; ``on_back`` what is to be called before the first plan that is made for those who
        came. Both run on threads of ours, and must not wait."""
        with self.turn:
            self.on_lost, self.on_back = on_lost, on_back
            if self.told is not None:
                on_lost(*self.told)

    def _tell(self, reason: str, returns: bool) -> None:
        with self.turn:
            self.told = reason, returns
            self.on_lost(reason, returns)

    # -- a session begins and ends --------------------------------------------------------------

    def start(self) -> Facts:
        """Start all ranks; returns when each of them is ready, and how they are built.

        Raises:
            ValueError: they differ, or the model or an option does not suit them; names the rank.
            DeviceLost: a rank ended, fell silent or was not ready in time.
        """
        try:
            return self._start()
        except BaseException:
            self._end_session(0.0)
            raise

    def _start(self) -> Facts:
        options, until = self.options, time.monotonic() + self.options.start_s
        session = secrets.token_hex(8)
        with self.turn:
            if self.closed:
                raise DeviceLost("the engine has stopped")
            self.sessions += 1
            self.socket, endpoint = self._bind()
            configs = rank_configs(options, endpoint, self.directory, self.engine_options)
            self.processes = Processes(configs, self.command)
            self.watch.begin(session, self.processes)
        hellos: dict[int, Hello] = {}
        while len(hellos) < options.tp:
            reply = self._receive(until, "did not report", hellos)
            if isinstance(reply, Hello):
                hellos[reply.rank] = reply
        if difference := disagreement(hellos):
            self._send(Refused(difference))
            raise ValueError(difference)
        self.hellos = hellos
        before = self.facts
        frames = None if before is None else before.frames
        self._send(Welcome(session, self.watch.endpoint, self._rendezvous(), frames))
        facts: dict[int, Facts] = {}
        while len(facts) < options.tp:
            reply = self._receive(until, "was not ready", facts)
            if isinstance(reply, Failed):
                text = reply.error if reply.refusal else f"rank {reply.rank}: {reply.error}"
                raise (ValueError if reply.refusal else DeviceLost)(text)
            if isinstance(reply, Ready):
                facts[reply.rank] = reply.facts
        if difference := different_facts(facts):
            raise ValueError(difference)
        if before is not None and (difference := different_facts({0: before, 1: facts[0]})):
            raise DeviceLost(f"rank 0 came back built differently: {difference}")
        with self.turn:
            if self.watch.lost is not None:
                raise self._loss(self.watch.lost)
            self.watch.ready(facts)
            self.facts, self.up = before or facts[0], True
            if before is None or self.on_back is _nobody:  # nobody has planned for others
                self.planned_for = self.sessions
        return facts[0]

    def _bind(self) -> tuple[zmq.Socket[bytes], str]:
        """A socket for the plans of a session, and where ranks find it."""
        endpoint = f"ipc://{self.private}/plans-{self.sessions}"
        if self.options.master:
            endpoint = f"tcp://{self.address}:{self.options.master.rpartition(':')[2]}"
        until = time.monotonic() + (GRACE_S if self.sessions == 1 else REBIND_S)
        while True:
            found = self.context.socket(zmq.ROUTER)
            found.setsockopt(zmq.LINGER, 1000)
            found.setsockopt(zmq.ROUTER_HANDOVER, 1)
            try:
                found.bind(endpoint)
                return found, endpoint
            except zmq.ZMQError as error:
                found.close(linger=0)
                if time.monotonic() > until:
                    raise OSError(f"cannot listen on {endpoint}: {error}") from error
                time.sleep(POLL_MS / 1000)

    def _rendezvous(self) -> str:
        """Where the ranks' collectives meet: a file of this machine, or a free port of it."""
        if not self.options.master:
            return f"file://{self.private}/collectives-{self.sessions}"
        self.meeting = hold(self.address)
        return f"tcp://{self.address}:{self.meeting.getsockname()[1]}"

    def _end_session(self, grace_s: float) -> None:
        with self.turn:
            self.up = False
            self.watch.pause()
            if self.processes is not None:
                self.processes.end(grace_s)
                self.processes = None
            if self.socket is not None:
                self.socket.close()
                self.socket = None
            if self.meeting is not None:
                self.meeting.close()
                self.meeting = None

    def _lost(self, reason: str) -> None:
        """On the watch's thread: nothing of this session can be used any more.

        While a session begins, whoever waits for it sees the loss, and deals with it.
        """
        with self.turn:
            if not self.up or self.closed:
                return
            self.up, self.reason = False, reason
            processes = self.processes
        assert processes is not None
        returns = self._loss(reason).returns
        processes.end()
        self._tell(reason, returns)
        with self.turn:  # whoever closes waits for the thread, or there is none
            if returns and not self.closed:
                self.anew = threading.Thread(target=self._begin_anew, name="merestone-anew")
                self.anew.start()

    def _loss(self, reason: str) -> DeviceLost:
        """Ranks that once were ready come back, if that was asked for."""
        return DeviceLost(reason, self.options.on_loss == "restart" and self.facts is not None)

    def _begin_anew(self) -> None:
        try:
            self._end_session(0.0)
            self.start()
        except Exception as error:
            text = f"the ranks could not be started again: {error}"
            log.error("%s", text)
            self._tell(text, False)
        else:
            with self.turn:
                # Else they were lost again, which was said; what came then, a later thread says.
                if self.up and self.anew is threading.current_thread():
                    log.info("the ranks are back, with an empty cache")
                    self.told = None
                    self.on_back(partial(self._heard, self.sessions))

    def _heard(self, session: int) -> None:
        self.planned_for = session

    def close(self) -> None:
        """End all ranks, in order if they can."""
        with self.turn:
            if self.closed:
                return
            self.closed = True
            in_order = self.up and self.watch.lost is None
            self.watch.pause()
            if in_order:
                self._send(Stop())
        if self.anew is not None:
            self.anew.join()
        self._end_session(GRACE_S if in_order else 0.0)
        self.watch.close()
        self.context.destroy(linger=0)
        shutil.rmtree(self.private, ignore_errors=True)

    # -- plans ----------------------------------------------------------------------------------

    def run(self, plan: StepPlan) -> StepResult:
        """Every rank obeys ``plan``; their replies are the barrier after it.

        Raises:
            StepFailed: a rank could not obey, and all can go on.
            DeviceLost: a rank is lost, and with it whatever the ranks held.
        """
        with self.turn:
            there = self.up and self.planned_for == self.sessions
            if self.watch.lost is not None or not there:
                raise self._loss(self.watch.lost or self.reason)
            self._send(Run(plan))
            replies: dict[int, Done | Failed] = {}
            until, failing = (
                time.monotonic() + self.options.step_s,
                f"did not finish step {plan.step}",
            )
            while len(replies) < self.options.tp:
                reply = self._receive(until, failing, replies)
                if isinstance(reply, Done) and reply.result.step == plan.step:
                    replies[reply.rank] = reply
                elif isinstance(reply, Failed) and reply.step == plan.step:
                    replies[reply.rank] = reply
                    until = min(until, time.monotonic() + BEHIND_S)
                    failing += f", in which rank {reply.rank} failed ({reply.error}),"
                elif isinstance(reply, Hello) and reply.process != self.hellos[reply.rank].process:
                    raise self._loss(self.watch.declare(f"rank {reply.rank} was started anew"))
            try:
                return merge(replies)
            except RanksApart as error:  # in our turn still: it is this session's loss
                raise self._loss(self.watch.declare(str(error))) from error

    def _send(self, message: ToRank) -> None:
        """To all ranks, encoded once."""
        assert self.socket is not None
        data = self.encoder.encode(message)
        for rank in range(self.options.tp):
            self.socket.send_multipart([b"%d" % rank, data])

    def _receive(self, until: float, failing: str, came: Collection[int]) -> FromRank:
        """The next message of any rank.

        Raises:
            DeviceLost: a rank is lost, or ``until`` has passed: the first that has not come
                ``failing`` in time.
        """
        assert self.socket is not None
        while True:
            # What was said before a rank ended, or while we stood still, counts: messages are
            # looked at once more after it is known that there is nothing to wait for.
            lost, over = self.watch.lost, time.monotonic() > until
            if self.socket.poll(LAST_WORDS_MS if lost or over else POLL_MS):
                return self.decoder.decode(self.socket.recv_multipart()[1])
            if self.closed:
                raise DeviceLost("the engine has stopped")
            if lost is not None:
                raise self._loss(lost)
            if over:
                late = min(set(range(self.options.tp)) - set(came))
                dead = self.processes.dead() if self.processes else None
                raise self._loss(self.watch.declare(dead or f"rank {late} {failing} in time"))

    def report(self) -> dict[str, object]:
        """For ``/health``: where the ranks run, and how long ago each was heard."""
        heard = self.watch.ages()
        return {
            "tp": self.options.tp,
            "dcp": self.options.dcp,
            "sessions": self.sessions,
            "ranks": [
                {"rank": rank, "host": hello.host, "heard_s_ago": heard.get(rank)}
                for rank, hello in sorted(self.hellos.items())
            ],
        }


def hold(address: str) -> socket.socket:
    """A free port of ``address``, given to nobody else while the socket is open; whoever names it
    may listen there."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((address, 0))
    return held


def _address(master: str) -> str:
    """The address of HOST:PORT, as a number: a socket is bound to no name.

    Raises:
        ValueError: no such host.
    """
    host, _, port = master.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"--master {master!r} is not HOST:PORT")
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        raise ValueError(f"--master {master!r}: {error.strerror}") from error


def _nobody(*_: object) -> None:
    """Nobody listens yet."""
