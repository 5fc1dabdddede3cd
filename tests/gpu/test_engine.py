"""Warm = cold on the device, with graphs and without: the scenarios of the CPU engine, and more."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import engine.test_exact as scenarios
from engine.real import stream
from gpu.machine import GpuReal, cold, tiny
from merestone.engine.api import TokenEvent
from merestone.sched.plan import SamplingParams

pytestmark = pytest.mark.gpu

BOTH = pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch, graphs: bool) -> None:
    """The CPU engine's scenarios, over the device path."""
    monkeypatch.setattr(scenarios, "Real", partial(GpuReal, graphs=graphs))
    monkeypatch.setattr(scenarios, "tiny", tiny)


@BOTH
@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("how", ["quiet", "other prompt", "cold prefills", "pool turned over"])
def test_replay_ladder(how: str) -> None:
    scenarios.test_replay_ladder(how, 4)


@BOTH
@pytest.mark.usefixtures("on_device")
def test_batched_equals_alone() -> None:
    scenarios.test_batched_equals_alone_with_chunked_prefill_beside()


@BOTH
@pytest.mark.usefixtures("on_device")
def test_turns_instructions_and_forks() -> None:
    scenarios.test_turns_instructions_and_forks_in_the_sparse_regime()


@BOTH
@pytest.mark.usefixtures("on_device")
def test_preempted_equals_undisturbed() -> None:
    scenarios.test_preempted_equals_undisturbed()


@BOTH
@pytest.mark.usefixtures("on_device")
def test_aborted_prefill_resumes_exactly() -> None:
    scenarios.test_aborted_prefill_resumes_exactly()


@BOTH
@pytest.mark.usefixtures("on_device")
def test_a_not_a_number_state_is_recomputed() -> None:
    scenarios.test_a_not_a_number_state_is_recomputed_not_inherited()


@BOTH
@pytest.mark.usefixtures("on_device")
def test_sampling_is_keyed() -> None:
    scenarios.test_sampling_is_keyed_by_seed_choice_and_position()


FAMILIES = [("glm5_next", "bfloat16"), ("kimi_linear", "bfloat16"), ("kimi_linear", "float32"),
            ("bundled", "bfloat16")]  # fmt: skip


@BOTH
@pytest.mark.parametrize(("family", "dtype"), FAMILIES)
def test_families_and_dtypes(family: str, dtype: str, graphs: bool) -> None:
    """Replays, continuations and company, for each family in the dtype it is served in."""
    model = tiny(dtype, 64, family) if family == "glm5_next" else tiny(dtype, family=family)
    real = GpuReal(model, frames=3000, max_running=4, token_budget=256, graphs=graphs)
    prompts = [stream(n, 30 + i) for i, n in enumerate((1, 5, 63, 64, 65, 130, 333, 900))]
    for turn in range(2):
        replies = [real.send(p, 9) for p in prompts]
        real.drain()
        for prompt, reply in zip(prompts, replies, strict=True):
            assert real.check(prompt, reply).cache.restored == (len(prompt) if turn else 0)
    for prompt, reply in zip(prompts, replies, strict=True):
        longer = prompt + tuple(reply.ids()) + stream(21, 4)
        end = real.check(longer, real.ask(longer, 9))
        assert end.cache.restored == len(prompt) + 8


@BOTH
@pytest.mark.parametrize("family", ["glm5_next", "kimi_linear"])
def test_large_budget_and_pages(family: str, graphs: bool) -> None:
    """A budget of 4,096 rows with pages of 2,048 tokens: cold, restored, in company, preempted."""
    model = tiny("bfloat16", family=family)
    options = {"frames": 600, "page": 2048, "token_budget": 4096, "graphs": graphs}
    real = GpuReal(model, max_running=4, **options)
    prompt = stream(9001, 9)
    real.check(prompt, real.ask(prompt, 5))
    mates = [real.send(stream(700 + i, 40 + i), 5) for i in range(2)]
    again = real.send(prompt + stream(40, 8), 5)
    real.drain()
    assert again.restored == 9001
    real.check(prompt + stream(40, 8), again)
    for i, mate in enumerate(mates):
        real.check(stream(700 + i, 40 + i), mate)
    # Somebody more urgent, when every slot is taken.
    real = GpuReal(model, max_running=2, **options)
    prompts = [stream(300 + 90 * i, 50 + i) for i in range(2)]
    replies = [real.send(prompt, 40) for prompt in prompts]
    for _ in range(12):
        real.step()
    urgent = real.send(stream(50, 60), 5, priority=-1)
    real.drain()
    assert real.engine.scheduler.counters["preemptions"] > 0
    for prompt, reply in zip((*prompts, stream(50, 60)), (*replies, urgent), strict=True):
        real.check(prompt, reply)


@BOTH
def test_the_open_case(graphs: bool) -> None:
    """Periodic text of 8,191 tokens: ten cold runs, replays and a continuation, all one answer."""
    model = tiny("bfloat16", family="bundled")
    pattern = [token % model.info.vocab_size for token in scenarios.PERIODIC]
    prompt = tuple((pattern * 820)[:8191])
    real = GpuReal(model, frames=6000, token_budget=4096, graphs=graphs)
    runs = [real.ask(prompt, 256, salt=f"cold{i}") for i in range(10)]
    assert all(run.restored == 0 for run in runs)
    assert len({str(answer(run)) for run in runs}) == 1
    first, *again = (real.ask(prompt, 256, salt="s") for _ in range(3))
    for replay in again:
        assert replay.restored == 8191
        assert answer(replay) == answer(first) == answer(runs[0])
    longer = prompt + tuple(first.ids()) + tuple(pattern[:5])
    warm, control = real.ask(longer, 256, salt="s"), real.ask(longer, 256, salt="other")
    assert (warm.restored, control.restored) == (8191 + 255, 0)
    assert answer(warm) == answer(control)


@BOTH
@pytest.mark.parametrize("length", [8192, 8193, 32768 - 256])
def test_long_replays(length: int, graphs: bool) -> None:
    model = tiny("bfloat16", family="bundled")
    real = GpuReal(model, frames=12000, token_budget=4096, graphs=graphs)
    prompt = tuple(token % 3000 for token in stream(length, length % 251))
    first = real.ask(prompt, 256)
    before = real.segments
    again = real.send(prompt, 1)
    real.drain()
    assert real.segments == before, "an exact hit ran a layer"
    assert again.restored == length
    assert answer(again) == answer(first)[:1]
    whole = real.ask(prompt, 256)
    assert whole.restored == length
    assert answer(whole) == answer(first) == cold(model, prompt, 256)


def test_prompt_rows_do_not_depend_on_the_pass() -> None:
    """Log probabilities of every prompt row, in passes of any size and in company."""
    model = tiny("bfloat16", 64)
    prompt = stream(700, 3)
    seen = []
    for budget, mates in ((4096, 0), (64, 0), (100, 3), (257, 2)):
        real = GpuReal(model, frames=3000, max_running=4, token_budget=budget, graphs=budget < 200)
        for i in range(mates):
            real.send(stream(90 + i, 60 + i), 40)
        reply = real.send(prompt, 1, prompt_logprobs=1, params=SamplingParams())
        real.drain()
        seen.append(reply.finished().prompt_logprobs)
    assert all(one == seen[0] for one in seen)
    assert len(seen[0]) >= 699


def test_what_is_in_padding_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of padded sizes, with the frame and the slot of padding full of anything."""
    model = tiny("bfloat16", 64)
    answers = []
    for fill in (0, 0xFF, 0x42):
        real = GpuReal(model, frames=2000, max_running=7, token_budget=200, graphs=True)
        state = real.engine.device.state
        state.arena.memory[-1].fill_(fill)
        state.ring[-1].view(torch.uint8).fill_(fill)
        replies = [real.send(stream(50 + 31 * i, 70 + i), 12) for i in range(5)]
        real.drain()
        answers.append([answer(reply) for reply in replies])
    assert answers[0] == answers[1] == answers[2]


def answer(reply) -> list:
    """Ids and log probabilities of a reply's tokens."""
    return [(e.token, e.logprob) for e in reply.events if isinstance(e, TokenEvent)]
