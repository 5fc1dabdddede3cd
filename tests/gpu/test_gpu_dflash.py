"""DFlash drafts on the device path: the CPU drafter's proposals, whatever the company, and an
engine's answers and proposals, cold and restored."""

from __future__ import annotations

import dataclasses
import math
from functools import cache

import pytest
import torch
from torch import Tensor

from engine.real import stream
from gpu.machine import BUNDLED, DEVICE, GpuReal
from gpu.test_speculation import Noted, answer
from gpu.test_thin import SPARSE
from layers.test_glm5_next import build as build_target
from merestone.device.gpu_dflash import GpuDFlashDrafter
from merestone.engine.gpu import draft_on_gpu
from merestone.models.dflash import DFlash
from merestone.models.dflash_config import DFlashConfig, SelectorConfig
from merestone.models.gpu import GpuModel, on_gpu
from merestone.models.gpu_dflash import GpuDFlash, Kept, Stands
from merestone.models.loader import load_model
from merestone.ops.triton.follow import Noise
from merestone.sched.plan import SamplingParams
from merestone.spec.build import load_drafter, parse_speculation
from merestone.spec.dflash import DFlashDrafter
from spec_models.drafting import PAGE, Pages, Text, step
from spec_models.targets import DRAFT, RandomDraft
from spec_models.test_dflash import Random, text

TWO = dataclasses.replace(DRAFT, windows=(32, 24), block=4)
CASES = {
    "v2": TWO,
    "v1": dataclasses.replace(TWO, selector=None, logit_scale=0.5),
    "one-full-layer": dataclasses.replace(TWO, windows=(32, None)),
}
SMALL = DFlashConfig(
    vocab_size=64,
    hidden_size=64,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    intermediate_size=32,
    rms_eps=1e-5,
    rope_theta=10000.0,
    windows=(6,),
    block=3,
    mask_id=63,
    taps=(0, 1),
    target_layers=2,
    embedding_scale=1.0,
    logit_scale=1.0,
    selector=SelectorConfig(conv_kernel=2, conv_group=16, selector_rank=8, selector_topk=4),
)


class Memory:
    """A draft's pages on the device, NaN until written: 6 for each of ``count`` sequences, in
    another order, and one for padding."""

    def __init__(self, draft: GpuDFlash, count: int) -> None:
        self._rows = {
            (f.layer, f.name): torch.full(
                (6 * count + 1, PAGE, *f.shape), math.nan, dtype=f.dtype, device=DEVICE
            )
            for f in draft.fields()
        }
        order = torch.randperm(6 * count, generator=torch.Generator().manual_seed(1))
        self.tables = order.to(torch.int32).view(count, 6).to(DEVICE)

    def rows(self, layer: int, name: str) -> Tensor:
        return self._rows[layer, name]


class Both:
    """A draft on the CPU, and the same one on the device."""

    def __init__(self, config: DFlashConfig, dtype: torch.dtype) -> None:
        random = Random(dtype)
        self.cpu = DFlashDrafter(DFlash(config, random, dtype, 4), random)  # type: ignore[arg-type]
        self.draft = GpuDFlash(self.cpu.draft, DEVICE)
        self._embedding, self._head = random.embedding.to(DEVICE), random.head.to(DEVICE)

    def alone(self, source: Text, end: int) -> list[int]:
        """The CPU drafter's proposal."""
        fresh = dataclasses.replace(source, done=0, tables={})
        return step(self.cpu, Pages(self.cpu), [(fresh, end, True)], self.cpu.depth)[0]

    def keep(self, memory: Memory, sequence: int, source: Text, first: int, end: int) -> None:
        assert source.features is not None
        kept = Kept(
            ints([0] * (end - first)), ints(range(first, end)),
            memory.tables[sequence : sequence + 1], ints([0]),
        )  # fmt: skip
        self.draft.keep(source.features[first:end].to(DEVICE).contiguous(), kept, memory)

    def propose(
        self, memory: Memory, sequences: list[int], texts: list[Text], ends: list[int]
    ) -> tuple[list[list[int]], Tensor]:
        """Proposals, and the hidden rows they are made of."""
        block, device = self.draft.config.block, DEVICE
        newest = ints([source.ids[end] for source, end in zip(texts, ends, strict=True)])
        ids = newest[:, None].repeat(1, block)
        ids[:, 1:] = self.draft.config.mask_id
        at = ints(ends)
        rows = (at[:, None] + torch.arange(block, dtype=torch.int32, device=device)).flatten()
        tables = memory.tables[sequences].contiguous()
        hidden = self.draft.forward(
            self._embedding[ids.flatten().long()], Stands(at, tables, rows, 96), memory
        )
        hidden = hidden.view(len(ends), block, -1)[:, 1:].flatten(0, 1)
        logits = torch.stack([self._head @ row for row in hidden]).float()
        noise = Noise(
            torch.tensor([t.params.seed for t in texts], device=device), at, torch.zeros_like(at),
            torch.tensor([t.params.temperature for t in texts], device=device).float(),
        )  # fmt: skip
        out = torch.zeros(len(ends), block - 1, dtype=torch.int32, device=device)
        self.draft.choose(hidden, logits, newest, noise, out)
        return out.tolist(), hidden.view(len(ends), block - 1, -1)


def ints(values) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32).to(DEVICE)


@cache
def both(case: str, dtype: torch.dtype) -> Both:
    return Both(CASES[case], dtype)


WIDE = pytest.param(torch.bfloat16, marks=pytest.mark.gpu, id="bf16")


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, id="fp32"), WIDE])
@pytest.mark.parametrize("case", CASES)
def test_the_cpus_proposals_in_any_company(case: str, dtype: torch.dtype) -> None:
    """Observed in pieces, drafted for among others: the bits of a sequence that is alone. In fp32
    the ids are the CPU drafter's."""
    two = both(case, dtype)
    ends = [1, 33, 50]
    texts = [text(end, seed, dtype) for seed, end in enumerate(ends)]
    together, proposals, hidden = Memory(two.draft, len(ends)), [], []
    for i, (source, end) in enumerate(zip(texts, ends, strict=True)):
        alone = Memory(two.draft, 1)
        two.keep(alone, 0, source, 0, end)
        ids, rows = two.propose(alone, [0], [source], [end])
        proposals += ids
        hidden.append(rows)
        for first in range(0, end, 31):
            two.keep(together, i, source, first, min(first + 31, end))
    order = [2, 0, 1]
    ids, rows = two.propose(together, order, [texts[i] for i in order], [ends[i] for i in order])
    assert ids == [proposals[i] for i in order]
    assert torch.equal(rows, torch.cat([hidden[i] for i in order]))
    if dtype == torch.float32:
        assert proposals == [two.alone(*both_) for both_ in zip(texts, ends, strict=True)]


Parts = tuple[GpuModel, GpuDFlashDrafter]


@cache
def small() -> Parts:
    """A random target of two layers, and a random draft for it."""
    target = build_target(SPARSE)
    drafter = DFlashDrafter(DFlash(SMALL, RandomDraft(), torch.float32, 2), target)
    return on_gpu(target, DEVICE), placed(drafter)


@cache
def bundled(dtype: torch.dtype) -> Parts:
    model = load_model(BUNDLED, dtype)
    drafter = load_drafter(parse_speculation("dflash"), None, BUNDLED, model)
    return on_gpu(model, DEVICE), placed(drafter)


def placed(drafter) -> GpuDFlashDrafter:
    found = draft_on_gpu(drafter, DEVICE)
    assert isinstance(found, GpuDFlashDrafter)
    return found


def test_a_thin_thread() -> None:
    """Cold, then restored: the answer of an engine without drafts, and no other proposals. What
    memory is measured by computes padding alone."""
    parts = small()
    ids = tuple(t % 64 for t in stream(9, 3))
    options = {"frames": 300, "max_running": 1, "token_budget": 64}
    expected = answer(GpuReal(parts[0], **options).ask(ids, 3))
    real = Noted(*parts, **options)
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
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ladder_of_replays(dtype: torch.dtype, graphs: bool) -> None:
    """Prompts shorter and longer than the draft's window of 512, together and then restored."""
    options = {"frames": 4000, "max_running": 4, "token_budget": 512, "graphs": graphs}
    real = Noted(*bundled(dtype), **options)
    prompts = [stream(n, 3 + n) for n in (1, 2, 63, 64, 65, 129, 511, 513, 700, 1400)]
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
def test_graphs_propose_what_launches_do() -> None:
    made = []
    for graphs in (False, True):
        options = {"frames": 2000, "max_running": 4, "token_budget": 512, "graphs": graphs}
        real = Noted(*bundled(torch.bfloat16), **options)
        for n in (5, 200, 600):
            real.send(stream(n, n), 30)
        real.drain()
        made.append(real.made)
    assert made[0] == made[1]


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True])
def test_conversation_and_sampling(graphs: bool) -> None:
    parts = bundled(torch.bfloat16)
    options = {"frames": 4000, "max_running": 4, "token_budget": 256, "graphs": graphs}
    real, plain = Noted(*parts, **options), GpuReal(parts[0], **options)
    prompt = stream(300, 1)
    reply = real.ask(prompt, 30, boundaries=((100, "instruction"), (222, "turn")))
    real.check(prompt, reply)
    following = (*prompt, *reply.ids(), *stream(40, 2))
    second = real.ask(following, 30)
    assert second.restored == 329
    real.check(following, second)
    for seed, temperature in enumerate((0.7, 1.3)):
        params = SamplingParams(temperature=temperature, top_p=0.9, seed=seed, logprobs=2)
        answers = [engine.ask(prompt, 20, params=params, n=2) for engine in (real, plain)]
        for choice in range(2):
            assert answer(answers[0], choice) == answer(answers[1], choice)


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True])
def test_aborted_preempted_and_beside_a_producer(graphs: bool) -> None:
    """Around the end of the window: whoever resumes is drafted for as the one that was cut off."""
    options = {"frames": 4000, "max_running": 1, "token_budget": 256, "graphs": graphs}
    prompt = stream(505, 9)
    real = Noted(*bundled(torch.bfloat16), **options)
    for steps in (4, 5, 7):
        reply = real.send(prompt, 40, id="gone", salt=str(steps))
        for _ in range(steps):
            real.step()
        real.engine.abort("gone")
        real.drain()
        longer = (*prompt, *reply.ids())
        real.check(longer, real.ask(longer, 20, salt=str(steps)))
        slow = real.send(prompt, 40, priority=5, salt=f"x{steps}")
        for _ in range(steps):
            real.step()
        urgent = real.ask(stream(20, steps), 3)
        real.check(stream(20, steps), urgent)
        real.check(prompt, slow)
    assert real.engine.scheduler.counters["preemptions"] == 3
    both = Noted(*bundled(torch.bfloat16), **{**options, "max_running": 4})
    replies = [both.send(prompt, 24)]
    for _ in range(4):
        both.step()
    texts = [prompt, (*prompt, *stream(9, 6)), (*prompt, *stream(40, 7))]
    replies += [both.send(tokens, 24) for tokens in texts]
    both.drain()
    for tokens, reply in zip([prompt, *texts], replies, strict=True):
        assert both.check(tokens, reply).cache.restored == (0 if reply is replies[0] else 505)
