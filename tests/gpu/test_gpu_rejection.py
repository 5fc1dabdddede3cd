"""Rejection on the device path: drafts drawn there, judged as on the CPU, and the distribution."""

from __future__ import annotations

import dataclasses
from collections import Counter
from itertools import product

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

import gpu.test_gpu_dflash as dflash
import gpu.test_speculation as mtp
import merestone.ops.triton.follow as follow
from gpu.machine import BUNDLED, CUDA, DEVICE, GpuReal
from gpu.test_speculation import Noted, answer
from gpu.test_thin import prompt
from merestone.device.gpu_drafting import GpuMtpDrafter
from merestone.device.gpu_passes import Sampled
from merestone.device.gpu_sampling import GpuSlot, Sampling
from merestone.device.gpu_turn import Parts as Tables
from merestone.device.gpu_turn import Proposed, Turn, fill_noise, noise_of, noise_sizes, odds_of
from merestone.engine.gpu import draft_on_gpu
from merestone.models.gpu import GpuModel
from merestone.models.loader import load_model
from merestone.ops.sampler import Draft, sample
from merestone.ops.triton.draw import draw, draws
from merestone.ops.triton.follow import among
from merestone.sched.plan import SamplingParams, Work
from merestone.spec.accept import accept
from merestone.spec.build import ACCEPT, load_drafter, parse_speculation
from merestone.spec.interface import DraftGroup
from spec_engine.test_rejection import VOCAB, chances_of, chi_square, drafted, target
from spec_models.test_drafted_engine import text

DEPTH, WIDE = 2, 5
TARGETS = torch.stack([target(token) for token in range(VOCAB)]).to(DEVICE)
BELIEVED = torch.stack([drafted(token) for token in range(VOCAB)]).to(DEVICE)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter is slow to choose candidates; that kernel has tests of its own."""
    if not CUDA:
        monkeypatch.setattr(follow, "choose", lambda x, _, k: x.topk(k).indices.sort().values.int())


class Steps:
    """A step for each of ``asked``, which follows token 0 at position 0 with two drafts: as the
    runner has it, over the Markov chain of the CPU's test."""

    def __init__(self, asked: list[SamplingParams]) -> None:
        count = len(asked)
        zero = np.zeros(1, np.int32)
        self.slots = {i: GpuSlot(zero, 1, 0, params) for i, params in enumerate(asked)}
        self._works = [
            Work(i, 0, 1, (0,), (), 0, (), 0, (), True, drafts=DEPTH) for i in self.slots
        ]
        self._ids = torch.zeros(DEPTH, count, dtype=torch.int32, device=DEVICE)
        self._odds = odds_of(DEPTH * count, WIDE, DEVICE)

    def draft(self) -> None:
        """Draw drafts on the device, and land them."""
        newest = torch.zeros(len(self.slots), dtype=torch.int64, device=DEVICE)
        for place in range(DEPTH):
            self.draw(place, BELIEVED[newest])
            newest = self._ids[place].long()
        self.land()

    def draw(self, place: int, logits: Tensor) -> None:
        """Draw the drafts of one place."""
        count = len(self.slots)
        tables = Tables(noise_sizes(count))
        host = np.zeros(tables.size, np.int32)
        turns = [
            Turn(work, 0, 0, 0, (), True, 0, self.slots[work.slot].params, 0)
            for work in self._works
        ]
        fill_noise(tables.on_host(host), turns)
        noise = noise_of(tables.on_device(torch.from_numpy(host).to(DEVICE)))
        own = self._odds.rows(place * count, count)
        among(logits, noise, 1, place + 1, self._ids[place], own)

    def land(self) -> None:
        """Bring them to the slots."""
        count = len(self.slots)
        places = {i: [i, count + i] for i in self.slots}
        told = Proposed(self._ids.flatten(), places, self._odds).told(self.slots)
        told.land(torch.cat(list(told.parts)).tolist())

    def tokens(self, rejecting: bool = True) -> list[tuple[int, ...]]:
        """What each step gives."""
        newest = torch.cat([torch.zeros_like(self._ids[:1]), self._ids]).t().flatten().long()
        logits = TARGETS[newest]
        sampling = Sampling(self._works, self.slots, rejecting=rejecting)
        bad = torch.zeros(len(logits), dtype=torch.int32, device=DEVICE)
        parts = sampling.launch(Sampled(logits, logits.argmax(1).int(), bad))
        found = sampling.results(torch.cat(parts).tolist(), set())
        return [found[i].tokens for i in self.slots]


def judged_on_the_host(slot: GpuSlot) -> tuple[int, ...]:
    """The CPU runner's decisions about a slot's drafts."""
    assert slot.chances is not None
    candidates, probabilities = slot.chances
    none, ids = torch.zeros(0, dtype=torch.int64), [0]

    def one(place: int) -> int:
        draft = None
        if place < DEPTH:
            draft = Draft(slot.proposed[place], candidates[place], probabilities[place])
        row = TARGETS[ids[-1]].cpu()
        output = torch.tensor(ids[1:], dtype=torch.int64)
        ids.append(
            sample(row, slot.params, prompt=none, output=output, position=len(ids), choice=0,
                   draft=draft)
        )  # fmt: skip
        return ids[-1]

    return accept(slot.proposed, one)


def check_chances(slot: GpuSlot) -> None:
    """The softmax of the best candidates, of the row after the draft before."""
    assert slot.chances is not None
    for place, before in enumerate([0, *slot.proposed[:-1]]):
        values, ids = BELIEVED[before].cpu().topk(WIDE)
        q = torch.zeros(VOCAB, dtype=torch.float64)
        q[ids] = (values.double() / slot.params.temperature).softmax(0)
        candidates, probabilities = (part[place] for part in slot.chances)
        torch.testing.assert_close(torch.zeros_like(q).scatter(0, candidates, probabilities), q)


@pytest.mark.usefixtures("quick")
def test_decisions_are_the_cpus() -> None:
    """Given the same logits and drafts; only a token behind all drafts may be the device's own.
    Greedy requests among them keep their bits."""
    kinds = (
        SamplingParams(temperature=0.9),
        SamplingParams(temperature=1.2, top_k=3),
        SamplingParams(temperature=0.7, presence_penalty=0.5),
        SamplingParams(logprobs=2),
        SamplingParams(frequency_penalty=0.5),
    )
    steps = Steps([replace(params, seed=seed) for seed in range(12) for params in kinds])
    steps.draft()
    lengths = Counter()
    greedy = [i for i, slot in steps.slots.items() if slot.params.temperature == 0.0]
    assert all(steps.slots[i].chances is None for i in greedy)
    for i in set(steps.slots) - set(greedy):
        check_chances(steps.slots[i])
    wanted = {i: judged_on_the_host(s) for i, s in steps.slots.items() if i not in greedy}
    found = steps.tokens()
    for i, expected in wanted.items():
        same = DEPTH if steps.slots[i].drawable else DEPTH + 1
        assert found[i][:same] == expected[:same]
        assert len(found[i]) == len(expected)
        lengths[len(expected)] += 1
    assert set(lengths) == {1, 2, 3}
    plain = Steps([slot.params for slot in steps.slots.values()])
    plain.draft()
    exact = plain.tokens(rejecting=False)
    assert [found[i] for i in greedy] == [exact[i] for i in greedy]
    assert [found[i] for i in wanted] != [exact[i] for i in wanted]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("params", "count"),
    [
        (SamplingParams(temperature=1.0), 400),
        *(
            pytest.param(params, 8000, marks=pytest.mark.gpu)
            for params in (SamplingParams(temperature=0.7, top_k=4), SamplingParams(temperature=1))
        ),
    ],
)
def test_tokens_are_those_of_the_target(params: SamplingParams, count: int) -> None:
    """Chi-square over the first two tokens together, from drafts and noise of the device: a
    quantile of one in 10,000. The second of those whose draft was refused is drawn anew."""
    steps = Steps([replace(params, seed=seed) for seed in range(count)])
    steps.draft()
    given = steps.tokens()
    pairs: Counter = Counter()
    short = [i for i, ids in enumerate(given) if len(ids) == 1]
    rows = TARGETS[[given[i][0] for i in short]]
    wanted = [(row, replace(params, seed=i), 2, 0) for row, i in enumerate(short)]
    drawn = draw(rows.contiguous(), draws(wanted, VOCAB)).tolist()
    pairs.update((given[i][0], token) for i, token in zip(short, drawn, strict=True))
    pairs.update(ids[:2] for ids in given if len(ids) > 1)
    first = chances_of(0, params)
    cells = product(range(VOCAB), repeat=2)
    means = {(a, b): float(first[a] * chances_of(a, params)[b]) * count for a, b in cells}
    assert chi_square(pairs, {cell: mean for cell, mean in means.items() if mean > 0})
    assert 1.3 * count < sum(map(len, given)) < 2.8 * count


def test_a_draft_of_no_numbers_was_certain() -> None:
    """Whatever is kept of it: it is accepted as often as the target gives it."""
    steps = Steps([SamplingParams(temperature=1.0, seed=seed) for seed in range(3)])
    nan = torch.full((3, VOCAB), float("nan"), device=DEVICE)
    holed = TARGETS[:3].clone()
    holed[:, 5] = float("nan")
    for logits in (nan, holed):
        steps.draw(0, logits)
        steps.land()
        assert len({slot.proposed[0] for slot in steps.slots.values()}) == 1
        for slot in steps.slots.values():
            assert slot.chances is not None
            assert set(slot.chances[0][0].tolist()) == {slot.proposed[0]}
            assert set(slot.chances[1][0].tolist()) == {1.0}


class Weighed(Noted):
    """An engine whose drafts are accepted by their chances. Each of them is what its odds and the
    device's noise give, and both are those of every other request with the same text and keys."""

    def __init__(self, parts: tuple[GpuModel, object], **options) -> None:
        super().__init__(*parts, accept="rejection", **options)
        self.odds: dict[tuple, list] = {}
        runner = self.engine.device
        assert runner.rejecting
        noted = runner.drafter.proposed

        def checked():
            found = noted()
            for number, places in (found.places if found else {}).items():
                self._check(runner.slots[number], found, places)
            return found

        runner.drafter.proposed = checked

    def _check(self, slot: GpuSlot, found: Proposed, places: list[int]) -> None:
        known = slot.ids(0, len(slot.tokens) + len(slot.output))
        candidates, scores = found.odds.candidates[places], found.odds.scores[places]
        rows = torch.full((len(places), self.model.info.vocab_size), -torch.inf, device=DEVICE)
        rows.scatter_(1, candidates.long(), scores)
        params = replace(slot.params, top_k=0, top_p=1.0)
        if params.temperature > 0.0:
            wanted = [(i, params, len(known) + i, slot.choice) for i in range(len(places))]
            ids = draw(rows, draws(wanted, rows.shape[1])).tolist()
        else:
            ids = rows.argmax(1).tolist()
        assert ids == found.ids[places].tolist()
        key = known, params.temperature, params.seed, slot.choice
        both = [candidates.tolist(), scores.tolist()]
        assert self.odds.setdefault(key, both) == both


def parts_of(kind: str, bundled: bool = False) -> tuple[GpuModel, object]:
    """A random target of two layers or the bundled one, and a drafter that says its chances."""
    if kind == "dflash":
        model, drafter = dflash.bundled(torch.float32) if bundled else dflash.small()
        return model, dataclasses.replace(drafter, chances=True)
    model, layer = mtp.bundled(torch.float32) if bundled else mtp.small()
    groups = (DraftGroup(mtp.GROUP, multiple=model.pool, dealt=True),)
    return model, GpuMtpDrafter(layer, 2, groups, chances=True)


@pytest.mark.parametrize("kind", ["mtp:2", "dflash"])
def test_the_option_reaches_the_device(kind: str) -> None:
    model = load_model(BUNDLED, torch.float32)
    for word in ACCEPT:
        drafter = load_drafter(parse_speculation(kind, word), None, BUNDLED, model)
        assert drafter is not None
        assert draft_on_gpu(drafter, DEVICE).chances == (word == "rejection")


@pytest.mark.parametrize("kind", ["mtp", "dflash"])
def test_a_thin_thread(kind: str) -> None:
    """Beside a greedy request, whose answer is the plain one; then restored: the same proposals
    with the same chances, and the same answer."""
    parts, ids = parts_of(kind), prompt(9, 3)
    options = {"frames": 300, "max_running": 2, "token_budget": 64}
    how = SamplingParams(temperature=1.0, seed=4, logprobs=1)
    plain = GpuReal(parts[0], **options).ask(ids, 3)
    real = Weighed(parts, **options)
    both = [real.send(ids, 3), real.send(ids, 4, params=how, cache=False)]
    real.drain()
    assert answer(both[0]) == answer(plain)
    made = len(real.odds)
    assert any(temperature > 0.0 for _, temperature, *_ in real.odds)
    again = real.ask(ids, 4, params=how)
    assert again.restored == 9
    assert answer(again) == answer(both[1])
    assert len(real.odds) == made


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("kind", ["mtp", "dflash"])
def test_an_engines_answers_have_the_plain_distribution(kind: str, graphs: bool) -> None:
    """Chi-square over three tokens, the last two of them drafted, with what a plain engine says of
    each text: a quantile of one in 10,000."""
    options = {"frames": 3000, "max_running": 32, "token_budget": 256, "graphs": graphs}
    parts, start, count = parts_of(kind, bundled=True), text("bundled", 225, 7), 2000
    plain = GpuReal(parts[0], **options)
    # In the middle of a record, which the drafters know; as hot as to leave them in doubt.
    how = SamplingParams(temperature=8.0, top_k=3, logprobs=3)
    means = {(): float(count)}
    for _ in range(3):
        longer = {}
        for begun, mean in means.items():
            ((_, entry),) = answer(plain.ask((*start, *begun), 1, params=how))
            weights = {id: np.exp(value / how.temperature) for id, value in entry.top}
            whole = sum(weights.values())
            longer |= {(*begun, id): mean * weight / whole for id, weight in weights.items()}
        means = longer
    real = Weighed(parts, **options)
    found: Counter = Counter()
    for begin in range(0, count, 500):
        asked = [
            real.send(start, 4, params=replace(how, logprobs=None, seed=seed))
            for seed in range(begin, begin + 500)
        ]
        real.drain()
        found.update(tuple(reply.ids()[:3]) for reply in asked)
    assert chi_square(found, means)
    assert sum(real.engine.scheduler.depth.tally.accepted) > count // 4
