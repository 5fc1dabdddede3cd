"""Warm = cold on the second family: dense attention over every page, a softplus gate.

The same oracle as in test_exact: the plain loop's ids, and the bits of its top-5 log probabilities.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch

from engine.real import Real, stream
from merestone.models.interface import Model
from merestone.models.loader import load_model
from merestone.models.tiny import write_tiny_kimi

LADDER = (1, 2, 63, 64, 65, 127, 128, 129)


@cache
def kimi(dtype: str = "float32") -> Model:
    directory = Path(mkdtemp(prefix="merestone-tests-"))
    write_tiny_kimi(directory, layers=4)
    return load_model(directory, getattr(torch, dtype))


@pytest.mark.parametrize(("dtype", "together"), [("float32", 1), ("float32", 4), ("bfloat16", 4)])
def test_replay_ladder(dtype: str, together: int) -> None:
    real = Real(kimi(dtype), frames=9000)
    for step, length in enumerate(LADDER):
        prompts = [stream(length, 1 + 16 * step + i) for i in range(together)]
        first = [real.send(prompt, 3) for prompt in prompts]
        real.drain()
        for prompt, reply in zip(prompts, first, strict=True):
            real.check(prompt, reply)
        real.ask(stream(300, 200 + step), 1)
        before = real.segments
        again = [real.send(prompt, 1) for prompt in prompts]
        real.drain()
        for prompt, reply in zip(prompts, again, strict=True):
            end = real.check(prompt, reply)
            assert (end.cache.restored, end.cache.kind) == (length, "prompt")
        assert real.segments == before, "an exact hit ran a layer"


def test_turns_instructions_and_forks() -> None:
    real = Real(kimi(), frames=9000, token_budget=200)
    head = stream(330, 5)
    history = head + stream(45, 6)
    real.check(history, real.ask(history, 10, boundaries=((330, "instruction"),)))
    for turn in range(3):
        before = len(history)
        reply = real.ask(history, 13, boundaries=((330, "instruction"),))
        assert real.check(history, reply).cache.restored == before - (turn > 0) * (14 + turn)
        history = history + tuple(reply.ids()) + stream(14 + turn, 30 + turn)
    other = head + stream(70, 9)
    end = real.check(other, real.ask(other, 10))
    assert (end.cache.restored, end.cache.kind) == (330, "instruction")
    longer = other + stream(9, 8)
    forks = real.ask(longer, 5, n=3)
    for choice in range(3):
        real.check(longer, forks, choice)


def test_batched_equals_alone_with_chunked_prefill_beside() -> None:
    real = Real(kimi(), frames=9000, max_running=8, token_budget=96)
    prompts = [stream(40 + 37 * i, 20 + i) for i in range(10)]
    replies = []
    for prompt in prompts:
        replies.append(real.send(prompt, 16))
        real.step()
        real.step()
    real.drain()
    for prompt, reply in zip(prompts, replies, strict=True):
        real.check(prompt, reply)


def test_preempted_equals_undisturbed() -> None:
    real = Real(kimi(), frames=210, max_running=4, token_budget=128)
    prompts = [stream(20 + 5 * i, 40 + i) for i in range(4)]
    replies = [real.send(prompt, 90) for prompt in prompts]
    real.drain()
    assert real.engine.scheduler.counters["preemptions"] > 0
    for prompt, reply in zip(prompts, replies, strict=True):
        real.check(prompt, reply)
