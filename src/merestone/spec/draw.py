"""Drafting a token as the target will draw it: the same noise, so that they agree more often.

Knows a row of logits and the key of its noise. Must not know drafters. What depends on the tokens
so far (penalties, bans) is left to the target: a draft that ignores it is merely rejected.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from msgspec.structs import replace
from torch import Tensor

from merestone.ops.sampler import greedy, gumbel, plain_greedy, sample
from merestone.spec.interface import Continuation


def draw(logits: Tensor, wanting: Sequence[Continuation], ahead: int) -> Tensor:
    """Ids [S] int64 for ``ahead`` positions after each newest token, from logits [S, V] fp32."""
    ids = greedy(logits)
    nothing = torch.zeros(0, dtype=torch.int64)
    for i, c in enumerate(wanting):
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
                position=c.position + ahead,
                choice=c.choice,
            )
    return ids


def with_noise(
    scores: Tensor, ids: Tensor, wanting: Sequence[Continuation], ahead: int, vocab: int
) -> Tensor:
    """Scores [S, C] of the candidates ``ids`` [S, C], as the target would disturb them: at a
    temperature, divided by it and with the noise that it adds to these of its ``vocab`` ids."""
    scores = scores.double()
    for i, c in enumerate(wanting):
        if c.params.temperature > 0.0:
            noise = gumbel(vocab, c.params.seed, c.choice, c.position + ahead)
            scores[i] = scores[i] / c.params.temperature + noise[ids[i]]
    return scores
