"""What is kept: the grid of aligned states, junctions, boundaries inside an answer."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from engine.harness import Harness, Reply
from engine.real import Real, tiny
from engine.real import stream as real_stream
from fake_device import oracle, small_spec
from merestone.core.checkpoint import Kind
from merestone.core.policy import _SPECIFIC


def stream(count: int, key: int) -> list[int]:
    rng = random.Random(key)
    return [key % 50] + [rng.randrange(50) for _ in range(count - 1)]


def kept(h: Harness) -> list[tuple[int, str]]:
    return sorted((c.at, str(c.kind)) for c in h.cache.checkpoints())


# -- aligned:N ----------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [8, 13, 64])
def test_aligned_states_lie_at_the_grid_in_prompt_and_answer(budget: int) -> None:
    h = Harness(small_spec(frames=300), budget=budget, retention="aligned:16")
    h.ask(stream(37, 1), 30, boundaries=((20, "mark"),))
    assert kept(h) == [(16, "aligned"), (32, "aligned"), (48, "aligned"), (64, "aligned")]
    for checkpoint in h.cache.checkpoints():
        assert checkpoint.anchor == checkpoint.at
        assert not checkpoint.pages["open"][1].size, "a state with a tail"


def test_aligned_states_are_resumed_from() -> None:
    h = Harness(small_spec(frames=300), retention="aligned:16")
    prompt = stream(37, 1)
    answer = h.ask(prompt, 30).ids()
    assert h.ask(prompt, 4).restored == 32
    assert h.ask([*prompt, *answer, 1, 2], 4).restored == 64
    exact = h.ask(prompt[:32], 3)
    assert (exact.restored, exact.finished().cache.kind) == (32, "aligned")


@pytest.mark.parametrize("accuracy", [0.6, 1.0])
def test_aligned_states_lie_at_the_grid_with_drafts_too(accuracy: float) -> None:
    """Wherever a block of accepted drafts ended: on a multiple, or beyond. Only that of the very
    last block has no pass after it that would leave its anchor."""
    for length in range(8, 17):
        h = Harness(small_spec(300, drafts=3), retention="aligned:8", accuracy=accuracy)
        h.ask(stream(length, 1), 30)
        wanted, found = list(range(8, length + 30, 8)), [at for at, _ in kept(h)]
        assert all(c.anchor == c.at for c in h.cache.checkpoints())
        assert found == wanted or found == [at for at in wanted if at < length + 30 - 4]
        assert h.engine.counters["failed_steps"] == 0


def test_choices_meet_at_the_grid() -> None:
    h = Harness(small_spec(frames=300), retention="aligned:8")
    reply = h.send(stream(20, 1), 5, n=3, cache=False)
    h.drain()
    assert [reply.ids(c) for c in range(3)] == [oracle(stream(20, 1), 5, c) for c in range(3)]
    assert sorted(reply.finished(c).cache.restored for c in range(3)) == [0, 16, 16]


def test_aligned_leaves_no_state_off_the_grid_when_cut_off_or_preempted() -> None:
    h = Harness(small_spec(frames=300), slots=1, budget=16, retention="aligned:16")
    h.send(stream(60, 1), 5)
    h.step(2)
    first = h.send(stream(9, 2), 5, priority=-1)  # takes the slot
    h.step(3)
    h.engine.abort("r1")
    h.drain()
    assert first.ids() == oracle(stream(9, 2), 5)
    assert kept(h)
    assert all(at % 16 == 0 for at, _ in kept(h))


def test_aligned_states_of_a_real_model_change_no_answer() -> None:
    real = Real(tiny(), retention="aligned:64", token_budget=100)
    assert real.engine.info.smallest_reusable == 64
    prompt = real_stream(150, 3)
    first = real.ask(prompt, 50)
    assert real.check(prompt, first).cache.restored == 0
    longer = prompt + tuple(first.ids()) + real_stream(9, 4)
    assert real.check(longer, real.ask(longer, 6)).cache.restored == 192
    exact = prompt[:128]
    assert real.check(exact, real.ask(exact, 6)).cache.restored == 128
    assert all(c.at % 64 == 0 == c.pages["open"][1].size for c in real.engine.cache.checkpoints())


# -- junctions ----------------------------------------------------------------------------------


def test_the_first_divergence_seals_a_junction_and_the_next_one_hits() -> None:
    h = Harness(small_spec(frames=300))
    shared = stream(41, 1)
    h.ask(shared + stream(20, 2), 4)
    second = h.ask(shared + stream(20, 3), 4)
    assert (second.restored, second.finished().cache.lost) == (0, "no_boundary")
    assert (41, "junction") in kept(h)
    third = h.ask(shared + stream(20, 4), 4)
    assert (third.restored, third.finished().cache.kind) == (41, "junction")


@pytest.mark.parametrize("distance", [7, 8])
def test_no_junction_within_a_chunk_of_a_boundary(distance: int) -> None:
    h = Harness(small_spec(frames=300))
    shared = stream(41, 1)
    boundary = ((41 - distance, "instruction"),)
    for key in (2, 3):
        h.ask(shared + stream(20, key), 4, boundaries=boundary)
    assert ((41, "junction") in kept(h)) == (distance >= h.spec.chunk)


def test_no_junction_where_the_prompt_only_goes_on() -> None:
    h = Harness(small_spec(frames=300))
    prompt = stream(41, 1)
    h.ask(prompt, 9)
    h.ask(prompt[:30], 4)  # known to its last token: its own end is a boundary
    assert {kind for _, kind in kept(h)} == {"prompt", "response"}


# -- inside an answer ---------------------------------------------------------------------------


def test_a_boundary_behind_a_token_of_the_answer() -> None:
    h = Harness(small_spec(frames=300))
    prompt = stream(21, 1)
    answer = oracle(prompt, 12)
    end = answer.index(answer[4]) + 1
    h.ask(prompt, 12, ends=((answer[4], "reasoning"),))
    assert (21 + end, "reasoning") in kept(h)
    again = h.ask([*prompt, *answer[:end], 1, 2], 3)
    assert (again.restored, again.finished().cache.kind) == (21 + end, "reasoning")


def test_kinds_are_those_that_the_policy_ranks() -> None:
    assert set(_SPECIFIC) == set(Kind)


# -- what a response says -----------------------------------------------------------------------


def account(reply: Reply) -> tuple[int, int, str, int]:
    end = reply.finished()
    assert end is not None
    return end.cache.matched, end.cache.restored, end.cache.lost, end.cache.written


def test_written_is_what_the_next_request_can_resume_from() -> None:
    h = Harness(small_spec(frames=300))
    prompt = stream(41, 1)
    assert account(h.ask(prompt, 4)) == (0, 0, "unknown", 41)
    assert account(h.ask(prompt, 4)) == (41, 41, "", 0)
    assert account(h.ask([*prompt, *stream(9, 2)], 4)) == (41, 41, "", 9)


def test_evicted_boundaries_are_named() -> None:
    h = Harness(small_spec(frames=60))
    prompt = stream(41, 1)
    h.ask(prompt, 4)
    for key in range(2, 12):
        h.ask(stream(41, key), 4)
    matched, restored, lost, _ = account(h.ask(prompt, 4))
    assert (matched, restored, lost) == (41, 0, "evicted")
    assert h.cache.counters.evicted["prompt"] > 0


@pytest.mark.parametrize(("reason", "lost"), [("as asked for", "no_boundary"), ("a store", "gate")])
def test_off_the_grid_the_gate_is_named_if_it_chose_the_grid(reason: str, lost: str) -> None:
    h = Harness(small_spec(frames=300), retention="aligned:16", reason=reason)
    prompt = stream(100, 2)
    assert account(h.ask(prompt, 4)) == (0, 0, "unknown", 96)
    assert account(h.ask([*prompt[:92], 8, 8], 4))[:3] == (92, 80, lost)
    assert account(h.ask([*prompt[:10], 8, 8], 4))[:3] == (10, 0, "too_short")
    assert account(h.ask(prompt[:96], 4))[:3] == (96, 96, "")


@pytest.mark.parametrize("known", [0, 5])
@pytest.mark.parametrize("retention", ["boundaries", "aligned:16"])
def test_another_salt_changes_nothing_but_the_word_for_it(known: int, retention: str) -> None:
    """What this salt knows of the prompt is said as if the other one were not there."""
    prompt, reports = stream(41, 1), []
    for other in (False, True):
        h = Harness(small_spec(frames=300), retention=retention)
        h.ask([*prompt[:known], *stream(41, 2)], 4, salt="mine")
        if other:
            h.ask(prompt, 4, salt="theirs")
        end = h.ask(prompt, 4, salt="mine").finished()
        assert end is not None
        reports.append(end.cache)
    assert (reports[0].matched, reports[0].elsewhere) == (known, False)
    assert reports[1] == replace(reports[0], elsewhere=True)


def test_marks_with_a_time_to_live_survive_what_fills_the_pool() -> None:
    h = Harness(small_spec(frames=90))
    prompt = stream(33, 1)
    for lives, kept in (((), 0), (((20, 1000.0),), 20)):
        salt = f"lives {kept}"
        h.ask(prompt, 2, salt=salt, boundaries=((20, "mark"),), lives=lives)
        for key in range(2, 14):
            h.ask(stream(41, key), 4)
        assert h.ask([*prompt[:20], 7, 7], 2, salt=salt).restored == kept
