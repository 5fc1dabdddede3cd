"""Drafting with a DFlash or DFlash2 draft: one block of masks for a step's whole proposal.

Knows the rows of a step and the draft. Must not know who verifies. Context rows (projected keys
and values of committed rows) lie by position in a group of its own; a block is computed beside
them and leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from merestone.layers.rows import places
from merestone.layers.state import Field, StateViews
from merestone.models.dflash import GROUP, DFlash
from merestone.models.interface import Model
from merestone.spec.draw import Draws
from merestone.spec.interface import Continuation, DraftGroup, DraftRows, Drafts


class DFlashDrafter:
    """A :class:`merestone.spec.interface.Drafter`. ``model`` embeds and reads out."""

    lag = 0

    def __init__(self, draft: DFlash, model: Model, *, chances: bool = False) -> None:
        config = draft.config
        self.chances = chances
        self.draft = draft
        self._model = model
        self.depth = config.block - 1
        self.features = config.taps
        self.groups: tuple[DraftGroup, ...] = (DraftGroup(GROUP, window=config.context),)

    def fields(self) -> tuple[Field, ...]:
        return self.draft.fields()

    @torch.inference_mode()
    def observe(self, rows: DraftRows, state: StateViews) -> None:
        reach = self.draft.config.context
        kept = []
        for s in rows.batch.segments:
            # Below the window of the anchor no boundary to come has pages.
            first = s.start if reach is None else max(s.start, s.advance - reach)
            kept.append((s, torch.arange(first, s.end)))
        if not kept:
            return
        assert rows.features is not None
        at = torch.cat([positions + (s.row - s.start) for s, positions in kept])
        positions = torch.cat([positions for _, positions in kept])
        where = places(kept, GROUP, state.page(GROUP))
        self.draft.keep(rows.features[at], positions, where, state)

    @torch.inference_mode()
    def propose(self, rows: DraftRows, state: StateViews) -> Drafts:
        wanting, config = rows.continuations, self.draft.config
        depth = max(c.depth for c in wanting)
        positions = torch.tensor([c.position for c in wanting])
        blocks = self.draft.blocks(positions, [c.pages[GROUP] for c in wanting], state.page(GROUP))
        ids = torch.full((len(wanting), config.block), config.mask_id)
        ids[:, 0] = torch.tensor([c.token for c in wanting])
        embedded = self._model.embed(ids.flatten()).view(*ids.shape, -1)
        hidden = self.draft.forward(embedded, blocks, state)[:, 1 : depth + 1].flatten(0, 1)
        logits = self._model.logits(hidden) * config.logit_scale
        return self._choose(hidden, logits, ids[:, 0], wanting, depth)

    def _choose(
        self,
        hidden: Tensor,
        logits: Tensor,
        newest: Tensor,
        wanting: Sequence[Continuation],
        depth: int,
    ) -> Drafts:
        """Rows [S depth, ...] -> ids [S, depth], each next one knowing the one before it."""
        draws = Draws(wanting, self.chances)
        logits = logits.view(len(wanting), depth, -1)
        selector = self.draft.selector
        if selector is None:
            for i in range(depth):
                draws.draw(logits[:, i])
            return draws.drafts()
        candidates = selector.candidates(logits.flatten(0, 1)).view(len(wanting), depth, -1)
        unary = logits.gather(2, candidates)
        projected = selector.project(hidden).view(len(wanting), depth, -1)
        before = newest
        for i in range(depth):
            own = candidates[:, i]
            scores = unary[:, i] + selector.edges(projected[:, i], before, own)
            before = draws.among(scores, own, logits.shape[2])
        return draws.drafts()
