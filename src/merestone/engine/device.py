"""What the engine asks of whatever runs its plans."""

from __future__ import annotations

from typing import Protocol

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


class Attendant(Protocol):
    """Who keeps a device that can be lost: the ranks' processes."""

    def report(self) -> dict[str, object]:
        """For ``/health``."""
        ...

    def close(self) -> None:
        """The engine has ended."""
        ...
