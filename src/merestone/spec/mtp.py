"""Drafting with a checkpoint's MTP layer: K passes of one layer, each fed with the last one's row.

Knows the rows of a step and the layer. Must not know who verifies. Row p of the layer needs the
token at p + 1, so its group lags by one row. The first pass is the observation of the newest row;
the others are drafted from copies of its keys and write nothing.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from merestone.layers.state import Field, StateViews
from merestone.models.glm5_next_mtp import GROUP, Glm5NextMtp
from merestone.models.interface import Model
from merestone.spec.draw import Draws
from merestone.spec.interface import DraftGroup, DraftRows, Drafts

MOST = 7
"""Passes that are tested; acceptance falls with each."""


@dataclass(frozen=True, slots=True)
class _Observed:
    """Of a step's rows: what drafts are made from, [N, D], and what each row chose to see."""

    hidden: Tensor
    chosen: Tensor | None


class MtpDrafter:
    """A :class:`merestone.spec.interface.Drafter`. ``model`` embeds and reads out. ``chances``: say
    with which probabilities drafts are drawn."""

    lag = 1
    features: tuple[int, ...] = ()

    def __init__(
        self, layer: Glm5NextMtp, model: Model, depth: int, *, chances: bool = False
    ) -> None:
        assert 1 <= depth <= MOST, depth
        self.chances = chances
        self.layer = layer
        self._model = model
        self.depth = depth
        self.groups: tuple[DraftGroup, ...] = (
            DraftGroup(GROUP, multiple=layer.page_multiple, dealt=True),
        )

    def fields(self) -> tuple[Field, ...]:
        return self.layer.fields()

    @torch.inference_mode()
    def observe(self, rows: DraftRows, state: StateViews) -> None:
        if not rows.batch.segments:
            return
        # Nothing of this group is kept from an anchor on only.
        segments = tuple(dataclasses.replace(s, anchor=0, advance=0) for s in rows.batch.segments)
        batch = dataclasses.replace(rows.batch, segments=segments)
        embedded = self._model.embed(batch.tokens)
        rows.batch.scratch["mtp"] = _Observed(
            *self.layer.forward(embedded, rows.hidden, batch, state)
        )

    @torch.inference_mode()
    def propose(self, rows: DraftRows, state: StateViews) -> Drafts:
        wanting = rows.continuations
        depth = max(c.depth for c in wanting)
        observed = rows.batch.scratch["mtp"]
        assert isinstance(observed, _Observed)
        at = torch.tensor([c.row for c in wanting])
        hidden = observed.hidden[at]
        draws = Draws(wanting, self.chances)
        ids = draws.draw(self._model.logits(hidden))
        if depth > 1:
            chosen = None if observed.chosen is None else observed.chosen[at]
            last = torch.tensor([c.position - 1 for c in wanting])
            tables = [c.pages[GROUP] for c in wanting]
            reach = self.layer.reach(last, tables, chosen, depth - 1, state)
        while len(draws) < depth:
            hidden = self.layer.recycle(self._model.embed(ids), hidden, reach)
            ids = draws.draw(self._model.logits(hidden))
        return draws.drafts()
