"""What the engine asks of whatever runs its plans."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol, runtime_checkable

from merestone.sched.plan import StepPlan, StepResult


class DeviceLost(RuntimeError):
    """The device, and whatever its memory held, is gone; ``returns``: one like it will come."""

    def __init__(self, reason: str, returns: bool = False) -> None:
        super().__init__(reason)
        self.returns = returns


class Device(Protocol):
    """Whatever obeys plans: the real runner, all ranks together, or a double in tests.

    A failed step raises, and the next one may succeed; after DeviceLost none does until whoever
    made the device says so (`LocalEngine.device_back`).
    """

    def run(self, plan: StepPlan) -> StepResult: ...


Landing = Callable[[], StepResult]
"""Waits for a plan's result: called once, or never if an earlier plan failed. Raises as ``run``."""


@runtime_checkable
class LeadingDevice(Device, Protocol):
    """A device that goes on by itself: it takes one more plan before the result of the last, and
    feeds it the ids that were drawn (see `merestone.sched.ahead`)."""

    def launch(self, plan: StepPlan) -> Landing:
        """Start a plan. ``run`` is this, and the wait for it."""
        ...


def launch(device: Device, plan: StepPlan) -> Landing:
    """Start a plan where the device can; else it runs when its result is asked for. A plan that
    could not be started is a step that failed: the result's wait raises."""
    start = getattr(device, "launch", None)  # of a LeadingDevice: to ask its protocol takes longer
    if start is None:
        return partial(device.run, plan)
    try:
        landing: Landing = start(plan)
        return landing
    except Exception as error:
        return partial(_raise, error)


def _raise(error: Exception) -> StepResult:
    raise error


class Attendant(Protocol):
    """Who keeps a device that can be lost: the ranks' processes."""

    def report(self) -> dict[str, object]:
        """For ``/health``."""
        ...

    def close(self) -> None:
        """The engine has ended."""
        ...
