"""MTP on made-up hidden rows: against the training code's own layer, and equal bits, always."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from merestone.models.config import Glm5NextConfig
from merestone.models.glm5_next import Glm5Next
from merestone.models.glm5_next_mtp import Glm5NextMtp
from merestone.models.tiny_weights import draw
from merestone.sched.plan import SamplingParams
from merestone.spec.mtp import MtpDrafter
from spec_models.drafting import Pages, Text, fork, make_text, step
from spec_models.targets import CONFIG

DENSE = dataclasses.replace(CONFIG, index_topk=512)


def build(config: Glm5NextConfig, depth: int, dtype: torch.dtype) -> MtpDrafter:
    prefix = f"layers.{config.num_layers}."
    tensors = dict(draw(config, 0))
    own = {name: tensors.pop(name) for name in list(tensors) if name.startswith(prefix)}
    return MtpDrafter(Glm5NextMtp(config, own, dtype), Glm5Next(config, tensors, dtype), depth)


def text(length: int, seed: int, dtype: torch.dtype = torch.float32) -> Text:
    return make_text(length, seed, CONFIG.vocab_size, CONFIG.hidden_size, 0, dtype)


def alone(drafter: MtpDrafter, source: Text, end: int, depth: int) -> list[int]:
    """Proposals after one pass over everything, in pages of its own."""
    return step(drafter, Pages(drafter), [(fork_fresh(source), end, True)], depth)[0]


def fork_fresh(source: Text) -> Text:
    return dataclasses.replace(source, done=0, tables={})


CASES = [
    pytest.param(DENSE, torch.float32, id="dense"),
    pytest.param(CONFIG, torch.float32, id="sparse"),
    pytest.param(CONFIG, torch.bfloat16, id="bf16"),
]


@pytest.mark.parametrize(("config", "dtype"), CASES)
def test_any_split_and_company(config: Glm5NextConfig, dtype: torch.dtype) -> None:
    """Rows observed in other parts, beside others, in other pages: the same drafts."""
    drafter = build(config, 5, dtype)
    lengths = [1, 2, 3, 17, 33, 34, 35, 36, 37, 64, 65, 90]
    texts = [text(length, seed, dtype) for seed, length in enumerate(lengths)]
    expected = [alone(drafter, t, n, 5) for t, n in zip(texts, lengths, strict=True)]
    pages, source = Pages(drafter, seed=1), torch.Generator().manual_seed(2)
    while any(t.done < n for t, n in zip(texts, lengths, strict=True)):
        work = []
        for t, n in zip(texts, lengths, strict=True):
            count = [0, 1, 2, 40][int(torch.randint(4, (1,), generator=source))]
            if count and t.done < n:
                work.append((t, min(t.done + count, n), False))
        if work:
            step(drafter, pages, work, 5)
    order = torch.randperm(len(texts), generator=source).tolist()
    got = step(drafter, pages, [(texts[i], lengths[i], True) for i in order], 5)
    assert got == [expected[i] for i in order]


@pytest.mark.parametrize("end", [31, 32, 33, 47, 48, 49])
def test_restored_equals_cold_beside_a_live_producer(end: int) -> None:
    """Two readers resume at ``end`` while the producer goes on writing into the shared page."""
    drafter, producer = build(CONFIG, 3, torch.float32), text(80, 5)
    expected = [alone(drafter, producer, n, 3) for n in (end, end + 1)]
    pages = Pages(drafter)
    # At a boundary the row before it is missing: it needs a token that is not part of it.
    step(drafter, pages, [(producer, end - 1, False)], 3)
    readers = [fork(producer, end - 1, pages) for _ in range(2)]
    step(drafter, pages, [(producer, 80, False)], 3)
    assert step(drafter, pages, [(r, end, True) for r in readers], 3) == [expected[0]] * 2
    assert step(drafter, pages, [(readers[1], end + 1, True)], 3) == [expected[1]]


def test_drafting_writes_no_row_but_the_observed_ones() -> None:
    drafter, source = build(CONFIG, 5, torch.float32), text(60, 7)
    observed, drafted = Pages(drafter), Pages(drafter)
    step(drafter, observed, [(fork_fresh(source), 50, False)], 5)
    step(drafter, drafted, [(fork_fresh(source), 50, True)], 5)
    for a, b in zip(observed.bytes(), drafted.bytes(), strict=True):
        assert torch.equal(a, b)


def test_fewer_passes_draft_the_same_tokens() -> None:
    drafter, source = build(CONFIG, 7, torch.float32), text(45, 8)
    whole = alone(drafter, source, 45, 7)
    for depth in (1, 2, 6):
        assert alone(drafter, source, 45, depth) == whole[:depth]


def test_a_wrong_past_changes_the_drafts() -> None:
    """Or every equality above would pass for nothing."""
    drafter, source = build(CONFIG, 7, torch.float32), text(45, 9)
    changed = dataclasses.replace(source, hidden=source.hidden.clone())
    changed.hidden[20] += 1.0
    assert alone(drafter, source, 45, 7) != alone(drafter, changed, 45, 7)


def test_sampled_drafts_share_the_targets_noise() -> None:
    drafter, source = build(CONFIG, 3, torch.float32), text(40, 10)
    plain = alone(drafter, source, 40, 3)
    seen = set()
    for seed in range(8):
        source.params = SamplingParams(temperature=1.0, seed=seed)
        drafts = alone(drafter, source, 40, 3)
        assert drafts == alone(drafter, source, 40, 3)
        seen.add(tuple(drafts))
    assert len(seen) > 1
    source.params = SamplingParams(temperature=1e-6, seed=1)
    assert alone(drafter, source, 40, 3) == plain
