"""What is left to plan with when the device has lost its memory: the waiting requests.

Knows the scheduler and the cache. Must not know why the device was lost.
"""

from __future__ import annotations

from merestone.sched.flight import Flight, Outcome
from merestone.sched.scheduler import Scheduler


def lose_device(scheduler: Scheduler, error: str) -> list[Outcome]:
    """End what runs, and forget every checkpoint: no frame holds what it did. May be repeated.

    Requests that wait keep their places. They will match nothing, and may ask stores again.
    """
    cache = scheduler.cache
    if scheduler.flight is None:  # lost between two steps
        scheduler.flight = Flight(scheduler.step)
    outcomes = scheduler.fail(error)
    # A slot of a lost device needs no order to be free; the plan says so once, to whoever comes.
    for _, _, sealed in scheduler.seals.late:
        cache.discard(sealed, "device_lost")
    scheduler.seals.late.clear()
    for seq in scheduler.waiting.items:
        scheduler.outside.leaves(seq)
    cache.reset()
    return outcomes
