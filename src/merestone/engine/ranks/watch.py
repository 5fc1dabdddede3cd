"""Hears the ranks, and says when one is lost.

One thread, which waits for nobody. Knows pulses and processes. Must not know plans.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

import msgspec
import zmq

from merestone.engine.ranks.attention import PULSES, Attention
from merestone.engine.ranks.launch import Processes
from merestone.engine.ranks.messages import Pulse

log = logging.getLogger("merestone.ranks")
TICK_MS = 50


class Watch:
    """Watches the ranks of one session after another.

    ``endpoint`` is bound at once. A rank is lost when its process (of this machine) has ended or
    when it was silent for ``silence_s`` while we listened; `lost` then gives the reason, and
    ``on_loss`` is called with it, once a session, on the watch's thread.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        silence_s: float,
        on_loss: Callable[[str], None],
    ) -> None:
        self.silence_s = silence_s
        self.on_loss = on_loss
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(endpoint)
        self.endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.lock = threading.Lock()
        self.session = ""
        self.heard: dict[int, float] = {}
        """By rank, when it was last heard, in the time of `attention`."""
        self.attention = Attention(silence_s / PULSES)
        self.processes: Processes | None = None
        self._lost: str | None = None
        self._reported = True
        self._closing = False
        self._thread = threading.Thread(target=self._loop, name="merestone-watch", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> str | None:
        """Why the ranks of this session are not to be waited for."""
        return self._lost

    def begin(self, session: str, processes: Processes) -> None:
        """A new session: its processes are watched from now on, ranks once they were heard or
        are ready."""
        with self.lock:
            self.session, self.processes = session, processes
            self.heard = {}
            self._lost, self._reported = None, False

    def ready(self, ranks: Iterable[int]) -> None:
        """All of them report for work: one that was never heard is silent from now on, too."""
        with self.lock:
            for rank in ranks:
                self.heard.setdefault(rank, self.attention.now)

    def declare(self, reason: str) -> str:
        """A rank is lost for a reason that others found. Returns the first reason."""
        with self.lock:
            if self._lost is None:
                self._lost = reason
            return self._lost

    def pause(self) -> None:
        """End of a session on purpose: nothing in it counts as a loss."""
        with self.lock:
            self.processes, self.heard, self._reported = None, {}, True

    def close(self) -> None:
        self._closing = True
        self._thread.join()

    def ages(self) -> dict[int, float]:
        """Seconds since each rank was heard."""
        with self.lock:
            now = self.attention.now
            return {rank: round(now - at, 3) for rank, at in sorted(self.heard.items())}

    def _loop(self) -> None:
        while not self._closing:
            self.socket.poll(TICK_MS)
            self._hear()
            with self.lock:
                if not self._reported and self._lost is None:
                    self._lost = self._find_loss()
                report = None if self._reported else self._lost
                self._reported = self._reported or report is not None
            if report is not None:
                log.error("%s", report)
                self.on_loss(report)
        self.socket.close()

    def _hear(self) -> None:
        with self.lock:
            now = self.attention.look()
        while self.socket.poll(0):
            sender, data = self.socket.recv_multipart()
            try:
                pulse = msgspec.msgpack.decode(data, type=Pulse)
            except msgspec.DecodeError:
                continue
            with self.lock:
                if pulse.session == self.session:
                    self.heard[pulse.rank] = now
                answer = msgspec.msgpack.encode(Pulse(pulse.rank, self.session))
            self.socket.send_multipart([sender, answer])

    def _find_loss(self) -> str | None:
        if self.processes is not None and (dead := self.processes.dead()):
            return dead
        for rank, at in sorted(self.heard.items()):
            if self.attention.now - at > self.silence_s:
                return f"rank {rank} was silent for {self.silence_s:g} s"
        return None
