"""Drafting tokens as the target will draw them: with the same noise, so that they agree more often.

Knows rows of logits and the keys of their noise. Must not know drafters. What depends on the
tokens so far (penalties, bans) is left to the target: a draft that ignores it is merely rejected.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from msgspec.structs import replace
from torch import Tensor

from merestone.ops.sampler import greedy, gumbel, plain_greedy, sample
from merestone.spec.interface import Continuation, Drafts

AMONG = 16
"""Candidates that a draft with known chances is drawn from."""


class Draws:
    """The ids of proposals for ``wanting``, one position after another.

    ``chances``: only draw from a few candidates, and remember with which probabilities.
    """

    def __init__(self, wanting: Sequence[Continuation], chances: bool = False) -> None:
        self._wanting = wanting
        self._chances = chances
        self._ids: list[Tensor] = []
        self._candidates: list[Tensor] = []
        self._probabilities: list[Tensor] = []

    def __len__(self) -> int:
        return len(self._ids)

    def draw(self, logits: Tensor) -> Tensor:
        """Ids [S] int64 of the next position, from logits [S, V] fp32."""
        if self._chances:
            best = logits.sort(dim=1, descending=True, stable=True).indices[:, :AMONG]
            candidates = best.sort(1).values
            return self.among(logits.gather(1, candidates), candidates, logits.shape[1])
        ids = greedy(logits)
        nothing = torch.zeros(0, dtype=torch.int64)
        for i, c in enumerate(self._wanting):
            params = replace(
                c.params,
                repetition_penalty=1.0,
                presence_penalty=0.0,
                frequency_penalty=0.0,
                banned=(),
            )
            if not plain_greedy(params):
                ids[i] = sample(
                    logits[i],
                    params,
                    prompt=nothing,
                    output=nothing,
                    position=c.position + len(self) + 1,
                    choice=c.choice,
                )
        self._ids.append(ids)
        return ids

    def among(self, scores: Tensor, candidates: Tensor, vocab: int) -> Tensor:
        """Ids [S] of the next position, from scores [S, M] of candidates [S, M], ascending: divided
        by the temperature, with the noise that the target adds to these of its ``vocab`` ids."""
        scores = scores.double()
        noise = torch.zeros_like(scores)
        for i, c in enumerate(self._wanting):
            if c.params.temperature > 0.0:
                scores[i] /= c.params.temperature
                position = c.position + len(self) + 1
                noise[i] = gumbel(vocab, c.params.seed, c.choice, position)[candidates[i]]
        # The lowest of equal ones wins.
        ids = candidates.gather(1, (scores + noise).argmax(1, keepdim=True))[:, 0]
        self._ids.append(ids)
        if self._chances:
            self._candidates.append(candidates)
            self._probabilities.append(scores.softmax(1))
        return ids

    def drafts(self) -> Drafts:
        """All of them."""
        ids = torch.stack(self._ids, 1)
        if not self._chances:
            return Drafts(ids)
        return Drafts(ids, torch.stack(self._candidates, 1), torch.stack(self._probabilities, 1))
