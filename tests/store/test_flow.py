"""How exports and imports share steps with requests, over the device double."""

from __future__ import annotations

import random

import pytest

from fake_device import oracle, small_spec
from merestone.core.orders import Export, Import
from merestone.sched.plan import StepPlan
from merestone.store.desk import StoreSettings
from merestone.store.fetches import Stage
from merestone.store.manifest import decode
from store.storing import StoringHarness, Vault

PROMPT = [(7 * n) % 11 for n in range(40)]


def harness(*vaults: Vault, frames: int = 80, **options) -> StoringHarness:
    return StoringHarness(small_spec(frames), list(vaults), **options)


def kept() -> Vault:
    """A vault that has ``PROMPT`` and its answer."""
    vault = Vault("disk")
    first = harness(vault)
    first.ask(PROMPT, 4)
    first.check_vaults()
    return vault


def test_a_store_that_holds_only_the_attention_part_serves_nothing() -> None:
    vault = kept()
    groups = {"full"}
    for address, cells in list(vault.cells.items()):
        if not any(isinstance(key, tuple) and key[0] in groups for key in cells):
            del vault.cells[address]
    reply = harness(vault).ask(PROMPT, 4)
    assert (reply.restored, reply.finished().cache.lost) == (0, "store_missing")


def test_another_configuration_or_layout_of_ranks_finds_nothing() -> None:
    vault = kept()
    assert harness(vault, ranks=2).ask(PROMPT, 4).restored == 0
    assert harness(vault).ask(PROMPT, 4).restored == 40


def test_a_request_waits_for_a_bounded_time_and_others_do_not_wait() -> None:
    vault = kept()
    h = harness(vault)
    h.device.reports_held = True
    waits = h.send(PROMPT, 4)
    h.step(2)
    other = h.send([1, 2, 3], 3)
    h.step(8)
    assert other.finished() is not None
    assert waits.finished() is None
    h.now += 1.5
    while waits.finished() is None:
        h.step()
    assert (waits.restored, waits.finished().cache.lost) == (0, "store_slow")
    h.device.reports_held = False
    h.drain()
    assert not h.device.fetched


def test_requests_that_want_the_same_share_one_import() -> None:
    vault = kept()
    h = harness(vault, slots=4)
    replies = [h.send(PROMPT, 4) for _ in range(4)]
    h.drain()
    assert [reply.restored for reply in replies] == [40] * 4
    assert h.stores.stats()["store_imported"] == 1


def test_an_import_shares_with_memory_only_what_is_complete_there() -> None:
    """Of 10 tokens two pages: the third has two rows of four, and their anchor is another."""
    vault = kept()
    h = harness(vault)
    h.ask(PROMPT[:10], 1)
    reply = h.send(PROMPT, 4)
    h.drain()
    assert (reply.restored, reply.ids()) == (40, oracle(PROMPT, 4))
    written = [s.part for p in h.device.plans for o in p.stores if isinstance(o, Import)
               for s in o.segments]  # fmt: skip
    assert sorted(written) == [*["anchor"] * 2, *["full"] * 8, "hidden"]


def test_what_is_one_requests_own_stays_out_of_stores() -> None:
    """Neither written nor asked for; nor is anything asked for one that may not start from it."""
    vault = Vault("net")
    h = harness(vault, shared=frozenset({"net"}))
    asked = []
    (desk,) = h.desks
    find = desk.clerk.find
    desk.clerk.find = lambda *call: (asked.append(call), find(*call))
    for choices in (1, 2):
        h.send(PROMPT, 30, cache=False, n=choices)
        h.drain()
    assert (vault.puts, vault.manifests, asked) == (0, {}, [])
    h.ask(PROMPT, 4, prompt_logprobs=0)
    assert vault.manifests
    assert not asked
    h.ask([*PROMPT[:30], 1, 2], 4)
    assert len(asked) == 1


def test_only_boundaries_of_the_kinds_chosen_are_written() -> None:
    """Not what an aborted prefill leaves, which only memory keeps."""
    vault = Vault("disk")
    h = harness(vault, budget=16)
    h.send(PROMPT, 4, id="cut")
    h.step(2)
    h.engine.abort("cut")
    h.drain()
    assert [str(c.kind) for c in h.cache.checkpoints()] == ["aligned"]
    assert not vault.manifests


def test_what_is_stored_is_not_written_again() -> None:
    h = harness(Vault("disk"))
    h.ask(PROMPT, 4, boundaries=((20, "turn"),))
    h.ask([*PROMPT, 1, 2, 3], 4)
    orders = [o for plan in h.device.plans for o in plan.stores if isinstance(o, Export)]
    addresses = [segment.address for order in orders for segment in order.segments]
    assert len(addresses) == len(set(addresses)) > 20


def test_a_reset_reaches_a_manifest_that_is_being_written() -> None:
    vault = Vault("disk")
    h = harness(vault)
    (desk,) = h.desks
    h.send(PROMPT, 30)
    while not desk.finishing:
        h.step()
    assert vault.manifests
    h.engine.reset_cache()
    h.engine.abort("r1")
    h.drain()
    h.check_vaults()
    assert not [m for a, m in vault.manifests.items() if decode(m, a).at == 40]


def test_the_export_of_what_memory_distrusts_ends() -> None:
    """Its frames may be anybody's by the next step."""
    vault = Vault("disk")
    h = harness(vault, settings=StoreSettings(step_bytes=1024))
    (desk,) = h.desks
    h.send(PROMPT, 4)
    while desk.job is None or len(desk.job.written) < 2:
        h.step()
    assert desk.job.todo
    assert vault.cells
    h.cache.discard(desk.job.checkpoint, "not_finite")
    h.engine.abort("r1")
    h.drain()
    h.check_vaults()
    assert (vault.manifests, vault.cells) == ({}, {}), "what was written of it is erased"
    assert h.stores.stats()["store_not_written"] == {"reset": 1}


def test_nothing_is_fetched_for_one_that_has_gone() -> None:
    h = harness(kept())
    h.device.reports_held = True
    h.send(PROMPT, 4)
    h.step(2)
    assert h.stores.fetches.reading
    h.engine.abort("r1")
    h.step(2)
    assert not h.stores.fetches.pending
    assert not h.device.fetched


def test_a_request_is_held_back_until_it_is_over_or_late() -> None:
    """Asked about it or not: a wait that nobody ends would keep the others from being unstuck."""
    h = harness(kept())
    h.device.reports_held = True
    h.send(PROMPT, 4)
    h.step(2)
    imports = h.stores.imports
    (visit,) = imports.visits.values()
    assert h.stores.holding
    imports.now = visit.deadline
    assert not h.stores.holding
    imports.now, visit.over = 0.0, True
    assert not h.stores.holding


def test_a_step_that_fails_with_the_last_of_an_import_publishes_nothing() -> None:
    h = harness(kept())
    reply = h.send(PROMPT, 4)
    fetches = h.stores.fetches.by_address
    while not any(f.stage is Stage.WRITING and len(f.todo) <= 3 for f in fetches.values()):
        h.step()
    h.device.fail_next = True
    h.step()
    assert h.engine.counters["failed_steps"] == 1
    assert not list(h.cache.checkpoints())
    h.drain()
    assert reply.ids() == oracle(PROMPT, 4)
    assert h.stores.stats()["store_missed"]["step_failed"] == 1


@pytest.mark.parametrize("lost", [False, True])
def test_what_a_lost_plan_had_ranks_forget_is_forgotten_with_the_next(lost: bool) -> None:
    """Else host memory holds what nobody will ask for, until the end."""
    h = harness(kept())
    h.device.reports_held = True
    h.send(PROMPT, 4)
    h.step(2)
    assert h.device.fetched
    h.engine.abort("r1")
    mate = h.send([6, 6, 6], 9)
    h.device.fail_next = lost
    h.step()
    assert bool(h.device.fetched) == lost
    h.device.reports_held = False
    h.drain()
    assert not h.device.fetched
    assert (mate.finished().reason == "error") == lost


def test_what_an_unreachable_tier_missed_is_written_later() -> None:
    vault = Vault("disk", fault="unreachable")
    h = harness(vault)
    h.ask(PROMPT, 4)
    assert not vault.manifests
    vault.fault = ""
    h.now += 60.0
    h.drain()
    assert len(vault.manifests) == 2
    assert h.stores.stats()["store_not_written"] == {}


def test_copies_of_a_step_are_bounded_both_ways() -> None:
    frame = 1024
    settings = StoreSettings(step_bytes=2 * frame, staging_bytes=4 * frame)
    vault = Vault("disk")
    h = harness(vault, settings=settings)
    running = h.send([1, 2], 60)
    h.ask(PROMPT, 4)
    assert running.finished() is not None
    plans = [p for p in h.device.plans if any(isinstance(o, Export) for o in p.stores)]
    assert len(plans) > 3
    assert max(segments(plan, Export) for plan in plans) == 2
    second = harness(vault, settings=settings)
    assert second.ask(PROMPT, 4).restored == 40
    assert max(segments(plan, Import) for plan in second.device.plans) == 2


def segments(plan: StepPlan, kind: type) -> int:
    return sum(len(order.segments) for order in plan.stores if isinstance(order, kind))


def test_a_tier_that_does_not_keep_up_costs_checkpoints_and_no_time() -> None:
    settings = StoreSettings(staging_bytes=2 * 1024, queue=3)
    vault = Vault("disk")
    h = harness(vault, settings=settings)
    h.device.reports_held = True
    for key in range(8):
        reply = h.send([key, 1, 2, 3], 3)
        for _ in range(200):
            h.step()
            if reply.finished():
                break
        assert reply.finished() is not None
    assert h.stores.stats()["store_not_written"]["queue_full"] >= 8
    copied = sum(segments(plan, Export) for plan in h.device.plans)
    assert copied <= 2, "more is staged than the bound"
    h.device.reports_held = False
    h.drain()
    h.check_vaults()


def test_restores_that_arrive_together_do_not_evict_each_other() -> None:
    """Six prompts are stored, memory is empty, and the pool holds about six."""
    vault = Vault("disk")
    prompts = [[key] * 4 + PROMPT[:20] for key in range(6)]
    first = harness(vault, frames=200)
    for prompt in prompts:
        first.ask(prompt, 2)
    need = first.cache.frames_needed(30)
    h = harness(vault, frames=6 * need, slots=4)
    replies = [h.send([*prompt, 9], 2) for prompt in prompts[:4]]
    h.drain()
    assert [reply.restored for reply in replies] == [24] * 4
    assert h.scheduler.counters["preemptions"] == 0


def test_three_hundred_requests_over_a_store_smaller_than_their_prefixes() -> None:
    vault = Vault("disk")
    h = harness(vault, frames=60, budgets=(50_000,))
    rng = random.Random(0)
    prefixes = [[key] * 3 + [rng.randrange(5) for _ in range(25)] for key in range(20)]
    for _ in range(300):
        prefix = rng.choice(prefixes)
        h.ask([*prefix, rng.randrange(5)], 2, boundaries=((len(prefix), "instruction"),))
    stats = h.stores.stats()
    assert stats["store_imported"] > 0
    assert stats["store_evicted"]["disk"] > 0
    assert h.engine.counters["failed_steps"] == 0
    h.check_vaults()


def test_two_hundred_chats_keep_the_budget() -> None:
    budget = 40_000
    vaults = [Vault("memory"), Vault("disk")]
    h = harness(*vaults, frames=60, budgets=(budget // 2, budget))
    rng = random.Random(1)
    for chat in range(200):
        history = [chat % 11, chat // 11, *(rng.randrange(5) for _ in range(12))]
        history += h.ask(history, 3).ids()
        for vault, limit in zip(vaults, (budget // 2, budget), strict=True):
            used = 100 * len(vault.cells) + sum(map(len, vault.manifests.values()))
            assert used <= 1.05 * limit
    h.check_vaults()
    assert min(h.stores.stats()["store_evicted"].values()) > 100


def test_imports_in_flight_are_bounded_and_each_comes() -> None:
    vault = Vault("disk")
    prompts = [[key] * 3 + PROMPT[:20] for key in range(5)]
    first = harness(vault, frames=300)
    for prompt in prompts:
        first.ask(prompt, 2)
    settings = StoreSettings(wait_s=60.0, staging_bytes=100)
    h = harness(vault, frames=300, settings=settings, slots=5)
    replies = [h.send(prompt, 2) for prompt in prompts]
    most = 0
    while not all(reply.finished() for reply in replies):
        h.step()
        most = max(most, len(h.stores.fetches.by_address))
    assert most == 1
    assert [reply.restored for reply in replies] == [23] * 5


def test_a_broken_answer_of_a_shared_tier_is_followed_by_the_next_best() -> None:
    vault = Vault("net")
    shared = frozenset({"net"})
    first = harness(vault, shared=shared)
    first.ask(PROMPT, 4, boundaries=((24, "mark"),))
    deepest = max((decode(m, a) for a, m in vault.manifests.items() if decode(m, a).at <= 40),
                  key=lambda manifest: manifest.at)  # fmt: skip
    del vault.cells[deepest.segments[-1].address]
    reply = harness(vault, shared=shared).ask(PROMPT, 4)
    assert (reply.restored, reply.finished().cache.lost) == (24, "store_missing")
