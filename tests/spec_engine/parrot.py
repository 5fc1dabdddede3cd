"""A drafter that knows the answers, and is right as often as it is told to be.

Its state is real: of every committed row it keeps a digest of the bits that it was given, and
whether a draft is right depends on all the digests that a proposal may read. So a restored run
whose drafter state differs in one bit is told apart by what it accepts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from merestone.layers.state import Field, StateViews
from merestone.spec.interface import DraftGroup, DraftRows, Drafts

LAYER = 1000
PRIME = 1_000_003


class Parrot:
    """``book``: all ids, by (seed, choice) of who is answered. ``accuracy`` of the drafts.

    With a ``window`` it reads features of the last so many rows, else (with a lag) hidden rows and
    next ids of all. ``proposed``: what it proposed, by (seed, choice, position of the newest id).
    """

    def __init__(self, depth: int, accuracy: float, window: int | None = None) -> None:
        self.depth = depth
        self.accuracy = accuracy
        self.window = window
        self.lag = 0 if window else 1
        self.features = (1,) if window else ()
        self.home = "window" if window else "mtp"
        self.groups = (DraftGroup(self.home, window=window),)
        self.book: dict[tuple[int, int], tuple[int, ...]] = {}
        self.proposed: dict[tuple[int, int, int], list[int]] = {}

    def fields(self) -> tuple[Field, ...]:
        return (
            Field(LAYER, "digest", self.home, (1,), torch.int64),
            Field(LAYER, "filler", self.home, (50,), torch.float32),
        )

    def observe(self, rows: DraftRows, state: StateViews) -> None:
        given = rows.hidden if rows.features is None else rows.features
        bits = given.contiguous().view(torch.int32).long()
        digests = (bits * (torch.arange(bits.shape[1]) * PRIME + 1)).sum(1)
        if self.lag:
            assert int(rows.batch.tokens.min()) >= 0, "a lagging row without its next id"
            digests = digests * PRIME + rows.batch.tokens
        for s in rows.batch.segments:
            first = s.start if self.window is None else max(s.start, s.advance - self.window)
            at = torch.arange(first, s.end)
            view = state.rows(LAYER, "digest")
            view[self._places(s.pages, at, state)] = digests[at - s.start + s.row, None]

    def propose(self, rows: DraftRows, state: StateViews) -> Drafts:
        depth = max(one.depth for one in rows.continuations)
        assert 0 < depth <= self.depth
        ids = torch.zeros(len(rows.continuations), depth, dtype=torch.int64)
        for place, one in enumerate(rows.continuations):
            first = 0 if self.window is None else max(0, one.position - self.window)
            at = torch.arange(first, one.position)
            read = state.rows(LAYER, "digest")[self._places(one.pages, at, state)]
            digest = tuple(read[:, 0].tolist())
            assert -1 not in digest, "a row that nobody wrote"
            key = (one.params.seed, one.choice)
            for step, token in enumerate(self.book.get(key, ())[one.position + 1 :][:depth]):
                wrong = hash((digest, one.token, step)) % 1000 >= 1000 * self.accuracy
                ids[place, step] = token ^ 1 if wrong else token
            self.proposed[*key, one.position] = ids[place, : one.depth].tolist()
        return Drafts(ids)

    def _places(self, pages: dict[str, Tensor], at: Tensor, state: StateViews):
        frames = pages[self.home][at // state.page(self.home)]
        assert bool((frames >= 0).all()), "a row without a page"
        return frames, at % state.page(self.home)
