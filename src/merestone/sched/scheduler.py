"""Deciding what each step does: admission, chunked prefill, decoding, preemption, seals.

One rule moves every sequence: compute rows [computed, end) toward ``known``. Knows counters and
the cache's verbs. Must not know tensors, text, clocks or ranks; a plan is all that leaves here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from heapq import heapify, heappop, heappush

from merestone.core.cache import Cache, Extension, Match, OutOfFrames
from merestone.core.checkpoint import Kind
from merestone.core.geometry import anchor_of
from merestone.core.orders import LoadHidden
from merestone.core.policy import pass_end
from merestone.sched.depth import Depth
from merestone.sched.flight import Flight, Outcome
from merestone.sched.outside import Nothing, Outside, Verifier
from merestone.sched.plan import Admit, StepPlan, StepResult, Work, WorkResult
from merestone.sched.queue import NO_MATCH, WaitingQueue
from merestone.sched.request import Sequence, promises
from merestone.sched.seals import Seals


class Scheduler:
    """Plans steps over one cache. One plan is in flight, and one ahead of it where that may be.
    ``slots``: sequences that run at once. ``token_budget``: rows of one step. ``depth``: how many
    drafts the device is asked for (None: it has no drafter).
    """

    def __init__(
        self, cache: Cache, *, slots: int, token_budget: int, depth: Depth | None = None
    ) -> None:
        if slots < 1:
            raise ValueError(f"slots must be at least 1, not {slots}")
        if token_budget < slots:
            raise ValueError(f"token budget {token_budget} is below the {slots} slots")
        self.cache = cache
        self.token_budget = token_budget
        self.depth = depth or Depth()
        self.chunk = cache.spec.chunk
        self.waiting = WaitingQueue(cache)
        self.running: list[Sequence] = []
        self.seals = Seals(cache)
        self.closing: list[int] = []
        self.free_slots = list(range(slots))
        heapify(self.free_slots)
        self.outside: Outside = Nothing()
        self.verifier: Verifier | None = None
        self.flight: Flight | None = None
        self.ahead: Flight | None = None
        self.step = 0
        self.counters: Counter[str] = Counter()

    # -- requests come and go -------------------------------------------------------------------

    def add(self, seq: Sequence) -> None:
        self.waiting.add(seq)

    @property
    def busy(self) -> bool:
        return bool(len(self.waiting) or self.running or self.closing)

    def finish(self, seq: Sequence, kind: Kind) -> None:
        """End a running sequence: seal where it stands; its slot is free from the next plan on.

        ``kind``: RESPONSE for a finished answer (all tokens but the last returned one), ALIGNED
        for an aborted one, so that a retry makes progress.
        """
        self.seals.overtaken(seq, self.step)
        if seq.seals and seq.resumable and not seq.grid:
            at = min(seq.computed, seq.known - 1) if kind is Kind.RESPONSE else seq.computed
            if at == seq.computed:
                self.seals.here(seq, at, kind, self.step)
        self.leave(seq)
        self.closing.append(seq.slot)

    def abort(self, seq: Sequence) -> None:
        """Take a sequence out, wherever it is. Its finished rows stay useful for a retry."""
        if seq.lease is None:
            self.waiting.remove(seq)
            self.outside.leaves(seq)
        else:
            self.finish(seq, Kind.ALIGNED)

    def leave(self, seq: Sequence) -> None:
        """Take a sequence out of the running ones. Its slot is not free yet."""
        assert seq.lease is not None
        self.cache.release(seq.lease)
        seq.lease = None
        self.running.remove(seq)

    # -- planning -------------------------------------------------------------------------------

    def plan(self) -> StepPlan:
        """The next step. Empty if there is nothing to do."""
        assert self.flight is None, "a plan is still in flight"
        self.step += 1
        flight = Flight(self.step)
        self._close(flight)
        self._admit(flight)
        self._schedule(flight)
        self.outside.orders(flight)
        if self.verifier is not None:
            self.verifier.orders(flight)
        plan = flight.freeze()
        if plan.empty and self.busy and not self.outside.holding:
            self._unstick(flight)
            plan = flight.freeze()
        self.flight = flight
        return plan

    def _close(self, flight: Flight) -> None:
        for seq in self.running:
            self.seals.overtaken(seq, flight.now)
        self.seals.order(flight)
        for slot in self.closing:
            self._free(flight, slot)
        self.closing.clear()

    def _free(self, flight: Flight, slot: int) -> None:
        flight.frees.append(slot)
        heappush(self.free_slots, slot)

    def _admit(self, flight: Flight) -> None:
        """Start waiting sequences in rank order, as slots and frames allow.

        Behind one that waits for frames only exact hits start: they need no rows of a step.
        """
        self.waiting.inherit(self.running)
        self.waiting.protect()
        if not self.waiting.items:
            return
        promised = promises(self.running, self.cache)
        blocked: Sequence | None = None
        for seq in list(self.waiting.items):
            if self.waiting.still_waits(seq):
                continue
            if blocked is not None and not self.waiting.may_overtake(blocked, seq):
                continue
            found = self.waiting.find(seq)
            if self.waiting.must_wait(seq, found, self.running) or self.outside.holds(seq, found):
                continue
            # Who is alone starts in any case: way is made for its rows.
            alone = not (self.running or flight.sealed)
            if not (alone or self.waiting.fits(seq, found.checkpoint, promised)):
                blocked = blocked or seq
                continue
            if not self.free_slots:
                if not self._yield_slot(flight, seq):
                    return
                promised = promises(self.running, self.cache)
            self._start(flight, seq, found)
            promised += seq.promised(self.cache)

    def _start(self, flight: Flight, seq: Sequence, found: Match) -> None:
        origin = found.checkpoint
        self.waiting.remove(seq)
        missed = self.outside.leaves(seq)
        seq.lease = self.cache.lease(seq.root, origin, flight.now)
        seq.slot = heappop(self.free_slots)
        seq.admit(found, self.cache)
        if missed:
            seq.lost = f"store_{missed}"
        self.running.append(seq)
        ids, pages = seq.tokens.tobytes(), self.cache.deltas(seq.lease)
        flight.admits.append(Admit(seq.slot, ids, seq.prompt, seq.choice, seq.params, pages))
        if origin is not None:
            flight.before.append(LoadHidden(seq.slot, origin.at, *origin.hidden))
            flight.restored.append((seq, origin))

    def _schedule(self, flight: Flight) -> None:
        """Rows for the running ones: the first in rank, decodes, short prefills, then the rest.

        The first may be a long prefill: it leaves the decodes their rows, and up to half of the
        budget to those who need no more than a chunk (a restored prompt's last tokens).
        """
        first, *rest = sorted(self.running, key=lambda s: s.rank) or (None,)
        if first is None:
            return
        decoding = [seq for seq in self.running if seq.decoding]
        budget = self.token_budget
        alone = len(decoding) == len(self.running)
        verified = self.depth.trim(decoding, budget if alone else budget // 2)
        decodes = [seq for seq in rest if seq.decoding]
        others = [seq for seq in rest if not seq.decoding]
        short = [seq for seq in others if seq.known - seq.computed <= self.chunk]
        long = [seq for seq in others if seq.known - seq.computed > self.chunk]
        wanted = sum(seq.known - seq.computed for seq in short)
        room = budget - verified - min(wanted, budget // 2)
        budget -= self._work(flight, first, max(room, 1))
        for seq in (*decodes, *short, *long):
            if seq.lease is not None:  # else it was preempted for one before it
                budget -= self._work(flight, seq, budget)

    def _work(self, flight: Flight, seq: Sequence, budget: int) -> int:
        """Give one sequence its rows; returns how many."""
        assert seq.lease is not None
        start, end = seq.computed, seq.known
        if start < end:
            if budget < 1:
                return 0
            limit = min(end, start + budget)
            end = pass_end(start, limit, seq.known, self.chunk, seq.planned())
        anchor, frames = seq.lease.anchor, seq.lease.anchor_frames
        # Drafts may be rejected: no anchor swallows their rows.
        advance = anchor_of(end, self.chunk)
        sample = end == seq.known and seq.max_tokens > 0
        extension = self._extend(flight, seq, end, advance, self.depth.wanted(seq) * sample)
        if extension is None:
            return 0
        flight.before += extension.copies
        flight.works.append(
            Work(
                slot=seq.slot,
                start=start,
                end=end,
                tokens=tuple(seq.buffer[start:end].tolist()),
                pages=extension.deltas,
                anchor=anchor,
                anchor_frames=frames,
                advance=advance,
                advance_frames=extension.advance_frames,
                sample=sample,
                drafts=extension.drafts,
                propose=extension.propose,
                prompt_logprobs=seq.prompt_logprobs,
                targets=seq.targets(start, end),
            )
        )
        flight.sequences.append(seq)
        self.seals.by_plan(flight, seq, start, end)
        return end - start + extension.drafts

    # -- when frames or slots are short ---------------------------------------------------------

    def _extend(
        self, flight: Flight, seq: Sequence, end: int, advance: int, propose: int
    ) -> Extension | None:
        """Pages for rows below ``end`` and for its drafts; without those when frames are short."""
        assert seq.lease is not None
        drafts = seq.drafts
        while True:
            try:
                return self.cache.extend(seq.lease, end, advance, flight.now, drafts, propose)
            except OutOfFrames:
                if drafts or propose:
                    drafts = propose = 0
                elif not self._make_way(flight, seq):
                    return None

    def _make_way(self, flight: Flight, seq: Sequence) -> bool:
        """Preempt the last in rank behind ``seq``; else give up a protection. False if neither."""
        behind = [
            other
            for other in self.running
            if other.rank > seq.rank and other not in flight.sequences
        ]
        if behind:
            self._preempt(flight, max(behind, key=lambda s: s.rank))
            return True
        return self.waiting.drop_protection() or self.outside.yields()

    def _yield_slot(self, flight: Flight, seq: Sequence) -> bool:
        """Make a slot free for a waiting sequence of strictly better priority, by a seal."""
        worse = [other for other in self.running if other.rank[0] > seq.rank[0]]
        if not worse:
            return False
        # Those without rows of their own lose nothing and go first.
        victim = max(worse, key=lambda s: (not s.resumable, s.rank))
        assert victim.lease is not None
        if (victim.seals or victim.matches) and victim.resumable and not victim.grid:
            self.seals.here(victim, victim.computed, Kind.ALIGNED, flight.now)
            self.seals.order(flight)
        self._preempt(flight, victim)
        return True

    def _preempt(self, flight: Flight, seq: Sequence) -> None:
        """Back to the queue. What was sealed of its rows is kept; its other frames become free."""
        self.leave(seq)
        flight.unbind(seq.slot)
        self._free(flight, seq.slot)
        seq.requeue()
        self.waiting.add(seq)
        self.counters["preemptions"] += 1

    def _unstick(self, flight: Flight) -> None:
        """Nothing could run: the oldest starts over alone, without its match."""
        first = min([*self.running, *self.waiting.items], key=lambda s: s.rank)
        for seq in list(self.running):
            self._preempt(flight, seq)
        self._start(flight, first, NO_MATCH)
        self.counters["unstuck"] += 1
        self._work(flight, first, self.token_budget)
        assert flight.works, "a request that fits the pool alone could not run alone"

    # -- results --------------------------------------------------------------------------------

    def apply(self, result: StepResult) -> list[Outcome]:
        """Take a step's result: publish what it sealed, count its rows, hand out its tokens."""
        flight = self._landed()
        bad_saves, bad_slots = set(result.bad_saves), set(result.bad_slots)
        wrong = self.verifier.judge(flight, result) if self.verifier else {}
        distrusted = [seq for seq, origin in flight.restored if origin.id in wrong and seq.lease]
        bad_slots |= {seq.slot for seq in distrusted}
        for seq, sealed in flight.sealed:
            if sealed.hidden in bad_saves or (seq.slot in bad_slots and seq in flight.sequences):
                self.cache.discard(sealed, "not_finite")
            elif sealed.id in wrong:
                self.cache.discard(sealed, wrong[sealed.id])
            else:
                self.cache.publish(sealed, flight.now)
                if sealed.at <= seq.prompt:
                    seq.written = max(seq.written, sealed.at)
                self.waiting.offer(sealed, seq)
                self.outside.published(sealed)
        for imported, seq in self.outside.apply(result):
            self.waiting.offer(imported, seq)
        outcomes = []
        for seq, work, entry in zip(flight.sequences, flight.works, result.works, strict=True):
            if seq.lease is None:  # it left while this plan, made ahead, was in flight
                continue
            self.cache.settle(seq.lease)
            if work.slot in bad_slots:
                outcomes += self._distrust(seq, wrong)
                continue
            self._advance(seq, work, entry)
            outcomes.append(Outcome(seq, entry))
        for seq in distrusted:
            if seq.lease is not None:  # it had no rows in this step
                outcomes += self._distrust(seq, wrong)
        return outcomes

    def _advance(self, seq: Sequence, work: Work, entry: WorkResult) -> None:
        """Move the counters over a work's rows, its accepted drafts and what it drew."""
        assert seq.lease is not None
        accepted = max(0, len(entry.tokens) - 1)
        seq.computed = work.end + accepted
        if accepted:
            self.cache.commit(seq.lease, seq.computed)
        for token in entry.tokens:
            seq.append(token)
        seq.drafts = work.propose
        self.counters["rows"] += work.end - work.start + work.drafts
        self.depth.note(seq, work.drafts, accepted)

    def fail(self, error: str) -> list[Outcome]:
        """The step in flight was lost, what is ahead too: nothing is published, sequences end."""
        flight = self._landed()
        self.flight = None
        for _, sealed in flight.sealed:
            self.cache.discard(sealed, "step_failed")
        self.outside.failed()
        lost = list(self.running)
        for seq in lost:
            self.leave(seq)
            self.closing.append(seq.slot)
        return [Outcome(seq, None, error) for seq in lost]

    def reset(self) -> int:
        """Forget every checkpoint, stored ones included; returns how many memory held."""
        self.outside.reset()
        return self.cache.reset()

    def skip(self) -> None:
        """Forget an empty plan."""
        self._landed()

    def _landed(self) -> Flight:
        assert self.flight is not None, "no plan is in flight"
        flight, self.flight, self.ahead = self.flight, self.ahead, None
        return flight

    def _distrust(self, seq: Sequence, wrong: Mapping[int, str]) -> list[Outcome]:
        """A state that cannot be right: forget where it came from and recompute; cold, give up."""
        assert seq.lease is not None
        origin = seq.lease.origin
        reason = wrong.get(origin.id, "not_finite") if origin else "not_finite"
        self.counters[reason] += 1
        self.leave(seq)
        self.closing.append(seq.slot)
        if origin is None:
            return [Outcome(seq, None, "the model computed a value that is not finite")]
        for checkpoint in self.cache.relatives(origin):
            self.cache.discard(checkpoint, reason)
        seq.distrust(reason)
        self.waiting.add(seq)
        return []
