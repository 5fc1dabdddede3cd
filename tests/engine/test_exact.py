"""Warm = cold, bit for bit, on the real engine and a real (tiny) model.

Every answer is compared with the plain loop: ids, and the bits of the top-5 log probabilities.
"""

from __future__ import annotations

import pytest
import torch

from engine.real import Real, stream, tiny
from merestone.sched.plan import SamplingParams

LADDER = (1, 2, 63, 64, 65, 127, 128, 129, 1159)
PERIODIC = (785, 3974, 13867, 38627, 34041, 916, 279, 15666, 5562, 13)


def disturb(real: Real, how: str, key: int) -> None:
    """The standard disturbances between a first request and its replay."""
    if how == "other prompt":
        real.ask(stream(1000, 200 + key % 50), 1)
    elif how == "cold prefills":
        for index in range(4):
            real.send(stream(700, 150 + 4 * (key % 12) + index), 1)
        real.step()
    elif how == "pool turned over":
        frames, key = 0, 100
        while frames < 2 * real.engine.cache.spec.frames:
            real.ask(stream(900, key % 256), 1, salt=f"filler{key}")
            frames, key = frames + real.engine.cache.frames_needed(900), key + 1


@pytest.mark.parametrize("how", ["quiet", "other prompt", "cold prefills", "pool turned over"])
@pytest.mark.parametrize("together", [1, 4, 16])
def test_replay_ladder(how: str, together: int) -> None:
    model = tiny()
    frames = 700 if how == "pool turned over" else 14000
    real = Real(model, frames=frames, max_running=8, token_budget=512)
    for length in LADDER:
        # Sixteen at once of the longest would take the plain loop too long: four do.
        count = min(together, 4) if length > 1000 else together
        prompts = [stream(length, 1 + 16 * LADDER.index(length) + i) for i in range(count)]
        first = [real.send(p, 3) for p in prompts]
        real.drain()
        for prompt, reply in zip(prompts, first, strict=True):
            real.check(prompt, reply)
        for _ in range(2):
            disturb(real, how, length)
            before = real.segments
            again = [real.send(p, 1) for p in prompts]
            real.drain()
            for prompt, reply in zip(prompts, again, strict=True):
                end = real.check(prompt, reply)
                if how != "pool turned over":
                    assert end.cache.restored == length
                    assert end.cache.kind == "prompt"
            # `before` was taken behind the disturbance; only prefills still in flight may run.
            if how in ("quiet", "other prompt"):
                assert real.segments == before, "an exact hit ran a layer"


@pytest.mark.parametrize("budget", [100, 2048])
def test_long_replays(budget: int) -> None:
    real = Real(tiny(), frames=40000, token_budget=budget)
    for length in (8191, 8192, 8193):
        prompt = stream(length, length % 256)
        if budget == 2048:
            real.check(prompt, real.ask(prompt, 3))
            for _ in range(2):
                before = real.segments
                end = real.check(prompt, real.ask(prompt, 1))
                assert end.cache.restored == length
                assert real.segments == before
        elif length == 8192:
            real.check(prompt, real.ask(prompt, 3))


def test_batched_equals_alone_with_chunked_prefill_beside() -> None:
    """Sixteen different requests in eight slots, a tight budget, arrivals in between."""
    real = Real(tiny(), frames=9000, max_running=8, token_budget=96)
    prompts = [stream(40 + 37 * i, 20 + i) for i in range(16)]
    replies = []
    for prompt in prompts:
        replies.append(real.send(prompt, 24))
        real.step()
        real.step()
    real.drain()
    for prompt, reply in zip(prompts, replies, strict=True):
        real.check(prompt, reply)


def test_turns_instructions_and_forks_in_the_sparse_regime() -> None:
    """A conversation restored at every kind of boundary, where the index really selects."""
    real = Real(tiny(index_topk=64), frames=9000, token_budget=200)
    head = stream(330, 5)
    history = head + stream(45, 6)
    real.check(history, real.ask(history, 10, boundaries=((330, "instruction"),)))
    for turn in range(4):
        reply = real.ask(history, 13, boundaries=((330, "instruction"),))
        assert real.check(history, reply).cache.restored >= len(history) - (turn > 0) * 27
        history = history + tuple(reply.ids()) + stream(14 + turn, 30 + turn)
    other = head + stream(70, 9)
    end = real.check(other, real.ask(other, 10))
    assert (end.cache.restored, end.cache.kind) == (330, "instruction")
    forks = real.send(other + stream(9, 8), 5, n=3)
    real.drain()
    for choice in range(3):
        real.check(other + stream(9, 8), forks, choice)


def test_preempted_equals_undisturbed() -> None:
    real = Real(tiny(), frames=160, max_running=4, token_budget=128)
    prompts = [stream(20 + 5 * i, 40 + i) for i in range(4)]
    replies = [real.send(p, 90) for p in prompts]
    real.drain()
    assert real.engine.scheduler.counters["preemptions"] > 0
    for prompt, reply in zip(prompts, replies, strict=True):
        real.check(prompt, reply)


def test_aborted_prefill_resumes_exactly() -> None:
    for steps in (1, 2, 3):
        real = Real(tiny(), frames=2000, token_budget=100)
        prompt = stream(420, 7)
        real.send(prompt, 2, id="gone")
        for _ in range(steps):
            real.step()
        real.engine.abort("gone")
        real.drain()
        end = real.check(prompt, real.ask(prompt, 4))
        assert 0 < end.cache.restored < 420


def test_a_not_a_number_state_is_recomputed_not_inherited() -> None:
    real = Real(tiny(), frames=2000)
    prompt = stream(200, 7)
    real.check(prompt, real.ask(prompt, 2))
    arena = real.engine.device.arena
    for checkpoint in real.engine.cache.checkpoints():
        for frame in checkpoint.anchor_frames:
            arena.memory[frame].fill_(0xFF)
    longer = prompt + stream(30, 8)
    real.check(longer, real.ask(longer, 4))
    assert real.engine.scheduler.counters["not_finite"] >= 1
    real.check(longer, real.ask(longer, 4))


def test_the_open_case() -> None:
    """Periodic text: ten cold runs, replays and continuation, all the same bits."""
    model = tiny()
    pattern = [token % model.info.vocab_size for token in PERIODIC]
    prompt = tuple((pattern * 103)[:1023])
    real = Real(model, frames=12000)
    seen = set()
    for run in range(10):
        reply = real.ask(prompt, 32, salt=f"cold{run}")
        assert reply.restored == 0
        seen.add(str([(e.token, e.logprob) for e in reply.events if hasattr(e, "token")]))
    assert len(seen) == 1
    first = real.ask(prompt, 32, salt="s")
    for _ in range(2):
        again = real.ask(prompt, 32, salt="s")
        assert again.restored == 1023
        assert again.ids() == first.ids()
    longer = prompt + tuple(first.ids()) + tuple(pattern[:5])
    warm = real.ask(longer, 32, salt="s")
    assert warm.restored == 1023 + 31
    real.check(longer, warm)
    real.check(longer, real.ask(longer, 32, salt="another"))


def test_sampling_is_keyed_by_seed_choice_and_position() -> None:
    """Sampled answers do not depend on batch mates, restores or preemption either."""
    params = SamplingParams(temperature=0.9, top_p=0.95, seed=11, logprobs=5)
    real = Real(tiny(), frames=4000)
    prompt = stream(150, 3)
    alone = real.ask(prompt, 20, params=params, n=2)
    others = [real.send(stream(90, 60 + i), 20, params=params) for i in range(5)]
    warm = real.send(prompt, 20, params=params, n=2)
    real.drain()
    assert all(other.finished() for other in others)
    for choice in range(2):
        assert warm.ids(choice) == alone.ids(choice)
    assert alone.ids(0) != alone.ids(1)
    other_seed = SamplingParams(temperature=0.9, top_p=0.95, seed=12)
    assert real.ask(prompt, 20, params=other_seed).ids() != alone.ids()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("threads", [1, 2])
def test_every_dtype_and_thread_count_is_exact_against_itself(dtype: str, threads: int) -> None:
    torch.set_num_threads(threads)
    model = tiny(dtype)
    real = Real(model, frames=3000, token_budget=96)
    prompts = [stream(length, 70 + length % 7) for length in (5, 64, 131)]
    for _ in range(2):
        replies = [real.send(p, 5, salt=f"{dtype}{threads}") for p in prompts]
        real.drain()
        for prompt, reply in zip(prompts, replies, strict=True):
            assert reply.finished().completion_tokens == 5
            ids = reply.ids()
            events = [e for e in reply.events if hasattr(e, "token")]
            wanted = real_cold(model, prompt)
            assert ids == wanted[0]
            assert [e.logprob for e in events] == wanted[1]


def real_cold(model, prompt):
    """A cold run of an engine of its own, one request at a time."""
    alone = Real(model, frames=3000, token_budget=4096, max_running=1)
    reply = alone.ask(prompt, 5)
    return reply.ids(), [e.logprob for e in reply.events if hasattr(e, "token")]
