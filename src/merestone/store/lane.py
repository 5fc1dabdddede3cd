"""Threads: a lane does the blocking work of a tier, in order; a bell tells the engine of it.

Must not know what the work is about.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from merestone.store.manifest import StoreFault

log = logging.getLogger("merestone.store")
Value = TypeVar("Value")


class Lane:
    """Jobs run one after another, apart from whoever posts them."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._failing = ""
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)

    def post(
        self,
        job: Callable[[], Value],
        done: Callable[[Value | None, str], None],
        *,
        proof: bool = True,
    ) -> None:
        """Run ``job``; then ``done`` with its value, or with None and the reason of its failure.

        ``done`` runs on the lane's thread. ``proof``: whether a success shows that the tier works;
        that something could be erased from a full one does not.
        """

        def run() -> None:
            value, reason = None, ""
            try:
                value = job()
            except StoreFault as fault:
                reason = fault.reason
                self._say(reason, logging.WARNING, str(fault))
            except Exception as error:  # our mistake, or a peer's that a library did not expect
                reason = "failed"
                self._say(f"failed, {error!r}", logging.ERROR, "see the traceback", error)
            if self._failing and proof and not reason:
                log.info("%s: works again", self._name)
                self._failing = ""
            done(value, reason)

        self._pool.submit(run)

    def _say(self, what: str, level: int, words: str, error: Exception | None = None) -> None:
        """Once: while a tier is away, everything fails, over and over."""
        level = logging.DEBUG if what == self._failing else level
        log.log(level, "%s: %s (%s)", self._name, what, words, exc_info=error)
        self._failing = what

    def close(self) -> None:
        """End after all that was posted."""
        self._pool.shutdown(wait=True)


class Bell:
    """How any thread tells the engine's that there is something to do. ``wake`` is the engine's,
    set before anything rings."""

    def __init__(self) -> None:
        self.wake: Callable[[], None] = _nobody
        self.rung = False
        self._calls: deque[Callable[[], None]] = deque()

    def ring(self) -> None:
        self.rung = True
        self.wake()

    def call(self, back: Callable[[], None]) -> None:
        """Have a call made on the engine's thread."""
        self._calls.append(back)
        self.ring()

    def answer(self) -> bool:
        """On the engine's thread: make the calls. Whether the bell was rung."""
        rung = self.rung
        if rung:  # else whoever rings now would be forgotten
            self.rung = False
        while self._calls:
            self._calls.popleft()()
        return rung


def _nobody() -> None: ...
