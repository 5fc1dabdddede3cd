"""Copies between frames and host memory that nobody waits for.

Knows streams and events. Must not know what is copied, or why.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from merestone.store.slabs import Allocate


class Crossing:
    """All copies so far on this thread's stream of ``device``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            # Whoever waits sleeps: it is a thread beside the engine's.
            self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._event.record()

    @property
    def over(self) -> bool:
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Until it is over; on any thread."""
        if self._event is not None:
            with torch.cuda.device(self._device):
                self._event.synchronize()


class Ferry:
    """Copies runs of bytes, (offset, size), of rows of ``memory`` [frames, frame_bytes] uint8 into
    views of host memory and back, in the order of the current stream.

    Copies of views that are page-locked are not waited for, so views must not change before their
    crossing is over.
    """

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self._held: deque[tuple[Crossing, list[memoryview]]] = deque()

    def out(self, frame: int, runs: Iterable[tuple[int, int]], view: memoryview) -> None:
        """Fill ``view`` with runs of a frame, one behind another."""
        host, row, done = torch.frombuffer(view, dtype=torch.uint8), self._memory[frame], 0
        for offset, size in runs:
            host[done : done + size].copy_(row[offset : offset + size], non_blocking=True)
            done += size

    def back(self, view: memoryview, frame: int, runs: Iterable[tuple[int, int]]) -> None:
        """Write the runs of a frame that ``out`` has read."""
        host, row, done = torch.frombuffer(view, dtype=torch.uint8), self._memory[frame], 0
        for offset, size in runs:
            row[offset : offset + size].copy_(host[done : done + size], non_blocking=True)
            done += size

    def crossing(self) -> Crossing:
        """What has been ordered so far."""
        return Crossing(self._memory.device)

    def hold(self, views: Sequence[memoryview]) -> None:
        """Keep views that copies ordered so far read."""
        if views:
            self._held.append((self.crossing(), list(views)))

    def let_go(self, wait: bool = False) -> None:
        """Keep those no longer whose copies are over, or are waited for."""
        while self._held and (wait or self._held[0][0].over):
            crossing, _ = self._held[0]
            crossing.wait()
            self._held.popleft()


def page_locked(size: int) -> memoryview:
    """Host memory that a GPU reads and writes by itself. ``size``: a power of two, or torch would
    take more.

    Raises:
        MemoryError: no more can be locked.
    """
    try:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy().data
    except RuntimeError as error:
        raise MemoryError(str(error).partition("\n")[0]) from error


def locking(device: torch.device) -> Allocate | None:
    """What gives memory to which copies from ``device`` need nobody; None: ordinary memory does."""
    return page_locked if device.type == "cuda" else None
