"""The last steps of an engine that ends: what stores were told to keep is written."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from merestone.sched.scheduler import Scheduler

FLUSH_S = 5.0
"""How long stores may take to finish when the engine ends."""
PATIENCE_S = 0.1
"""Stores that rest longer than this have failed, and are not waited for."""

log = logging.getLogger("merestone.engine")


def flush(scheduler: Scheduler, step: Callable[[], bool], clock: Callable[[], float]) -> None:
    """End what runs, and ``step`` until stores have nothing to do, for a bounded time."""
    until = clock() + FLUSH_S
    if scheduler.outside.rest() is None:
        return
    try:
        for sequence in [*scheduler.running, *scheduler.waiting.items]:
            scheduler.abort(sequence)
        while clock() < until:
            if step():
                continue
            rest = scheduler.outside.rest()
            if rest is None or rest > PATIENCE_S:
                return
            time.sleep(rest)
    except Exception:
        log.exception("stores could not be finished")
