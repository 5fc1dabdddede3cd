"""DFlash drafts on made-up features: equal bits, always, and nothing left behind."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from merestone.models.dflash import DFlash
from merestone.models.dflash_config import DFlashConfig
from merestone.sched.plan import SamplingParams
from merestone.spec.dflash import DFlashDrafter
from spec_models.drafting import PAGE, Pages, Text, fork, make_text, step
from spec_models.targets import DRAFT, RandomDraft

HIDDEN, VOCAB, TAPS = 64, 320, (1, 3)
TWO = dataclasses.replace(DRAFT, windows=(32, 32))
ONE = dataclasses.replace(TWO, selector=None)
WHOLE = dataclasses.replace(TWO, windows=(32, None))
CASES = [
    pytest.param(TWO, torch.float32, id="v2"),
    pytest.param(TWO, torch.bfloat16, id="bf16"),
    pytest.param(ONE, torch.float32, id="v1"),
    pytest.param(WHOLE, torch.float32, id="one-full-layer"),
]


class Random(RandomDraft):
    """A source of weights, and a target that embeds and reads out."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.embedding = self.draw("", (VOCAB, HIDDEN)).to(dtype) * 8
        self.head = self.draw("", (VOCAB, HIDDEN)).to(dtype)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.embedding[tokens]

    def logits(self, hidden: Tensor) -> Tensor:
        # Row by row: this target's products do not depend on their mates.
        return torch.stack([self.head @ row for row in hidden]).float()


def build(config: DFlashConfig, dtype: torch.dtype = torch.float32) -> DFlashDrafter:
    random = Random(dtype)
    return DFlashDrafter(DFlash(config, random, dtype, 4), random)  # type: ignore[arg-type]


def text(length: int, seed: int, dtype: torch.dtype = torch.float32) -> Text:
    return make_text(length, seed, VOCAB, HIDDEN, len(TAPS) * HIDDEN, dtype)


def alone(drafter: DFlashDrafter, source: Text, end: int, depth: int = 7) -> list[int]:
    fresh = dataclasses.replace(source, done=0, tables={})
    return step(drafter, Pages(drafter), [(fresh, end, True)], depth)[0]


@pytest.mark.parametrize(("config", "dtype"), CASES)
def test_any_split_and_company(config: DFlashConfig, dtype: torch.dtype) -> None:
    drafter = build(config, dtype)
    lengths = [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 130]
    texts = [text(length, seed, dtype) for seed, length in enumerate(lengths)]
    expected = [alone(drafter, t, n) for t, n in zip(texts, lengths, strict=True)]
    pages, source = Pages(drafter, seed=1), torch.Generator().manual_seed(2)
    while any(t.done < n for t, n in zip(texts, lengths, strict=True)):
        work = []
        for t, n in zip(texts, lengths, strict=True):
            count = [0, 1, 5, 70][int(torch.randint(4, (1,), generator=source))]
            if count and t.done < n:
                work.append((t, min(t.done + count, n), False))
        if work:
            step(drafter, pages, work, 7)
    # Some were observed to the end before, as after a restore; others have a row to observe.
    order = torch.randperm(len(texts), generator=source).tolist()
    got = step(drafter, pages, [(texts[i], lengths[i], True) for i in order], 7)
    assert got == [expected[i] for i in order]


@pytest.mark.parametrize("end", [31, 32, 33, 47, 48, 49, 64, 65])
def test_restored_equals_cold_beside_a_live_producer(end: int) -> None:
    """Two readers resume at ``end`` while the producer goes on writing into the shared page."""
    drafter, producer = build(TWO), text(130, 5)
    expected = [alone(drafter, producer, n) for n in (end, end + 1)]
    pages = Pages(drafter)
    step(drafter, pages, [(producer, end, False)], 7)
    readers = [fork(producer, end, pages) for _ in range(2)]
    step(drafter, pages, [(producer, end + 20, False)], 7)
    # What lies before the window may be gone.
    for frame in readers[0].tables["window"][: (end - 31) // PAGE]:
        pages.spoil(frame)
    assert step(drafter, pages, [(r, end, True) for r in readers], 7) == [expected[0]] * 2
    assert step(drafter, pages, [(readers[1], end + 1, True)], 7) == [expected[1]]


def test_a_block_leaves_nothing_behind() -> None:
    drafter, source = build(TWO), text(70, 7)
    observed, drafted = Pages(drafter), Pages(drafter)
    for pages, wants in ((observed, False), (drafted, True)):
        step(drafter, pages, [(dataclasses.replace(source, tables={}), 60, wants)], 7)
    for a, b in zip(observed.bytes(), drafted.bytes(), strict=True):
        assert torch.equal(a, b)


def test_only_rows_of_a_possible_window_are_written() -> None:
    """A pass from before the anchor's window has no pages there, or somebody else's."""
    drafter, source = build(TWO), text(130, 8)
    pages = Pages(drafter)
    step(drafter, pages, [(source, 130, False)], 7)
    keys = torch.cat([pages.rows(4, "k")[frame] for frame in source.tables["window"]])[:130]
    assert keys.isfinite().flatten(1).all(1).tolist() == [row >= 128 - 31 for row in range(130)]


def test_fewer_drafts_are_the_first_of_the_block() -> None:
    drafter, source = build(TWO), text(45, 9)
    whole = alone(drafter, source, 45)
    assert [alone(drafter, source, 45, depth) for depth in (1, 4)] == [whole[:1], whole[:4]]


@pytest.mark.parametrize("config", [ONE, TWO], ids=["v1", "v2"])
def test_the_window_decides(config: DFlashConfig) -> None:
    """A changed row inside the window changes the block, one before it does not."""
    drafter, source = build(config), text(90, 10)
    for row, same in ((90 - 32, True), (90 - 31, False), (89, False)):
        assert source.features is not None
        changed = dataclasses.replace(source, features=source.features.clone())
        assert changed.features is not None
        changed.features[row] *= -3.0
        assert (hidden_of(drafter, changed) == hidden_of(drafter, source)) is same


def hidden_of(drafter: DFlashDrafter, source: Text) -> bytes:
    """The block's bits after everything was observed at once."""
    fresh, pages = dataclasses.replace(source, done=0, tables={}), Pages(drafter)
    step(drafter, pages, [(fresh, 90, False)], 7)
    draft = drafter.draft
    blocks = draft.blocks(torch.tensor([90]), [torch.tensor(fresh.tables["window"])], PAGE)
    embedded = torch.ones(1, 8, HIDDEN)
    return draft.forward(embedded, blocks, pages).numpy().tobytes()


@pytest.mark.parametrize("config", [ONE, TWO], ids=["v1", "v2"])
def test_sampled_drafts_share_the_targets_noise(config: DFlashConfig) -> None:
    drafter, source = build(config), text(40, 11)
    plain, seen = alone(drafter, source, 40), set()
    for seed in range(6):
        source.params = SamplingParams(temperature=1.0, seed=seed)
        drafts = alone(drafter, source, 40)
        assert drafts == alone(drafter, source, 40)
        seen.add(tuple(drafts))
    assert len(seen) > 1
    source.params = SamplingParams(temperature=1e-6, seed=1)
    assert alone(drafter, source, 40) == plain
