"""What a rank does in the tests of several on the device path: a whole engine over its share."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from gpu.machine import CUDA, GpuReal
from gpu.test_gpu_dflash import SMALL as DRAFT
from gpu.test_thin import KIMI, SPARSE, answer, prompt
from interpreted import order_dots
from layers.test_glm5_next import CONFIG
from merestone.engine.gpu import draft_on_gpu
from merestone.models.dflash import DFlash
from merestone.models.glm5_next import Glm5Next
from merestone.models.glm5_next_mtp import Glm5NextMtp
from merestone.models.gpu import on_gpu
from merestone.models.kimi_linear import KimiLinear
from merestone.models.tiny_weights import draw
from merestone.parallel.world import World
from merestone.sched.plan import SamplingParams
from merestone.spec.dflash import DFlashDrafter
from merestone.spec.interface import Drafter
from merestone.spec.mtp import MtpDrafter
from models.plain_loop import PlainLoop
from parallel.engines import Asking, chat, climb
from spec_models.targets import RandomDraft

UNEVEN = dataclasses.replace(SPARSE, vocab_size=65)
ONE_EACH = dataclasses.replace(UNEVEN, num_heads=2, kda_heads=2, index_heads=2)


def share(world: World, family: str) -> Glm5Next | KimiLinear:
    if family == "kimi_linear":
        return KimiLinear(KIMI, dict(draw(KIMI, 0)), torch.float32, world)
    config = {"glm5_next": UNEVEN, "one head": ONE_EACH}[family]
    return Glm5Next(config, dict(draw(config, 0)), torch.float32, world)


def answers(world: World, family: str, length: int) -> tuple[list, list, list[float]]:
    """The cold answer, that of a replay beside a mate and rows of padding, and how far the cold
    one's log probabilities are from those of the rank's CPU layers."""
    with pytest.MonkeyPatch.context() as patch:
        if not CUDA:
            order_dots(patch)
        ids = prompt(length, 3)
        _, logits = PlainLoop(share(world, family)).generate(list(ids), 2)
        model = on_gpu(share(world, family), world.device)
        real = GpuReal(model, page=16, frames=300, max_running=2, token_budget=256)
        cold = real.ask(ids, 2)
        pad_steps(real)
        replies = [real.send(ids, 2), real.send(prompt(3, 7), 1)]
        real.drain()
        assert replies[0].restored == length
        far = [
            abs(value - float(row.double().log_softmax(0)[token]))
            for (_, entry), row in zip(answer(cold), logits, strict=True)
            for token, value in entry.top
        ]
        return answer(cold), answer(replies[0]), far


def drafted(world: World, kind: str, length: int, count: int) -> tuple[list, ...]:
    """Answers without drafts, with those of ``kind``, and of a replay with them; then sampled ones
    whose drafts are accepted by their chances: an answer, and its replay."""
    with pytest.MonkeyPatch.context() as patch:
        if not CUDA:
            order_dots(patch)
        config = dataclasses.replace(UNEVEN, mtp_layers=1, mtp_shares_index=True)
        tensors = dict(draw(config, 0))
        own = {name: tensors.pop(name) for name in list(tensors) if name.startswith("layers.2.")}
        model = on_gpu(Glm5Next(config, tensors, torch.float32, world), world.device)
        cpu: Drafter
        if kind == "mtp":
            cpu = MtpDrafter(Glm5NextMtp(config, own, torch.float32, world), model, 2)
        else:
            small = dataclasses.replace(DRAFT, vocab_size=config.vocab_size)
            cpu = DFlashDrafter(DFlash(small, RandomDraft(), torch.float32, 2), model)
        drafter = draft_on_gpu(cpu, world.device)
        options = {"page": 16, "frames": 300, "max_running": 1, "token_budget": 64}
        plain = GpuReal(model, **options).ask(prompt(length, 3), count)
        real = GpuReal(model, drafter, **options)
        cold = real.ask(prompt(length, 3), count)
        again = real.ask(prompt(length, 3), count)
        assert again.restored == length
        assert cold.finished().drafts == again.finished().drafts
        chances = dataclasses.replace(drafter, chances=True)
        real = GpuReal(model, chances, accept="rejection", **options)
        how = SamplingParams(temperature=1.0, seed=3, logprobs=5)
        hot = [real.ask(prompt(length, 3), count, params=how) for _ in range(2)]
        return tuple(answer(reply) for reply in (plain, cold, again, *hot))


def pad_steps(real: GpuReal) -> None:
    """Rows and a sequence more in every step, as a graph of another size has them."""
    passes = real.engine.device.passes
    exact = passes._key_of

    def padded(works):
        key, _ = exact(works)
        return dataclasses.replace(key, rows=key.rows + 3, sequences=key.sequences + 1), False

    passes._key_of = padded


class DeviceAsked(Asking, GpuReal):
    """A rank's engine on its GPU."""


def engines(world: World, dtype: torch.dtype, graphs: bool) -> tuple[list, list]:
    """Replays and conversations over this rank's share of the sparse model, five layers of it."""
    model = Glm5Next(CONFIG, dict(draw(CONFIG, 0)), dtype, world)
    placed = on_gpu(model, world.device)
    options = {"page": 64, "frames": 2000, "token_budget": 100, "graphs": graphs}
    asked = DeviceAsked(placed, **options)
    return climb(asked, (1, 7, 64, 65, 129, 1159)), chat(DeviceAsked(placed, **options))
