"""Attempts to break the engine's promises: each event at each step of a request's life.

The double tells right from wrong rows; a step that fails without having been told to is a finding.
"""

from __future__ import annotations

import math
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.harness import Harness, Reply, at_rest
from engine.real import Real, tiny
from engine.real import stream as real_stream
from engine.test_scenarios import stream
from fake_device import VOCAB, oracle, small_spec
from merestone.engine.api import EngineRefusal, Finished, GenerateRequest, TokenEvent
from merestone.ops.sampler import sample
from merestone.sched.plan import SamplingParams

MARKS = ((5, "instruction"), (8, "turn"), (9, "mark"), (13, "mark"))
SPARSE = 64


def until(h: Harness | Real, reply: Reply, limit: int = 500) -> int:
    """Steps until the request has finished."""
    for count in range(limit):
        if reply.finished() is not None:
            return count
        h.step()
    raise AssertionError(f"not finished after {limit} steps")


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("cache", [True, False])
def test_abort_at_every_step(n: int, cache: bool) -> None:
    for steps in range(22):
        h = Harness(small_spec(frames=120), slots=2, budget=9)
        mate = h.send(stream(13, 3), 12)
        gone = h.send(stream(37, 4), 9, id="gone", n=n, cache=cache, boundaries=MARKS)
        h.step(steps)
        for name in ("gone", "gone", "nobody"):
            h.engine.abort(name)
        h.drain()
        assert mate.ids() == oracle(stream(13, 3), 12)
        for choice in range(n):
            ends = [e for e in gone.events if isinstance(e, Finished) and e.choice == choice]
            assert len(ends) == 1
        h.ask(stream(37, 4), 5)
        at_rest(h)


@pytest.mark.parametrize("event", ["fail", "bad slot 0", "bad slot 1", "bad saves", "reset"])
def test_fault_at_every_step(event: str) -> None:
    for steps in range(20):
        h = Harness(small_spec(frames=80), slots=2, budget=9)
        h.ask(stream(30, 3)[:17], 1)
        sent = [(stream(30, 3), 2, True), (stream(31, 4), 1, True), (stream(9, 5), 1, False)]
        replies = [
            h.send(tokens, 6, n=n, cache=cache, boundaries=MARKS[:1]) for tokens, n, cache in sent
        ]
        h.step(steps)
        if event == "reset":
            h.cache.reset()
            h.audit()
        h.device.fail_next = event == "fail"
        h.device.bad_saves = event == "bad saves"
        if "slot" in event:
            h.device.bad_slots = {int(event[-1])}
        h.drain()
        failed = int(event == "fail" and not h.device.fail_next)
        for (tokens, n, _), reply in zip(sent, replies, strict=True):
            for choice in range(n):
                end, ids = reply.finished(choice), reply.ids(choice)
                assert end is not None
                assert ids == oracle(tokens, 6, choice)[: len(ids)]
                assert len(ids) == 6 or (end.reason == "error" and event != "reset")
        h.device.fail_next = False
        h.ask(stream(30, 3), 6)
        at_rest(h, failed)


@pytest.mark.parametrize("launch", ["_save", "_before", "_forward", "_sample"])
def test_a_launch_that_fails_leaves_no_trace(launch: str) -> None:
    real = Real(tiny(index_topk=SPARSE), frames=900, token_budget=60, max_running=3)
    base = real_stream(150, 9)
    real.check(base[:70], real.ask(base[:70], 2))
    launched = getattr(real.engine.device, launch)
    calls: list[object] = []

    def broken(*arguments: object) -> object:
        calls.append(arguments)
        if len(calls) > 1:
            return launched(*arguments)
        if launch == "_forward":
            launched(*arguments)  # the arena is written, the step is lost
        raise RuntimeError("injected")

    setattr(real.engine.device, launch, broken)
    prompts = [base, base[:70] + real_stream(9, 3), real_stream(40, 4)]
    for prompt in prompts:
        real.send(prompt, 8, boundaries=((65, "mark"),) if len(prompt) > 64 else ())
    real.drain()
    assert real.engine.counters["failed_steps"] == 1
    for prompt in prompts * 2:
        real.check(prompt, real.ask(prompt, 8))


@pytest.mark.parametrize(("page", "budget"), [(None, 37), (None, 512), (128, 100), (256, 64)])
def test_every_edge_restores_while_its_producer_appends(page: int | None, budget: int) -> None:
    """Readers copy part-filled pages on write while their producer goes on filling them."""
    real = Real(tiny(index_topk=SPARSE), frames=3000, token_budget=budget, page=page)
    pages = [group.page for group in real.engine.device.arena.layout.groups]
    near = {edge + off for edge in (*pages, 64, 128, 256) for off in (-1, 0, 1, 2)}
    marks = sorted(mark for mark in near | {199, 200, 201} if 0 < mark < 270)
    base = real_stream(270, 9)
    producer = real.send(base, 90, boundaries=tuple((mark, "mark") for mark in marks))
    while len(producer.ids()) < 3:
        real.step()
    for first in range(0, len(marks), 5):
        readers = []
        for mark in marks[first : first + 5]:
            tokens = (*base[:mark], (base[mark] + 1) % 256, *real_stream(5, mark % 256))
            readers.append((mark, tokens, real.send(tokens, 4)))
        for mark, tokens, reader in readers:
            until(real, reader)
            assert real.check(tokens, reader).cache.restored == mark
    real.drain()
    real.check(base, producer)


@pytest.mark.parametrize("slots", [1, 2, 4])
def test_any_budget_makes_progress_and_seals_every_mark(slots: int) -> None:
    marks = (7, 8, 9, 15, 16, 17)
    for budget in range(slots, 12):
        h = Harness(small_spec(frames=600), slots=slots, budget=budget)
        prompts = [stream(20 + 7 * i, 40 + i) for i in range(4)]
        replies = [h.send(p, 10, boundaries=tuple((m, "mark") for m in marks)) for p in prompts]
        h.drain(2000)
        for prompt, reply in zip(prompts, replies, strict=True):
            assert reply.ids() == oracle(prompt, 10)
        for mark in marks:
            other = [*prompts[0][:mark], (prompts[0][mark] + 1) % VOCAB, 1]
            assert h.ask(other, 2).restored == mark


@pytest.mark.parametrize("budget", [8, 33, 64])
def test_prompt_logprobs_do_not_depend_on_chunks_forks_or_preemption(budget: int) -> None:
    model, prompt = tiny(index_topk=SPARSE), real_stream(150, 5)
    whole = Real(model, frames=3000, token_budget=4096).ask(prompt, 5, prompt_logprobs=3)
    wanted = whole.finished().prompt_logprobs
    assert len(wanted) == 150
    real = Real(model, frames=3000, token_budget=budget, max_running=1)
    forks = real.send(prompt, 9, prompt_logprobs=3, n=3, priority=5)
    for wait in (2, 14):  # once in the prefill, once in what follows it
        for _ in range(wait):
            real.step()
        until(real, real.send(real_stream(20, wait), 2))
    real.drain()
    assert real.engine.scheduler.counters["preemptions"] >= 1
    assert forks.finished(0).prompt_logprobs == wanted
    assert forks.finished(1).prompt_logprobs is None
    for choice in range(3):
        real.check(prompt, forks, choice)


def test_penalised_samples_do_not_depend_on_preemption_or_restores() -> None:
    params = SamplingParams(
        temperature=0.8, top_p=0.9, top_k=40, seed=5, repetition_penalty=1.3,
        presence_penalty=0.4, frequency_penalty=0.2, logit_bias=((7, 2.0),), min_tokens=6,
        banned=(1, 2, 3), logprobs=2,
    )  # fmt: skip
    model, prompt = tiny(index_topk=SPARSE), real_stream(150, 5)

    def drawn(reply: Reply) -> list[list[object]]:
        tokens = [e for e in reply.events if isinstance(e, TokenEvent)]
        return [[(e.token, e.logprob) for e in tokens if e.choice == c] for c in range(3)]

    calm = Real(model, frames=3000)
    wanted = drawn(calm.ask(prompt, 25, params=params, n=3, stop_ids=(1, 2, 3)))
    assert drawn(calm.ask(prompt, 25, params=params, n=3, stop_ids=(1, 2, 3))) == wanted
    busy = Real(model, frames=3000, token_budget=16, max_running=2)
    reply = busy.send(prompt, 25, params=params, n=3, stop_ids=(1, 2, 3), priority=5)
    for key in range(12):
        for _ in range(6):
            busy.step()
        busy.send(real_stream(9, key), 2)
    busy.drain()
    assert busy.engine.scheduler.counters["preemptions"] > 2
    assert drawn(reply) == wanted


def test_choices_stop_at_their_own_times() -> None:
    prompt = stream(20, 1)
    answers = [oracle(prompt, 30, choice) for choice in range(4)]
    stops = (answers[0][5], answers[1][2], answers[3][20])
    h = Harness()
    reply = h.send(prompt, 30, n=4, stop_ids=stops)
    first = h.send(prompt, 9, stop_ids=(answers[0][0],))
    h.drain()
    assert first.ids() == answers[0][:1]
    for choice, answer in enumerate(answers):
        end = next((i + 1 for i, token in enumerate(answer) if token in stops), 30)
        assert reply.ids(choice) == answer[:end]
    at_rest(h)


@pytest.mark.parametrize("field", ["latent", "pool", "r", "gate", "beta", "kk", "ga", "hidden"])
@pytest.mark.parametrize("exact", [True, False])
def test_damage_in_a_published_checkpoint_never_changes_an_answer(field: str, exact: bool) -> None:
    """The index must not pass over a key that is not a number: it would choose others instead."""
    real = Real(tiny(index_topk=SPARSE), frames=2000, token_budget=256)
    prompt = real_stream(603, 7)
    real.check(prompt, real.ask(prompt, 2))
    arena = real.engine.device.arena
    checkpoint = next(c for c in real.engine.cache.checkpoints() if c.at == 603)
    if field == "hidden":
        arena.hidden[checkpoint.hidden].fill_(math.nan)
    for key, spec in arena.fields.items():
        if spec.name == field:
            arena.rows(*key)[checkpoint.pages[spec.home][1]] = math.nan
    tokens = prompt if exact else prompt + real_stream(30, 8)
    for _ in range(2):
        real.check(tokens, real.ask(tokens, 6))


def test_a_restored_request_that_never_ran_is_not_sealed() -> None:
    """It has a count of rows, but no hidden row to save, and a reset took its origin away."""
    h = Harness(small_spec(frames=300), slots=3, budget=8)
    prompt = stream(30, 1)
    h.ask(prompt, 1)
    mate = h.send(stream(100, 2), 4)  # its prefill takes every row of a step
    h.step()
    h.send([*prompt, *[7] * 20], 4, id="idle")
    h.step()
    assert [seq.computed for seq in h.scheduler.running if seq.id == "idle"] == [30]
    h.cache.reset()
    h.engine.abort("idle")
    h.drain()
    assert 30 not in {c.at for c in h.cache.checkpoints()}
    assert mate.ids() == oracle(stream(100, 2), 4)
    at_rest(h)


def test_two_live_requests_of_one_id() -> None:
    h = Harness()
    mate = h.send(stream(19, 3), 6)
    first = h.send(stream(20, 1), 3, id="twin")
    with pytest.raises(EngineRefusal):
        h.send(stream(21, 2), 3, id="twin")
    h.drain()
    assert (first.ids(), mate.ids()) == (oracle(stream(20, 1), 3), oracle(stream(19, 3), 6))
    at_rest(h)


@pytest.mark.parametrize(
    "change",
    [
        *({"max_tokens": -1}, {"n": 0}, {"boundaries": ((3, "nonsense"),)}),
        *({"tokens": (1, VOCAB)}, {"tokens": (1, -1)}, {"tokens": (1, 2**31)}),
        {"params": SamplingParams(logit_bias=((VOCAB, 1.0),))},
        {"params": SamplingParams(min_tokens=2, banned=(VOCAB,))},
    ],
)
def test_a_senseless_request_is_refused_at_the_door(change: dict[str, Any]) -> None:
    h = Harness()
    request = GenerateRequest("x", tuple(stream(9, 1)), SamplingParams(), 3)
    with pytest.raises(EngineRefusal):
        h.engine.submit(replace(request, **change), Reply().sink)


def test_a_failing_action_strands_nobody_behind_it() -> None:
    h = Harness()
    answered: Future[int] = Future()
    reply = Reply()
    request = GenerateRequest("behind", (1, 2, 3), SamplingParams(), 2)

    def failing() -> None:
        raise RuntimeError("injected")

    h.engine.inbox.append(failing)
    h.engine.submit(request, reply.sink)
    h.engine.inbox.append(lambda: answered.set_result(1))
    h.engine.start()
    h.engine.thread.join(120)
    assert answered.done()
    assert reply.finished() is not None


def test_stop_ends_what_was_never_started() -> None:
    h = Harness()
    reply = h.send(stream(9, 1), 2)
    h.engine.stop()
    assert reply.finished() is not None
    assert reply.finished().reason == "abort"


def test_a_follower_takes_no_slot_while_it_waits() -> None:
    h = Harness(small_spec(frames=2000), slots=3, budget=12)
    head, wanted = stream(400, 1), ((400, "instruction"),)
    h.send([*head, 1], 2, priority=5, boundaries=wanted)
    h.step()
    for key in range(4):
        h.send(stream(5, 10 + key), 200, priority=5)
    h.step(8)
    h.send([*head, 2], 2, priority=0, boundaries=wanted)
    h.step(20)
    assert h.scheduler.counters["preemptions"] <= 1


def test_a_request_without_rows_keeps_no_urgent_one_out() -> None:
    h = Harness(small_spec(frames=900), slots=2, budget=16)
    long = h.send(stream(300, 1), 2)
    h.step()
    h.send(stream(50, 2), 2, priority=5)
    h.step()
    until(h, h.send(stream(4, 3), 1))
    assert long.finished() is None


def test_an_exact_hit_waits_for_no_frames_of_others() -> None:
    h = Harness(small_spec(frames=60), slots=4, budget=64)
    warm = stream(10, 1)
    h.ask(warm, 1)
    decode = h.send(stream(60, 2), 80)
    h.step(3)
    h.send(stream(120, 3), 1)  # does not fit beside the decode
    h.step()
    assert until(h, h.send(warm, 1)) <= 3
    assert decode.finished() is None


def test_protection_follows_the_deepest_match() -> None:
    h = Harness(small_spec(frames=1000), slots=1, budget=64)
    prompt = stream(40, 1)
    h.ask(prompt[:10], 1)
    h.send(stream(20, 5), 60)
    h.step(2)
    h.send([*prompt, 1, 2], 2)
    h.step()
    until(h, h.send(prompt, 1, priority=-1))
    h.step(2)
    assert {c.at for c in h.cache.checkpoints() if c.protected} == {40}


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-38, 1e-45])
def test_the_smallest_temperature_is_greedy(temperature: float) -> None:
    row, none = torch.tensor([1.0, 12.0, 2.0, -1.0]), torch.tensor([], dtype=torch.int64)
    params = SamplingParams(temperature=temperature)
    assert sample(row, params, prompt=none, output=none, position=1, choice=0) == 1
