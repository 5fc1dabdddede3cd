"""The plan after the one in flight, made before the host knows what that one draws.

Knows the scheduler and the cache. Must not know how a device feeds itself.

    0 ............ computed .. known           what the host knows; the plan in flight computes
                   | in flight |  this plan's    [computed, known) and draws the id at ``known``,
                   |           |  one row, unknown  which this plan's row takes from the device

A plan made ahead holds rows of decoding sequences and nothing else. Whatever needs the host's
knowledge, or more than rows, waits for a plan made with nothing in flight.
"""

from __future__ import annotations

from merestone.core.geometry import anchor_of
from merestone.sched.flight import Flight
from merestone.sched.outside import Nothing
from merestone.sched.plan import StepPlan, Work
from merestone.sched.request import Sequence
from merestone.sched.scheduler import Scheduler


def plan_ahead(scheduler: Scheduler) -> StepPlan | None:
    """One more row for each that decodes, behind the plan in flight; None: wait for its result.

    If a sequence turns out to have ended, its row lies above every boundary, like a rejected draft,
    and its result is dropped. A row that would complete a chunk sits this plan out: the anchor
    advances only over ids that the host has accepted, and no boundary may be further than a chunk
    from its anchor. So does a row behind the last token of an answer.
    """
    assert scheduler.flight is not None, "there is nothing to be ahead of"
    assert scheduler.ahead is None, "a plan is ahead already"
    if not _settled(scheduler):
        return None
    drawing = set(scheduler.flight.sequences)
    rows = [
        (seq, end)
        for seq in scheduler.running
        for end in [seq.known + (seq in drawing)]
        if seq not in drawing or (seq.left > 1 and end % scheduler.chunk)
    ]
    if not rows or not all(_plain(seq, end) for seq, end in rows):
        return None
    needed = _frames(scheduler, rows)
    if needed > scheduler.cache.free and needed > scheduler.cache.available():
        return None
    ahead = Flight(scheduler.step + 1)
    for seq, end in rows:
        _row(scheduler, ahead, seq, end, known=seq not in drawing)
    scheduler.step += 1
    scheduler.ahead = ahead
    scheduler.counters["ahead"] += 1
    return ahead.freeze()


def _settled(scheduler: Scheduler) -> bool:
    """Whether nobody comes or goes, nothing is proposed, and nobody else wants to see each step."""
    return (
        not scheduler.closing
        and not _may_start(scheduler)
        and not scheduler.cache.spec.drafts
        and isinstance(scheduler.outside, Nothing)
        and scheduler.verifier is None
        and all(seq.decoding for seq in scheduler.running)
    )


def _may_start(scheduler: Scheduler) -> bool:
    """Whether a plan could admit somebody who waits: to a free slot, or one made free for it."""
    waiting = scheduler.waiting.items
    if not waiting:
        return False
    # Their own priorities: what was lent to one that runs may be over with the result in flight.
    return bool(scheduler.free_slots) or any(
        seq.priority > waiting[0].priority for seq in scheduler.running
    )


def _plain(seq: Sequence, end: int) -> bool:
    """Whether a row that ends at ``end`` reaches no boundary, and its token needs no host."""
    params = seq.params
    reached = any(at <= end for at, _ in seq.above(seq.passed))
    return not reached and params.logprobs is None and params.unchanged


def _frames(scheduler: Scheduler, rows: list[tuple[Sequence, int]]) -> int:
    """Frames that the rows take at most: a page of each group, and an anchor for a full chunk."""
    spec = scheduler.cache.spec
    full = sum(end % spec.chunk == 0 for _, end in rows)
    return len(rows) * len(spec.groups) + full * spec.anchor_frames


def _row(scheduler: Scheduler, ahead: Flight, seq: Sequence, end: int, *, known: bool) -> None:
    assert seq.lease is not None
    assert seq.computed < end
    anchor, frames = seq.lease.anchor, seq.lease.anchor_frames
    # Of a row whose id is unknown it stays where it is: the row completes no chunk.
    advance = anchor_of(end, scheduler.chunk)
    extension = scheduler.cache.extend(seq.lease, end, advance, ahead.now)
    ahead.before += extension.copies
    ahead.works.append(
        Work(
            slot=seq.slot,
            start=end - 1,
            end=end,
            tokens=(int(seq.buffer[end - 1]),) if known else (),
            pages=extension.deltas,
            anchor=anchor,
            anchor_frames=frames,
            advance=advance,
            advance_frames=extension.advance_frames,
            sample=True,
        )
    )
    ahead.sequences.append(seq)
