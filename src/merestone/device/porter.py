"""The porter carries segments between frames and stores' tiers, on one rank.

Knows where a segment's bytes lie in a frame, and one pair of threads a tier. Must not decide what
is carried: it obeys the store orders of a plan, and reports.

    frames --(copy, in the step)--> host bytes --(writer's thread)--> tier
    tier --(reader's thread, checked)--> host bytes --(copy, in a later step)--> frames

With a tier that gives room of its own, the host bytes are the tier's, and no step waits for copies.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from hashlib import blake2b
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from merestone.core.orders import Digest, Erase, Export, Fetch, Forget, Import, Segment, StoreOrder
from merestone.device.arena import Arena
from merestone.device.crossing import Ferry
from merestone.sched.plan import StoreReport
from merestone.store.lane import Lane
from merestone.store.manifest import checksum
from merestone.store.tier import Tier, segment_name

DIGEST = 16
"""Bytes of a checksum of a whole checkpoint."""
DIGESTED = 64
"""Frames of it that are in host memory at once."""
Bytes = NDArray[np.uint8]


EXPONENTS: dict[torch.dtype, tuple[type[np.unsignedinteger], int]] = {
    torch.float32: (np.uint32, 0x7F800000),
    torch.bfloat16: (np.uint16, 0x7F80),
    torch.float16: (np.uint16, 0x7C00),
}
"""The bits of a number's exponent; all of them are set in infinities and what is no number."""


class Span(NamedTuple):
    """``size`` bytes at ``offset`` of a frame: numbers of ``dtype``."""

    offset: int
    size: int
    dtype: torch.dtype


def segment_spans(arena: Arena, segment: Segment) -> list[Span]:
    """The bytes that a segment has in its frame on this rank: only what was surely written, the
    rows meant of each field or the cells of an anchor."""
    layout = arena.layout
    if segment.part == "hidden":
        size = layout.hidden_bytes
        return [Span(segment.first * size, size, arena.hidden.dtype)]
    spans = []
    if segment.part == "anchor":
        for key, runs in layout.cells.items():
            field = arena.fields[key]
            cell = field.bytes // field.shape[0]
            spans += [
                Span(run.offset, (run.last - run.first) * cell, field.dtype)
                for run in runs
                if run.frame == segment.first
            ]
        return spans
    shards = arena.shards(segment.part)
    first, last = (
        shards.spec.local_count(count, shards.rank) for count in (segment.first, segment.last)
    )
    for key, field in arena.fields.items():
        if field.home == segment.part:
            begin, end = (n // field.every * field.bytes for n in (first, last))
            if begin < end:
                spans.append(Span(layout.offsets[key] + begin, end - begin, field.dtype))
    return spans


def _runs(spans: Sequence[Span]) -> list[tuple[int, int]]:
    """(offset, size) of the bytes of ``spans``; those that adjoin are one."""
    runs: list[tuple[int, int]] = []
    for span in spans:
        if runs and sum(runs[-1]) == span.offset:
            runs[-1] = runs[-1][0], runs[-1][1] + span.size
        else:
            runs.append((span.offset, span.size))
    return runs


def _finite(data: Bytes, dtype: torch.dtype) -> bool:
    """Whether no number's exponent is all ones. Not torch's: on a thread of its own, that would
    bring a pool of threads along to compete with the engine's."""
    if dtype not in EXPONENTS:
        return True
    kind, exponent = EXPONENTS[dtype]
    return not bool((data.view(kind) & exponent == exponent).any())


class Porter:
    """Obeys store orders over ``arena`` on ``rank``. ``notify`` is called by any thread after a
    report."""

    def __init__(
        self, arena: Arena, tiers: Sequence[Tier], rank: int, notify: Callable[[], None]
    ) -> None:
        self.arena = arena
        self.tiers = tiers
        self.rank = rank
        self.notify = notify
        self.writers = [Lane(f"merestone-{tier.name}-writer") for tier in tiers]
        self.readers = [Lane(f"merestone-{tier.name}-reader") for tier in tiers]
        self._ferry = Ferry(arena.memory)
        # What was read, by ticket: frames, or a tier's views of segments. A ticket that is not
        # here any more is not wanted.
        self.fetched: dict[int, list[Bytes | memoryview]] = {}
        self._fetching = threading.Lock()
        self._reports: deque[StoreReport] = deque()

    def obey(self, orders: Sequence[StoreOrder]) -> tuple[StoreReport, ...]:
        """Carry out a plan's orders; returns what was finished since the last call."""
        self._ferry.let_go()
        for order in orders:
            match order:
                case Export():
                    self._export(order)
                case Fetch():
                    self._fetch(order)
                case Import():
                    self._import(order)
                case Forget():
                    with self._fetching:
                        self.fetched.pop(order.ticket, None)
                case Erase():
                    self._erase(order)
                case Digest():
                    self._digest(order)
        found = []
        while self._reports:
            found.append(self._reports.popleft())
        return tuple(found)

    def close(self) -> None:
        """End when all that was ordered is done."""
        for lane in (*self.writers, *self.readers):
            lane.close()
        self._ferry.let_go(wait=True)

    def _report(self, report: StoreReport) -> None:
        self._reports.append(report)
        self.notify()

    # -- out ------------------------------------------------------------------------------------

    def _export(self, order: Export) -> None:
        tier = self.tiers[order.tier]
        contents = self._contents(order.segments, tier)
        names = [segment_name(segment.address, self.rank) for segment in order.segments]
        copied = self._ferry.crossing()

        def write() -> tuple[bytes, ...]:
            copied.wait()
            for name, data, skip in zip(names, contents, tier.has(names), strict=True):
                if not skip:
                    tier.put(name, data)
            return tuple(map(checksum, contents))

        def done(sums: tuple[bytes, ...] | None, error: str) -> None:
            sizes = tuple(map(len, contents))
            self._report(StoreReport(order.ticket, self.rank, error, sums or (), sizes))

        self.writers[order.tier].post(write, done)

    def _contents(self, segments: Sequence[Segment], tier: Tier) -> list[bytes | memoryview]:
        """The bytes of each segment: in the tier's own memory, once the copies that are ordered
        here are over, where it has room; else in memory of ours."""
        found: dict[int, bytes | memoryview] = {}
        spans = [segment_spans(self.arena, segment) for segment in segments]
        for i, segment in enumerate(segments):
            room = tier.room(sum(span.size for span in spans[i]))
            if room is not None:
                self._ferry.out(segment.frame, _runs(spans[i]), room)
                found[i] = room
        rest = [i for i in range(len(segments)) if i not in found]
        raw = self._frames([segments[i].frame for i in rest]) if rest else ()
        for i, row in zip(rest, raw, strict=True):
            parts = (row[span.offset : span.offset + span.size].data for span in spans[i])
            found[i] = b"".join(parts)
        return [found[i] for i in range(len(segments))]

    def _frames(self, numbers: list[int]) -> Bytes:
        """[len(numbers), frame_bytes], copied to host memory; from a GPU through pinned memory."""
        memory = self.arena.memory
        rows = memory[torch.tensor(numbers, device=memory.device)]
        if memory.is_cuda:
            host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
            rows = host.copy_(rows)
        found: Bytes = rows.numpy()
        return found

    def _digest(self, order: Digest) -> None:
        """One checksum of everything, a batch of frames at a time through host memory."""
        hashed, finite = blake2b(digest_size=DIGEST), True
        for start in range(0, len(order.segments), DIGESTED):
            segments = order.segments[start : start + DIGESTED]
            raw = self._frames([segment.frame for segment in segments])
            for row, segment in zip(raw, segments, strict=True):
                for span in segment_spans(self.arena, segment):
                    data = row[span.offset : span.offset + span.size]
                    hashed.update(data.data)
                    finite &= bool(torch.isfinite(torch.from_numpy(data).view(span.dtype)).all())
        error = "" if finite else "not_finite"
        self._reports.append(StoreReport(order.ticket, self.rank, error, (hashed.digest(),)))

    def _erase(self, order: Erase) -> None:
        names = [segment_name(address, self.rank) for address in order.addresses]
        tier = self.tiers[order.tier]
        writer = self.writers[order.tier]
        writer.post(lambda: tier.erase(names), lambda done, error: None, proof=False)

    # -- in -------------------------------------------------------------------------------------

    def _fetch(self, order: Fetch) -> None:
        self.fetched[order.ticket] = []

        def done(report: StoreReport | None, error: str) -> None:
            self._report(report or StoreReport(order.ticket, self.rank, error))

        self.readers[order.tier].post(lambda: self._read(order), done)

    def _read(self, order: Fetch) -> StoreReport:
        """Have every segment, checked, as the frame that it will be written to, or a view."""
        tier = self.tiers[order.tier]
        found: list[Bytes | memoryview] = []
        broken: dict[str, str] = {}
        for segment, wanted in zip(order.segments, order.sums[self.rank], strict=True):
            if order.ticket not in self.fetched:
                break
            data = tier.get(segment_name(segment.address, self.rank))
            error = "missing" if data is None else ""
            if data is not None:
                error = (
                    "damaged" if checksum(data) != wanted else self._unpack(segment, data, found)
                )
            if error:
                broken[segment.address] = error
        if broken:
            error = next(iter(broken.values()))
            return StoreReport(order.ticket, self.rank, error, broken=tuple(broken))
        with self._fetching:
            if order.ticket in self.fetched:
                self.fetched[order.ticket] = found
        return StoreReport(order.ticket, self.rank)

    def _unpack(
        self, segment: Segment, data: bytes | memoryview, found: list[Bytes | memoryview]
    ) -> str:
        """Add to ``found`` a view as it is; of bytes, [frame_bytes] with those of the segment where
        they belong (of a hidden row: itself). Or say why not."""
        spans = segment_spans(self.arena, segment)
        if sum(span.size for span in spans) != len(data):
            return "foreign"
        source = np.frombuffer(data, np.uint8)
        ends = list(accumulate(span.size for span in spans))
        parts = [source[end - span.size : end] for end, span in zip(ends, spans, strict=True)]
        if not all(_finite(part, span.dtype) for part, span in zip(parts, spans, strict=True)):
            return "not_finite"
        if isinstance(data, memoryview):
            found.append(data)
        elif segment.part == "hidden":
            found.append(source.copy())
        else:
            frame = np.zeros(self.arena.layout.frame_bytes, np.uint8)
            for part, span in zip(parts, spans, strict=True):
                frame[span.offset : span.offset + span.size] = part
            found.append(frame)
        return ""

    def _import(self, order: Import) -> None:
        count = len(order.segments)
        staged = self.fetched.pop(order.ticket)
        if order.last:
            assert len(staged) == count
        else:
            self.fetched[order.ticket] = staged[count:]
        views, frames, rows = [], [], []
        for segment, data in zip(order.segments, staged, strict=False):
            if isinstance(data, memoryview):
                runs = _runs(segment_spans(self.arena, segment))
                self._ferry.back(data, segment.frame, runs)
                views.append(data)
            elif segment.part == "hidden":
                (span,) = segment_spans(self.arena, segment)
                target = self.arena.memory[segment.frame, span.offset : span.offset + span.size]
                target.copy_(torch.from_numpy(data))
            else:
                frames.append(segment.frame)
                rows.append(data)
        self._ferry.hold(views)
        if frames:
            self._write(frames, rows)

    def _write(self, frames: list[int], rows: list[Bytes]) -> None:
        memory = self.arena.memory
        host = torch.from_numpy(np.stack(rows))
        places = torch.tensor(frames, device=memory.device)
        memory[places] = (host.pin_memory() if memory.is_cuda else host).to(memory.device)
