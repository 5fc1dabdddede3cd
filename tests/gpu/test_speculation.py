"""MTP on the device path: speculation changes no bit, and restored requests draft as cold ones."""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest
import torch

from engine.real import stream
from gpu.machine import BUNDLED, DEVICE, GpuReal
from gpu.test_thin import SPARSE
from merestone.device.gpu_drafting import GpuMtpDrafter
from merestone.engine.api import TokenEvent
from merestone.models.config import Glm5NextConfig
from merestone.models.glm5_next import Glm5Next
from merestone.models.glm5_next_mtp import GROUP, Glm5NextMtp
from merestone.models.gpu import GpuModel, on_gpu
from merestone.models.gpu_mtp import GpuMtp
from merestone.models.loader import load_model, load_mtp
from merestone.models.tiny_weights import draw
from merestone.sched.plan import SamplingParams
from merestone.spec.interface import DraftGroup

SMALL = dataclasses.replace(SPARSE, mtp_layers=1, mtp_shares_index=True)


Parts = tuple[GpuModel, GpuMtp]


@cache
def small(config: Glm5NextConfig = SMALL) -> Parts:
    """A random target of two layers, and its MTP layer."""
    prefix, tensors = f"layers.{config.num_layers}.", dict(draw(config, 0))
    own = {name: tensors.pop(name) for name in list(tensors) if name.startswith(prefix)}
    layer = Glm5NextMtp(config, own, torch.float32)
    return on_gpu(Glm5Next(config, tensors, torch.float32), DEVICE), GpuMtp(layer, DEVICE)


@cache
def bundled(dtype: torch.dtype) -> Parts:
    layer = load_mtp(BUNDLED, dtype)
    return on_gpu(load_model(BUNDLED, dtype), DEVICE), GpuMtp(layer, DEVICE)


class Noted(GpuReal):
    """An engine with a drafter, which writes down what was proposed: by a slot's text, and the
    keys of its noise."""

    def __init__(self, model: GpuModel, drafter, **options):
        super().__init__(model, drafter, **options)
        self.made: dict[tuple, list[int]] = {}
        runner = self.engine.device
        proposed = runner.drafter.proposed

        def noted():
            found = proposed()
            ids = found.ids.tolist() if found else []
            for number, places in (found.places if found else {}).items():
                drafts = [ids[place] for place in places]
                slot = runner.slots[number]
                text = slot.ids(0, len(slot.tokens) + len(slot.output))
                key = text, slot.params.temperature, slot.params.seed, slot.choice
                assert self.made.setdefault(key, drafts) == drafts
            return found

        runner.drafter.proposed = noted


class Drafting(Noted):
    """With the MTP layer, ``depth`` passes of it."""

    def __init__(self, parts: Parts, depth: int, **options):
        model, layer = parts
        groups = (DraftGroup(GROUP, multiple=model.pool, dealt=True),)
        super().__init__(model, GpuMtpDrafter(layer, depth, groups), **options)


def answer(reply, choice: int = 0) -> list:
    drawn = [e for e in reply.events if isinstance(e, TokenEvent) and e.choice == choice]
    return [(e.token, e.logprob) for e in drawn]


def test_a_thin_thread() -> None:
    """Cold, then restored: the answer of an engine without drafts. What memory is measured by
    computes padding alone."""
    parts = small()
    ids = tuple(t % 64 for t in stream(9, 3))
    options = {"frames": 300, "max_running": 1, "token_budget": 64}
    expected = answer(GpuReal(parts[0], **options).ask(ids, 3))
    real = Drafting(parts, 2, **options)
    assert answer(real.ask(ids, 3)) == expected
    made = len(real.made)
    assert made >= 1
    real.engine.device.drafter._largest(10, 64)
    again = real.ask(ids, 3)
    assert again.restored == 9
    assert answer(again) == expected
    assert len(real.made) == made


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("depth", [1, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ladder_of_replays(dtype: torch.dtype, depth: int, graphs: bool) -> None:
    parts = bundled(dtype)
    options = {"frames": 4000, "max_running": 4, "token_budget": 512, "graphs": graphs}
    real = Drafting(parts, depth, **options)
    prompts = [stream(n, 3 + n) for n in (1, 2, 63, 64, 65, 129, 700, 1400)]
    replies = [real.send(prompt, 40) for prompt in prompts]
    real.drain()
    for prompt, reply in zip(prompts, replies, strict=True):
        real.check(prompt, reply)
    made = len(real.made)
    for prompt, reply in zip(prompts, replies, strict=True):
        again = real.ask(prompt, 40)
        assert again.restored == len(prompt)
        assert answer(again) == answer(reply)
    assert len(real.made) == made


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True])
def test_conversation_and_sampling(graphs: bool) -> None:
    parts = bundled(torch.bfloat16)
    options = {"frames": 4000, "max_running": 4, "token_budget": 256, "graphs": graphs}
    real, plain = Drafting(parts, 3, **options), GpuReal(parts[0], **options)
    prompt = stream(300, 1)
    reply = real.ask(prompt, 30, boundaries=((100, "instruction"), (222, "turn")))
    real.check(prompt, reply)
    following = (*prompt, *reply.ids(), *stream(40, 2))
    second = real.ask(following, 30)
    assert second.restored == 329
    real.check(following, second)
    for seed, temperature in enumerate((0.7, 1.3)):
        params = SamplingParams(temperature=temperature, top_p=0.9, seed=seed, logprobs=2)
        both = [engine.ask(prompt, 20, params=params, n=2) for engine in (real, plain)]
        for choice in range(2):
            assert answer(both[0], choice) == answer(both[1], choice)
