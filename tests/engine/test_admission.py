"""Who starts, who makes way and who gets which rows of a step, on the device double."""

from __future__ import annotations

import pytest

from engine.harness import Harness
from engine.test_scenarios import stream
from fake_device import oracle, small_spec


def test_who_has_no_rows_makes_way_before_who_decodes() -> None:
    """Whatever their priorities: it loses nothing."""
    h = Harness(small_spec(frames=900), slots=3, budget=17)  # one row, and two chunks
    h.send(stream(9, 1), 60, priority=3, id="decodes")
    h.step(2)
    h.send(stream(300, 2), 2, priority=1, id="long")
    h.step()
    h.send(stream(50, 3), 2, priority=2, id="idle")
    h.step()
    h.send(stream(4, 4), 9, id="urgent")
    h.step()
    assert {seq.id for seq in h.scheduler.running} == {"decodes", "long", "urgent"}


def test_a_match_waits_for_frames_that_a_seal_is_about_to_free() -> None:
    """Nothing runs, but the last answer's state is published only with the next result."""
    h = Harness(small_spec(frames=60), slots=1, budget=64)
    h.ask(stream(24, 1), 1)
    h.send(stream(94, 2), 6)
    h.step(3)
    reply = h.send([*stream(24, 1), *stream(76, 3)], 2)
    h.drain()
    assert reply.restored == 24


def test_a_prompt_as_long_as_the_context_is_told_what_it_really_lost() -> None:
    """It fits alone, whatever others had left or wait for."""
    h = Harness(small_spec(frames=60), slots=1, budget=64)
    limit = h.cache.capacity()
    h.ask(stream(24, 1), 0)
    h.ask(stream(24, 2), 0)
    prompt = [*stream(24, 1)[:12], *stream(limit - 12, 3)]
    whole = h.send(prompt, 0)
    after = [h.send([*stream(24, key), 7], 2) for key in (1, 2)]
    h.drain()
    end = whole.finished()
    assert end is not None
    assert (end.cache.matched, end.cache.lost) == (12, "no_boundary")
    assert all(len(reply.ids()) == 2 for reply in after)


def test_prompts_that_do_not_fit_together_do_not_start_together() -> None:
    """Each would fit alone: the second one waits, instead of being preempted by the first."""
    h = Harness(small_spec(frames=60), slots=4, budget=16)
    assert h.cache.frames_needed(70) <= 60 < 2 * h.cache.frames_needed(50)
    replies = [h.send(stream(50, key), 2) for key in range(3)]
    h.step()
    assert len(h.scheduler.running) == 1
    h.drain()
    assert h.scheduler.counters["preemptions"] == 0
    assert [len(reply.ids()) for reply in replies] == [2] * 3


@pytest.mark.parametrize(
    ("shorts", "rows"),
    [((5, 8), [16, 1, 1, 5, 8, 7]), ((8, 8, 8), [16, 1, 1, 8, 8, 2, 2])],
)
def test_the_rows_of_a_step_are_shared_out(shorts: tuple[int, ...], rows: list[int]) -> None:
    """The first in rank leaves the decodes theirs, and up to half of all to short prefills."""
    h = Harness(small_spec(frames=900), slots=8, budget=38)
    h.ask(stream(30, 1), 1)
    for key in (2, 3):
        h.send(stream(9, key), 60, priority=1)
    h.step(3)
    h.send(stream(400, 4), 2)
    h.send(stream(400, 5), 2, priority=2)
    for key, count in enumerate(shorts, 10):
        h.send([*stream(30, 1), key, *stream(count - 1, key)], 2, priority=key)
    h.step()
    assert [work.end - work.start for work in h.device.plans[-1].works] == rows


def test_what_nobody_can_find_is_not_sealed() -> None:
    """Neither on its way nor where it ends or is cut off; only to go on from where it made way."""
    h = Harness(small_spec(frames=200), slots=1)
    h.ask(stream(40, 1), 6, cache=False, boundaries=((20, "turn"),))
    h.send(stream(40, 2), 30, cache=False, priority=5)
    h.step(5)
    urgent = h.send(stream(9, 3), 1, cache=False)
    h.step(3)
    assert urgent.finished() is not None
    assert h.scheduler.counters["preemptions"] == 1
    h.step(3)
    h.engine.abort("r2")
    h.drain()
    assert h.cache.counters.sealed == {"aligned": 1}


def test_written_counts_boundaries_of_the_prompt_alone() -> None:
    """Not those behind tokens of the answer, though they are kept as well."""
    h, prompt = Harness(small_spec(frames=200)), stream(20, 1)
    reply = h.ask(prompt, 8, ends=((oracle(prompt, 8)[2], "turn"),))
    assert 23 in {c.at for c in h.cache.checkpoints()}
    assert reply.finished().cache.written == 20
