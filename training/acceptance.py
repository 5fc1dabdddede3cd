"""How many drafted tokens a target accepts, counted over replies of held-out conversations.

Simulated from one pass over the true tokens: at a place from which the target would go on, drafts
are accepted up to the first that is not the target's own choice; the next step begins after them
and the token that the target adds. Replies that the target itself gets wrong are left out, since
their true tokens are not what it would say.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from training.draft import Draft
from training.layers import Rows
from training.model import Target
from training.rows import Examples
from training.train_drafts import Lesson, embed_blocks, look


@dataclass(slots=True)
class Acceptance:
    """``accepted`` drafts in ``steps`` verification steps."""

    accepted: int = 0
    steps: int = 0

    @property
    def mean(self) -> float:
        return self.accepted / max(self.steps, 1)

    def walk(self, good: Tensor, first: int, last: int) -> None:
        """``good`` [L, K] bool: whether draft k after the token at a place is the true one. The
        reply's first token stands at ``first`` and is known, its end token at ``last``."""
        place = first
        while place < last:
            run = good[place].long().cumprod(0).sum().item()
            taken = min(int(run), last - place)
            self.accepted += taken
            self.steps += 1
            place += taken + 1


@torch.no_grad()
def mtp_drafts(model: Target, lesson: Lesson, rows: Rows, passes: int, dtype: torch.dtype) -> Tensor:
    """[B, L, passes] bool: whether pass k at a place, all before it right, drafts the true token.

    Place p holds the last known token: pass k drafts the token at p + k from row p + k - 2.
    """
    following = lesson.ids[:, 1:]
    embedded = model.embed(following.flatten(), dtype)
    hidden = lesson.hidden
    found = []
    for number in range(passes):
        out, _ = model.mtp(embedded, hidden, rows)
        out = out.view(rows.batch, rows.length, -1)
        drafted = model.logits(out).argmax(-1)  # row r drafts the token at r + 2
        right = drafted[:, :-1] == lesson.ids[:, 2:]
        place = torch.zeros_like(lesson.inside)
        # The token at p + k, k = number + 1, comes from row p + number - 1.
        start = 1 if number == 0 else 0
        for_place = right[:, max(number - 1, 0) :]
        place[:, start : start + for_place.shape[1]] = for_place
        found.append(place)
        hidden = torch.roll(out, 1, dims=1).flatten(0, 1)
    return torch.stack(found, dim=-1)
