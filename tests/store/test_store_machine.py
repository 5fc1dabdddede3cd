"""Random requests over an engine with stores: answers are the oracle's, whatever stores do.

The double checks every row that is read, the audit every count, after every step. Replicas come
and go over the same vaults; tiers fail, lose and damage what they hold.
"""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from engine.test_state_machine import SETTINGS
from fake_device import oracle, small_spec
from store.storing import StoringHarness, Vault

HEADS = [[random.Random(key).randrange(3) for _ in range(60)] for key in range(3)]
SEEN: Counter[str] = Counter()


class StoreMachine(RuleBasedStateMachine):
    @initialize(
        frames=st.integers(20, 90),
        chunk=st.sampled_from([4, 8]),
        page=st.sampled_from([2, 4, 16]),
        open_page=st.sampled_from([1, 2, 4]),
        anchor_frames=st.integers(1, 3),
        slots=st.integers(1, 4),
        budget=st.integers(4, 40),
        drafts=st.sampled_from([0, 0, 3]),
        tiers=st.sampled_from([("disk",), ("memory", "disk"), ("net",), ("disk", "net")]),
        bytes_=st.sampled_from([9000, 30000, None]),
        ranks=st.sampled_from([1, 2]),
        seed=st.integers(0, 99),
    )
    def build(self, frames, slots, budget, drafts, tiers, bytes_, ranks, seed, **sizes):
        spec = small_spec(frames * (1 + (drafts > 0)), drafts=drafts, **sizes)
        self.vaults = [Vault(name) for name in tiers]
        self.options = {
            "budgets": (bytes_,) * len(tiers), "shared": frozenset({"net"}), "ranks": ranks,
            "seed": seed, "slots": slots, "budget": budget, "accuracy": 0.7,
        }  # fmt: skip
        self.spec = spec
        self.sent = []
        self.aborted: set[str] = set()
        self.failures = 0
        self.h = StoringHarness(self.spec, self.vaults, **self.options)

    @rule(
        head=st.sampled_from(HEADS),
        cut=st.integers(1, 60),
        tail=st.lists(st.integers(0, 2), max_size=8),
        outputs=st.integers(1, 12),
        marks=st.lists(st.integers(1, 60), max_size=2),
        n=st.sampled_from([1, 1, 1, 2]),
        cache=st.sampled_from([True, True, True, False]),
        salt=st.sampled_from(["", "", "x"]),
        priority=st.integers(0, 1),
    )
    def send(self, head, cut, tail, outputs, marks, n, cache, salt, priority):
        limit = self.h.engine.info.context_limit
        tokens = (head[:cut] + tail)[: max(1, limit - outputs)]
        if len(tokens) + outputs > limit:
            return
        name = f"s{len(self.sent)}"
        reply = self.h.send(
            tokens, outputs, id=name, n=n, cache=cache, salt=salt, priority=priority,
            boundaries=tuple((m, "mark") for m in sorted(marks) if m <= len(tokens)),
        )  # fmt: skip
        self.sent.append((name, tokens, outputs, n, reply))

    @rule(count=st.integers(1, 15))
    def step(self, count):
        self.h.step(count)

    @rule(data=st.data())
    def abort(self, data):
        if self.sent:
            name = data.draw(st.sampled_from([s[0] for s in self.sent]))
            self.aborted.add(name)
            self.h.engine.abort(name)

    @rule(everything=st.sampled_from([False, False, False, True]))
    def reset(self, everything):
        if everything:
            self.h.engine.reset_cache()
        else:
            self.h.cache.reset()  # stores are what is left
        self.h.audit()

    @rule(number=st.integers(0, 99), more=st.booleans())
    def come_back(self, number, more):
        """Memory has forgotten; an earlier request is said again, or goes on."""
        for vault in self.vaults:
            vault.fault = ""
        self.h.drain(20000)
        self.h.cache.reset()
        if self.sent:
            _name, tokens, outputs, _, reply = self.sent[number % len(self.sent)]
            tokens = tokens + ([*reply.ids(), 1] if more else [])
            if len(tokens) + outputs <= self.h.engine.info.context_limit:
                again = self.h.send(tokens, outputs, id=f"s{len(self.sent)}")
                self.sent.append((f"s{len(self.sent)}", tokens, outputs, 1, again))

    @rule()
    def fail_a_step(self):
        if not self.h.device.fail_next and self.failures < 2:
            self.failures += 1
            self.h.device.fail_next = True

    @rule(which=st.integers(0, 1), fault=st.sampled_from(["", "", "", "", "full", "unreachable"]))
    def break_tier(self, which, fault):
        self.vaults[which % len(self.vaults)].fault = fault

    @rule(which=st.integers(0, 1), number=st.integers(0, 5), how=st.sampled_from(["lose", "flip"]))
    def damage(self, which, number, how):
        cells = self.vaults[which % len(self.vaults)].cells
        for address in sorted(cells)[number::6]:
            if how == "lose":
                del cells[address]
            else:
                cells[address] = {"damaged": number}
        self.damaged = True
        SEEN["damage"] += 1

    @rule()
    def another_replica(self):
        """The engine goes, at rest; another one comes to the same vaults."""
        self.settle()
        self.h = StoringHarness(self.spec, self.vaults, **self.options)

    def settle(self) -> None:
        device = self.h.device
        lost = self.failures - int(device.fail_next)
        device.fail_next = False
        for vault in self.vaults:
            vault.fault = ""
        self.h.drain(20000)
        self.failures = 0
        assert self.h.engine.counters["failed_steps"] == lost
        for name, tokens, outputs, n, reply in self.sent:
            for choice in range(n):
                end = reply.finished(choice)
                assert end is not None, f"{name} never ended"
                wanted, got = oracle(tokens, outputs, choice), reply.ids(choice)
                assert got == wanted[: len(got)], (name, choice, end.reason)
                if end.reason == "length":
                    assert got == wanted
                else:
                    assert end.reason == "error" or name in self.aborted
        self.sent.clear()
        stats = self.h.stores.stats()
        SEEN.update({reason: int(count) for reason, count in stats["store_missed"].items()})
        SEEN["imported"] += int(stats["store_imported"])
        SEEN["evicted"] += int(sum(stats["store_evicted"].values()))
        SEEN["written"] += int(sum(stats["store_written"].values()))
        assert not self.h.stores.holding
        assert not self.h.device.fetched
        if not getattr(self, "damaged", False):
            self.h.check_vaults()
        self.h.cache.reset()
        assert self.h.cache.free == self.h.spec.frames

    def teardown(self):
        if hasattr(self, "h"):
            self.settle()


class TestStores(StoreMachine.TestCase):  # type: ignore[misc, name-defined]
    settings = settings(SETTINGS, max_examples=120, stateful_step_count=30)

    def runTest(self):
        super().runTest()
        # What the machine is there for has happened.
        missing = [name for name in ("imported", "written", "damage") if not SEEN[name]]
        assert not missing, SEEN
