"""From what every rank says to what the engine is told. Pure functions.

Knows replies. Must not know sockets, processes or time.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import msgspec

from merestone.engine.facts import Facts
from merestone.engine.ranks.messages import Done, Failed, Hello
from merestone.sched.plan import StepResult, WorkResult


class StepFailed(RuntimeError):
    """A step failed on some rank, and all ranks stand where the next step can begin."""


class RanksApart(RuntimeError):
    """The ranks no longer do the same: nothing that they hold can be trusted."""


def check_sums(works: Sequence[WorkResult]) -> tuple[int, ...]:
    """One check sum a work, equal on all ranks if their results have equal bits."""
    encode = msgspec.msgpack.encode
    return tuple(zlib.crc32(encode(work)) for work in works)


def merge(replies: Mapping[int, Done | Failed]) -> StepResult:
    """The result of a step from the replies of all ranks.

    Rank 0's tokens count, and every rank's word on states that are not finite: a checkpoint with a
    bad part on one rank is bad.

    Raises:
        StepFailed: a rank failed, without leaving another one behind in a collective.
        RanksApart: the ranks disagree about a token, or did not run the same collectives.
    """
    ordered = [replies[rank] for rank in sorted(replies)]
    counts = {reply.collectives for reply in ordered}
    failures = [reply for reply in ordered if isinstance(reply, Failed)]
    if failures:
        text = "; ".join(f"rank {reply.rank}: {reply.error}" for reply in failures)
        if len(counts) > 1:
            raise RanksApart(f"a step failed between collectives: {text}")
        raise StepFailed(text)
    done = [reply for reply in ordered if isinstance(reply, Done)]
    if len(counts) > 1:
        raise RanksApart("the ranks did not run the same collectives")
    first = done[0].result
    bad_saves = tuple(sorted({key for reply in done for key in reply.result.bad_saves}))
    bad_slots = tuple(sorted({slot for reply in done for slot in reply.result.bad_slots}))
    for reply in done[1:]:
        for work, ours, theirs in zip(first.works, done[0].sums, reply.sums, strict=True):
            if ours != theirs and work.slot not in bad_slots:
                raise RanksApart(
                    f"ranks 0 and {reply.rank} disagree about slot {work.slot} in step {first.step}"
                )
    reports = tuple(report for reply in done for report in reply.result.reports)
    return StepResult(first.step, first.works, bad_saves, bad_slots, reports)


def disagreement(hellos: Mapping[int, Hello]) -> str | None:
    """In which respect two ranks would not compute the same, in one line; None if they agree."""
    first = hellos[0]
    for rank in sorted(hellos)[1:]:
        other = hellos[rank]
        for name in sorted(first.runs_with.keys() | other.runs_with.keys()):
            ours, theirs = first.runs_with.get(name), other.runs_with.get(name)
            if ours != theirs:
                return (
                    f"rank {rank} on {other.host} differs from rank 0 on {first.host} in {name}: "
                    f"{theirs}, not {ours}"
                )
    return None


def different_facts(facts: Mapping[int, Facts]) -> str | None:
    """In which respect two ranks are not built the same, in one line; None if they are."""
    for rank in sorted(facts)[1:]:
        for name in Facts.__slots__:
            ours, theirs = getattr(facts[0], name), getattr(facts[rank], name)
            if name not in ("notes", "device") and ours != theirs:
                return f"rank {rank} differs from rank 0 in {name}: {theirs}, not {ours}"
    return None
