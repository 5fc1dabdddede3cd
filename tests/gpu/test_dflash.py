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
from gpu.test_drafts import answer
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
from spec_models.test_dflash import VOCAB, Random, text

TWO = dataclasses.replace(DRAFT, windows=(32, 24), num_layers=2)
CASES = {
    "v2": TWO,
    "v1": dataclasses.replace(TWO, selector=None, logit_scale=0.5),
    "one-full-layer": dataclasses.replace(TWO, windows=(32, None)),
}
TAPS = len(DRAFT.taps)


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
    ends = [1, 31, 33, 64]
    texts = [text(end, seed, dtype) for seed, end in enumerate(ends)]
    together, proposals, hidden = Memory(two.draft, len(ends)), [], []
    for i, (source, end) in enumerate(zip(texts, ends, strict=True)):
        alone = Memory(two.draft, 1)
        two.keep(alone, 0, source, 0, end)
        ids, rows = two.propose(alone, [0], [source], [end])
        proposals += ids
        hidden.append(rows)
        for first in range(0, end, 13):
            two.keep(together, i, source, first, min(first + 13, end))
    order = [2, 0, 3, 1]
    ids, rows = two.propose(
        together, order, [texts[i] for i in order], [ends[i] for i in order]
    )
    assert ids == [proposals[i] for i in order]
    assert torch.equal(rows, torch.cat([hidden[i] for i in order]))
    if dtype == torch.float32:
        assert proposals == [two.alone(*both_) for both_ in zip(texts, ends, strict=True)]
