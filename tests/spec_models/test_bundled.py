"""The bundled model's drafters against the code that trained them, on held-out conversations."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from training.acceptance import Acceptance, draft_good, mtp_good
from training.dialogue import load_tokenizer
from training.evaluate import Shipped
from training.train_drafts import Lesson, look
from training.vocabulary import MASK

import merestone
from merestone.models.interface import Model
from merestone.models.loader import load_dflash, load_model, load_mtp
from merestone.spec.dflash import DFlashDrafter
from merestone.spec.interface import Drafter
from merestone.spec.mtp import MtpDrafter
from spec_models.drafting import Pages, Text, everywhere

MODEL = Path(merestone.__file__).parent / "assets" / "merestone-tiny"
ROWS, LENGTH = 2, 512


@pytest.fixture(scope="module")
def shipped() -> Shipped:
    return Shipped.load(MODEL, torch.device("cpu"))


@pytest.fixture(scope="module")
def model() -> Model:
    return load_model(MODEL, torch.float32)


class Lessons:
    """What the training code's target says of held-out conversations, and where it replies."""

    def __init__(self, shipped: Shipped, rows: int, length: int) -> None:
        self.rows = shipped.rows(rows, length)
        examples = shipped.held_out(7, rows, length)
        self.lesson: Lesson = look(shipped.model, examples, self.rows, torch.float32)
        right = self.lesson.best == self.lesson.ids[:, 1:]
        self.replies = [
            (row, span.start, span.end)
            for row, spans in enumerate(examples.spans)
            for span in spans
            if span.end < length and bool(right[row, span.start - 1 : span.end].all())
        ]

    def places(self) -> list[tuple[int, int]]:
        return [(row, place) for row, start, end in self.replies for place in range(start, end)]

    def good(self, drafter: Drafter, features: bool) -> Tensor:
        """[B, L, K] bool: are the first drafts after a known token right?"""
        good = torch.zeros(*self.lesson.inside.shape, drafter.depth, dtype=torch.bool)
        for row in range(self.rows.batch):
            ids = self.lesson.ids[row].tolist()
            places = [place for r, place in self.places() if r == row]
            cut = (self.rows.batch, self.rows.length, -1)
            text = Text(
                ids,
                self.lesson.hidden.view(cut)[row],
                self.lesson.features[row] if features else None,
            )
            drafts = everywhere(drafter, Pages(drafter), text, places)
            for place, proposed in zip(places, drafts, strict=True):
                true = ids[place + 1 : place + 1 + drafter.depth]
                hits = [a == b for a, b in zip(proposed, true, strict=False)]
                good[row, place, : len(hits)] = torch.tensor(hits)
        return good.cumprod(2).bool()

    def accepted(self, good: Tensor) -> float:
        total = Acceptance()
        for row, start, end in self.replies:
            total.walk(good[row], start, end)
        return total.mean


@pytest.fixture(scope="module")
def lessons(shipped: Shipped) -> Lessons:
    return Lessons(shipped, ROWS, LENGTH)


def test_mtp_drafts_as_it_was_trained_to(shipped: Shipped, model: Model, lessons: Lessons) -> None:
    drafter = MtpDrafter(load_mtp(MODEL, torch.float32), model, 3)
    got = lessons.good(drafter, features=False)
    theirs = mtp_good(shipped.model, lessons.lesson, lessons.rows, 3, torch.float32)
    at = tuple(zip(*lessons.places(), strict=True))
    expected = theirs.cumprod(2).bool()
    # A tie of two ids may fall otherwise.
    assert (got[at] == expected[at]).float().mean() > 0.995
    assert lessons.accepted(got) > 1.0


def test_dflash2_drafts_as_it_was_trained_to(
    shipped: Shipped, model: Model, lessons: Lessons
) -> None:
    drafter = DFlashDrafter(load_dflash(MODEL / "draft", torch.float32), model)
    got = lessons.good(drafter, features=True)
    mask = load_tokenizer(MODEL / "tokenizer.json").token_to_id(MASK)
    assert mask is not None
    theirs = draft_good(
        shipped.model,
        shipped.draft,
        lessons.lesson,
        torch.tensor(lessons.places()),
        mask,
        torch.float32,
    )
    at = tuple(zip(*lessons.places(), strict=True))
    expected = theirs.cumprod(2).bool()
    assert (got[at] == expected[at]).float().mean() > 0.995
    assert lessons.accepted(got) > 1.0
