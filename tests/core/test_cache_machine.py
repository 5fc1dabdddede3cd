"""Random verbs on random caches: the books and the contents of frames are right after each."""

from __future__ import annotations

from collections import Counter

import numpy as np
from cache_strategies import PROFILE, cache_specs
from frame_contents import FrameContents, Run
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from merestone.core.audit import audit
from merestone.core.cache import Cache, CacheSpec
from merestone.core.checkpoint import Checkpoint, Kind, State

EXAMPLES, STEPS = 450, 90
SEEN: Counter[str] = Counter()
EFFECTS = ("copies", "restored", "evicted", "no_room", "accepted", "spared")

LIMIT = 48
SMALL = st.integers(0, 63)
ROOTS = (("", "a"), ("salt", "a"))


class CacheMachine(RuleBasedStateMachine):
    """Requests run, meet, branch, are rejected, preempted and aborted; steps execute plans."""

    @initialize(spec=cache_specs(), seed=SMALL)
    def start_up(self, spec: CacheSpec, seed: int) -> None:
        self.cache = Cache(spec)
        self.contents = FrameContents(self.cache)
        self.runs: list[Run] = []
        self.spared: list[Checkpoint] = []
        # The last resort of a request alone in the pool chooses by anchor, not by key.
        self.by_anchor, evict_anchor = False, self.cache.shelf.evict_anchor

        def noted(frames: tuple[int, ...]) -> bool:
            self.by_anchor |= evict_anchor(frames)
            return self.by_anchor

        self.cache.shelf.evict_anchor = noted  # type: ignore[method-assign]
        self.known: dict[tuple[object, tuple[int, ...]], Checkpoint] = {}
        self.saved: list[Checkpoint] = []
        self.now = 0
        rng = np.random.default_rng(seed)
        # Two trunks of a binary alphabet; requests leave them anywhere.
        self.trunks = [rng.integers(0, 2, LIMIT).tolist() for _ in range(2)]

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.saved += self.contents.execute()
        for checkpoint in self.cache.checkpoints():
            self.contents.check_checkpoint(checkpoint)
        SEEN["evicted"] += sum(self.cache.counters.evicted.values())
        SEEN["no_room"] += self.cache.counters.no_room
        for run in self.runs:
            self.cache.release(run.lease)
        for checkpoint in list(self.cache.checkpoints()):
            self.cache.discard(checkpoint, "aborted")
        audit(self.cache, [])
        assert self.cache.free == self.cache.spec.frames

    def finish(self, verb: str) -> None:
        """After every verb: the books balance."""
        SEEN[verb] += 1
        audit(self.cache, [run.lease for run in self.runs])
        live = {c.id for c in self.cache.checkpoints() if not c.doomed}
        self.known = {key: c for key, c in self.known.items() if c.id in live}
        assert len(self.known) == len(live)
        self.check_spared(verb)

    def check_spared(self, verb: str) -> None:
        """What was spared before this verb was not evicted while something else could be."""
        shelf = self.cache.shelf
        gone = [c for c in self.spared if c.state is State.DROPPED and not c.doomed]
        if gone and verb not in ("discard", "reset") and not self.by_anchor:
            spared = {c.id for c in self.spared}
            left = [c.id for c in shelf.evictable.values() if c.id not in spared]
            assert not left, f"{[c.id for c in gone]} went before {left}"
        self.by_anchor = False
        ids = shelf.spared()
        SEEN["spared"] += len(ids)
        self.spared = [shelf.live[key] for key in sorted(ids)]

    @precondition(lambda self: len(self.runs) < 4)
    @rule(root=st.sampled_from(ROOTS), trunk=st.integers(0, 1), cut=SMALL, tail=SMALL, cap=SMALL)
    def begin(self, root: object, trunk: int, cut: int, tail: int, cap: int) -> None:
        """A new request; what is found for it is what a search of all sequences finds."""
        self.admit(root, trunk, cut, tail, cap if cap % 3 == 2 else None)

    def admit(self, root: object, trunk: int, cut: int, tail: int, limit: int | None) -> Run:
        tokens = self.trunks[trunk][: cut % LIMIT] + [tail >> n & 1 for n in range(6)] * 8
        prompt = tokens[:LIMIT]
        match = self.cache.match(root, np.array(prompt, np.int32), limit)
        self.check_match(root, prompt, len(prompt) if limit is None else limit)
        origin = match.checkpoint
        lease = self.cache.lease(root, origin, self.now)
        run = Run(lease, prompt, lease.rows, lease.rows)
        if origin is not None:
            self.contents.check_checkpoint(origin)
            SEEN["restored"] += 1
        self.contents.bind(run)
        self.contents.check_run(run)
        self.runs.append(run)
        self.finish("begin")
        return run

    @precondition(lambda self: len(self.runs) < 3)
    @rule(root=st.sampled_from(ROOTS), trunk=st.integers(0, 1), cut=SMALL, tail=SMALL)
    def complete(self, root: object, trunk: int, cut: int, tail: int) -> None:
        """A request from its first step to its end, beside whatever else runs."""
        run = self.admit(root, trunk, cut, tail, None)
        number = self.runs.index(run)
        for more in (cut % 7, 20):
            self.extend(number, more, 1, False)
            self.seal(number, 0, Kind.PROMPT, float(tail % 2))
            self.step(True)
        while self.saved:
            self.commit(0, tail % 8 > 0)
        self.release(number)

    def check_match(self, root: object, prompt: list[int], limit: int) -> None:
        shared, best, pending = 0, None, None
        for (owner, tokens), checkpoint in self.known.items():
            if owner != root:
                continue
            pairs = zip(tokens, prompt, strict=False)
            common = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
            common = min(len(tokens), len(prompt)) if common is None else common
            shared = max(shared, common)
            if common < len(tokens) or len(tokens) > limit:
                continue
            if checkpoint.state is State.PUBLISHED:
                best = checkpoint if best is None or checkpoint.at > best.at else best
            else:
                pending = checkpoint if pending is None or checkpoint.at > pending.at else pending
        if pending is not None and best is not None and pending.at < best.at:
            pending = None
        match = self.cache.match(root, np.array(prompt, np.int32), limit)
        assert (match.checkpoint, match.known, match.pending) == (best, shared, pending)
        assert (match.lost == "") == (0 < min(shared, limit) <= match.at)

    def pick(self, number: int) -> Run | None:
        return self.runs[number % len(self.runs)] if self.runs else None

    @precondition(lambda self: self.runs)
    @rule(number=SMALL, more=st.integers(0, 20), part=SMALL, planned=st.booleans(), right=SMALL)
    def extend(self, number: int, more: int, part: int, planned: bool, right: int = 0) -> None:
        """Rows for one more work, with any legal anchor; or nothing changes."""
        run = self.pick(number)
        if run is None or self.contents.busy(run):
            return
        lease, chunk = run.lease, self.cache.spec.chunk
        end = min(run.done + more, LIMIT - 3)
        choices = range(lease.anchor, end + 1, chunk)
        # The highest anchor, mostly: that is what a prefill leaves behind.
        anchor = choices[-1] if part % 3 else choices[part % len(choices)]
        old = (lease.rows, lease.anchor, lease.anchor_frames, dict(lease.pages), lease.retired[:])
        free = self.cache.free
        drafts = self.cache.spec.drafts if lease.rows <= end and end + 6 < LIMIT else 0
        accepted = right % (drafts + 1)
        SEEN["accepted"] += accepted
        extension, refusal = self.contents.plan(run, end, anchor, self.now, drafts, accepted)
        if refusal is not None:
            now = (lease.rows, lease.anchor, lease.anchor_frames, lease.pages, lease.retired)
            assert old == now
            assert refusal.needed > refusal.free >= free
            self.finish("out_of_frames")
            return
        assert extension is not None
        assert bool(extension.advance_frames) == (
            anchor > old[1] and self.cache.spec.anchor_frames > 0
        )
        SEEN["copies"] += len(extension.copies)
        if planned:
            self.settle_steps(False)
        self.finish("extend")

    @precondition(lambda self: self.runs)
    @rule(
        number=SMALL,
        back=SMALL,
        kind=st.sampled_from(list(Kind)),
        ttl_s=st.sampled_from([0.0, 0.0, 3.0, 30.0]),
    )
    def seal(self, number: int, back: int, kind: Kind, ttl_s: float) -> None:
        """Seals wherever the anchor is right never miss a page; a refusal is counted."""
        run = self.pick(number)
        if run is None:
            return
        at = run.done - (back % 8 if back >= 32 else 0)
        lease, counters = run.lease, self.cache.counters
        before = (sum(counters.discarded.values()), counters.duplicate, counters.no_room)
        holes = counters.discards("window_hole")
        key = (lease.root, tuple(run.tokens[: max(at, 0)]))
        known = self.known.get(key)
        checkpoint = self.cache.seal(lease, run.array(), at, kind, self.now, ttl_s)
        after = (sum(counters.discarded.values()), counters.duplicate, counters.no_room)
        if checkpoint is None:
            assert sum(after) == sum(before) + 1
            hole = counters.discards("window_hole") > holes
            origin = lease.origin.at if lease.origin else 0
            assert not (hole and at >= origin), "a boundary past the origin lacks its window"
            assert (counters.duplicate > before[1]) <= (known is not None)
            self.finish("not_sealed")
            return
        assert known is None
        assert before == after
        self.known[key] = checkpoint
        self.contents.save(checkpoint, run)
        run.sealed = max(run.sealed, at)
        self.finish("seal")

    @precondition(lambda self: self.contents.works or self.contents.saves or self.contents.loads)
    @rule(settled=st.booleans())
    def step(self, settled: bool) -> None:
        self.settle_steps(settled)
        self.finish("step")

    def settle_steps(self, settled: bool) -> None:
        """Execute the plan; with overlap its references are dropped only later."""
        self.now += 1
        self.cache.tick(float(self.now))
        self.saved += self.contents.execute()
        if settled:
            for run in self.runs:
                self.cache.settle(run.lease)

    @precondition(lambda self: self.saved)
    @rule(number=SMALL, good=st.sampled_from([True, True, False]))
    def commit(self, number: int, good: bool) -> None:
        """The result of a step arrives: publish, or discard what is not finite."""
        checkpoint = self.saved.pop(number % len(self.saved))
        if checkpoint.state is not State.SEALED:
            return
        if good:
            self.cache.publish(checkpoint, self.now)
        else:
            self.cache.discard(checkpoint, "not_finite")
        self.finish("publish" if good else "discard")

    @precondition(lambda self: self.runs)
    @rule(number=SMALL, back=st.integers(1, 6), tail=SMALL)
    def reject(self, number: int, back: int, tail: int) -> None:
        """Drafts are rejected: rows above no boundary and above the anchor are written again."""
        run = self.pick(number)
        if run is None or self.contents.busy(run) or not run.done:
            return
        keep = max(run.done - back, run.lease.anchor, run.sealed)
        run.replace_tail(keep, ([tail >> n & 1 for n in range(6)] * 9)[: LIMIT - keep])
        run.done = keep
        self.finish("reject")

    @precondition(lambda self: self.runs)
    @rule(number=SMALL)
    def release(self, number: int) -> None:
        run = self.pick(number)
        if run is None or self.contents.busy(run):
            return
        self.contents.check_run(run)
        self.cache.release(run.lease)
        self.runs.remove(run)
        self.finish("release")

    @precondition(lambda self: self.cache.shelf.live)
    @rule(number=SMALL, up=st.booleans())
    def protect(self, number: int, up: bool) -> None:
        live = list(self.cache.checkpoints())
        checkpoint = live[number % len(live)]
        if up and checkpoint.protected < 2:
            self.cache.protect(checkpoint)
        elif checkpoint.protected:
            self.cache.unprotect(checkpoint)
        self.finish("protect")

    @rule(root=st.sampled_from([None, *ROOTS]), number=SMALL)
    def reset(self, root: object, number: int) -> None:
        if number % 16 != 11:
            return
        due = [
            c
            for c in self.cache.checkpoints()
            if c.state is State.PUBLISHED and root in (None, c.root)
        ]
        assert self.cache.reset(root) == len(due)
        self.finish("reset")


class TestCacheMachine(CacheMachine.TestCase):  # type: ignore[misc, name-defined]
    settings = settings(PROFILE, max_examples=EXAMPLES, stateful_step_count=STEPS)

    def runTest(self):
        """Every verb ran often, and 50,000 in all."""
        super().runTest()
        print(dict(SEEN))
        verbs = {verb: times for verb, times in SEEN.items() if verb not in EFFECTS}
        assert sum(verbs.values()) >= 50_000
        assert min(verbs.values()) > 100
        assert len(verbs) == 12
        assert min(SEEN[effect] for effect in ("copies", "restored", "evicted", "accepted")) > 300
        assert SEEN["no_room"]
        assert SEEN["spared"] > 300
