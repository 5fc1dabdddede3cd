"""Random requests, aborts, failures and resets against the device double.

After every step the audit re-derives each count, and the double checks every row that is read.
At the end each answer must be the oracle's, and only checkpoints may hold frames.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from engine.harness import Harness, Reply
from fake_device import oracle, small_spec
from merestone.core.audit import audit
from merestone.sched.plan import SamplingParams

MET: Counter[str] = Counter()
"""What the scheduler counted in the examples of a crowded pool."""
HEADS = [[random.Random(key).randrange(3) for _ in range(60)] for key in range(3)]


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        frames=st.integers(14, 90),
        chunk=st.sampled_from([4, 8]),
        page=st.sampled_from([2, 4, 16]),
        open_page=st.sampled_from([1, 2, 4]),
        anchor_frames=st.integers(1, 3),
        slots=st.integers(1, 4),
        budget=st.integers(4, 40),
        grid=st.sampled_from([0, 0, 1, 2]),
        drafts=st.sampled_from([0, 0, 1, 3]),
        accuracy=st.sampled_from([0.0, 0.6, 0.9, 1.0]),
        adaptive=st.booleans(),
        overlap=st.booleans(),
    )
    def build(
        self, slots, budget, grid, drafts, accuracy, adaptive, overlap, frames, chunk, **sizes
    ):
        # Two more groups, and pages for drafts: more frames.
        spec = small_spec(frames * (1 + (drafts > 0)), chunk, drafts=drafts, **sizes)
        self.begin(
            spec,
            slots=slots,
            budget=budget,
            retention=f"aligned:{grid * chunk}" if grid else "boundaries",
            accuracy=accuracy,
            adaptive=adaptive,
            overlap=overlap,
        )

    def begin(self, spec, **options):
        self.h = Harness(spec, **options)
        self.limit = self.h.engine.info.context_limit
        self.sent: dict[str, tuple[list[int], Callable[[int], list[int]], int, Reply]] = {}
        self.aborted: set[str] = set()
        self.failed = False

    @rule(
        head=st.sampled_from(HEADS),
        cut=st.integers(1, 60),
        tail=st.lists(st.integers(0, 2), max_size=8),
        outputs=st.integers(0, 20),
        stops=st.sampled_from([(), (), (1, 2, 3, 4), tuple(range(30))]),
        least=st.sampled_from([0, 0, 3]),
        scored=st.sampled_from([None, None, None, 0]),
        marks=st.lists(st.integers(1, 60), max_size=3),
        ends=st.sampled_from([(), (3, 17, 31)]),
        life=st.sampled_from([None, None, 0.02, 5.0]),
        n=st.sampled_from([1, 1, 1, 3]),
        cache=st.sampled_from([True, True, True, False]),
        salt=st.sampled_from(["", "", "x"]),
        priority=st.integers(0, 2),
    )
    def send(
        self,
        head,
        cut,
        tail,
        outputs,
        stops,
        least,
        scored,
        marks,
        ends,
        life,
        n,
        cache,
        salt,
        priority,
    ):
        self.ask(
            head[:cut] + tail,
            outputs,
            stops,
            least,
            n,
            marks,
            cache=cache,
            salt=salt,
            priority=priority,
            prompt_logprobs=scored,
            ends=tuple((token, "reasoning") for token in ends),
            life=life,
        )

    def ask(self, tokens, outputs, stops=(), least=0, n=1, marks=(), life=None, **options):
        """Send a request, as far as it fits, and remember what its answers are."""
        tokens = tokens[: max(1, self.limit - outputs)]
        if len(tokens) + outputs > self.limit:
            return
        marks = sorted({m for m in marks if m <= len(tokens)})
        name = f"s{len(self.sent)}"

        def answer(choice: int) -> list[int]:
            ids = oracle(tokens, outputs, choice)
            ends = [i + 1 for i, t in enumerate(ids) if t in stops and i + 1 >= least]
            return ids[: ends[0]] if ends else ids

        reply = self.h.send(
            tokens,
            outputs,
            id=name,
            n=n,
            stop_ids=stops,
            params=SamplingParams(min_tokens=least),
            boundaries=tuple((m, "mark") for m in marks),
            lives=tuple((m, life) for m in marks) if life else (),
            **options,
        )
        self.sent[name] = (tokens, answer, n, reply)

    @rule(count=st.integers(1, 12))
    def step(self, count):
        self.h.step(count)
        grid = self.h.engine.retention.grid
        for checkpoint in self.h.cache.checkpoints():
            assert not grid or checkpoint.at == checkpoint.anchor == checkpoint.at // grid * grid

    @rule(data=st.data())
    def abort(self, data):
        if self.sent:
            name = data.draw(st.sampled_from(sorted(self.sent)))
            self.aborted.add(name)
            self.h.engine.abort(name)

    @rule(data=st.data())
    def hang_up(self, data):
        """Its next event finds nobody: the request is dropped while a result is reported."""
        if self.sent:
            self.sent[data.draw(st.sampled_from(sorted(self.sent)))][3].gone = True

    @rule()
    def reset(self):
        self.h.cache.reset()
        self.h.audit()

    @rule()
    def bad_save(self):
        self.h.device.bad_saves = True

    @rule()
    def fail(self):
        if not self.failed:
            self.failed = True
            self.h.device.fail_next = True

    @rule(slot=st.integers(0, 3))
    def not_finite(self, slot):
        self.h.device.bad_slots = {slot}

    def teardown(self):
        if not hasattr(self, "h"):
            return
        lost = int(self.failed and not self.h.device.fail_next)
        self.h.device.fail_next = False
        self.h.device.bad_slots = set()
        self.h.drain(20000)
        # What the double finds wrong fails a step too: none but the injected one may have.
        assert self.h.engine.counters["failed_steps"] == lost
        # No boundary is asked for where no state can be.
        for reason in ("empty", "not_computed", "anchor_elsewhere", "window_hole"):
            assert self.h.cache.counters.discards(reason) == 0, reason
        for name, (_, answer, n, reply) in self.sent.items():
            for choice in range(n):
                end = reply.finished(choice)
                wanted = answer(choice)
                got = reply.ids(choice)
                if end is None and reply.gone:
                    assert got == wanted[: len(got)]
                    continue
                assert end is not None, f"{name} never ended"
                assert got == wanted[: len(got)], (name, choice, end.reason)
                if end.reason in ("length", "stop"):
                    assert got == wanted
                else:
                    assert end.reason == "error" or name in self.aborted
        assert not self.h.scheduler.running
        audit(self.h.cache, [])
        self.h.cache.reset()
        assert self.h.cache.free == self.h.spec.frames


class CrowdedMachine(EngineMachine):
    """A pool that holds the prompts of all who run, and not their answers: somebody makes way."""

    @initialize(
        frames=st.integers(16, 30),
        chunk=st.sampled_from([4, 8]),
        page=st.sampled_from([2, 4]),
        open_page=st.sampled_from([1, 2]),
        anchor_frames=st.integers(1, 2),
        slots=st.integers(3, 4),
        budget=st.integers(6, 40),
        drafts=st.sampled_from([0, 0, 1, 3]),
        overlap=st.booleans(),
        tails=st.lists(st.integers(0, 2), min_size=3, max_size=6),
    )
    def build(self, frames, chunk, slots, budget, drafts, overlap, tails, **sizes):
        spec = small_spec(frames * (1 + (drafts > 0)), chunk, drafts=drafts, **sizes)
        self.begin(spec, slots=slots, budget=budget, accuracy=0.9, overlap=overlap)
        for key, priority in enumerate(tails):
            outputs = max(1, self.limit - 7)
            self.ask([key, *HEADS[0][: 3 * priority]], outputs, priority=priority)

    @rule(
        head=st.sampled_from(HEADS),
        cut=st.integers(1, 12),
        outputs=st.integers(20, 60),
        priorities=st.lists(st.integers(0, 2), min_size=3, max_size=4),
        salt=st.sampled_from(["", "x"]),
    )
    def crowd(self, head, cut, outputs, priorities, salt):
        for key, priority in enumerate(priorities):
            tokens = [*head[:cut], key]
            fits = max(1, min(outputs, self.limit - len(tokens)))
            self.ask(tokens, fits, priority=priority, salt=salt)
            self.h.step()

    def teardown(self):
        super().teardown()
        if hasattr(self, "h"):
            MET.update(self.h.scheduler.counters)


SETTINGS = settings(
    max_examples=200,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
TestEngine = EngineMachine.TestCase
TestEngine.settings = SETTINGS


class TestCrowded(CrowdedMachine.TestCase):  # type: ignore[misc, name-defined]
    settings = settings(SETTINGS, max_examples=80)

    def runTest(self):
        super().runTest()
        assert MET["preemptions"] > 10, "the pool was not crowded"
