"""From a row of logits to a token: penalties, cuts, and noise that depends on nothing but its key.

Knows one row at a time, so that its neighbours cannot matter. Must not know requests or slots. The
token is the argmax of the processed logits plus Gumbel noise keyed by (seed, choice, position):
a sample of the softmax, and the same one whenever the same position is sampled again. Ties go to
the lowest id.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from merestone.sched.plan import SamplingParams, TokenLogprob

_WORD = (1 << 64) - 1
ACCEPTANCE, REMAINDER = 1, 2
"""Streams of noise of a position besides the first: one that drafts share cannot judge them."""


def plain_greedy(params: SamplingParams) -> bool:
    """Is the token simply the best of the raw logits?"""
    return params.temperature == 0.0 and not (
        params.logit_bias or params.banned or penalised(params)
    )


def penalised(params: SamplingParams) -> bool:
    """Do the tokens so far change the logits?"""
    neutral = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    return neutral != (1.0, 0.0, 0.0)


def greedy(rows: Tensor) -> Tensor:
    """The best id of each row, [M, V] -> [M] int64; ties go to the lowest id."""
    return rows.argmax(1)


class Draft(NamedTuple):
    """A token drawn from q: ids [M] and their probabilities [M], all others have none. Without
    them it was certain."""

    token: int
    ids: Tensor | None = None
    probabilities: Tensor | None = None


def sample(
    row: Tensor,
    params: SamplingParams,
    *,
    prompt: Tensor,
    output: Tensor,
    position: int,
    choice: int,
    draft: Draft | None = None,
) -> int:
    """The token of ``position`` (its own, not that of the row before it).

    row [V] fp32, raw logits. prompt and output: ids so far, [P] and [O] int64 (read for penalties
    and ``min_tokens`` only). ``choice`` numbers the answers of one request. With a ``draft`` the
    token is still one of the row's distribution, but depends on what was drafted: see `_judge`.
    """
    scores = process(row, params, prompt=prompt, output=output)
    if params.temperature == 0.0:
        return int(scores.argmax())
    # From the maximum down: a tiny temperature then makes -inf of the others, never inf of all.
    scores = truncate((scores - scores.max()).double() / params.temperature, params)
    key = params.seed, choice, position
    if draft is not None:
        return _judge(scores, draft, key)
    return int((scores + gumbel(row.shape[0], *key)).argmax())


def _judge(scores: Tensor, draft: Draft, key: tuple[int, int, int]) -> int:
    """The draft, with the probability p / q (at most 1); else a token of what p has above q.

    So every token comes with its probability under p, the softmax of scores [V]. The noise is none
    that a drafter shares. Source: Leviathan et al., arXiv 2211.17192.
    """
    p = scores.exp()
    p /= p.sum()
    q = torch.zeros_like(p)
    if draft.ids is None or draft.probabilities is None:
        q[draft.token] = 1.0
    else:
        q[draft.ids] = draft.probabilities.double()
    chance = float(_uniform(1, *key, ACCEPTANCE)[0])
    if chance * float(q[draft.token]) < float(p[draft.token]):
        return draft.token
    left = (p - q).clamp_(min=0.0).log_()
    return int((left + gumbel(scores.shape[0], *key, stream=REMAINDER)).argmax())


def process(row: Tensor, params: SamplingParams, *, prompt: Tensor, output: Tensor) -> Tensor:
    """Penalties, bias and bans, in this order: [V] -> a new [V] fp32.

    Repetition counts prompt and output (logits divided by it if positive, else multiplied, as in
    transformers), presence and frequency the output alone (subtracted, as in OpenAI's definition).
    """
    row = row.float().clone()
    size = row.shape[0]
    if params.repetition_penalty != 1.0:
        known = torch.unique(torch.cat([prompt, output]))
        values = row[known]
        factor = params.repetition_penalty
        row[known] = torch.where(values > 0, values / factor, values * factor)
    if params.presence_penalty or params.frequency_penalty:
        counts = torch.bincount(output, minlength=size).float()
        row -= counts * params.frequency_penalty + (counts > 0) * params.presence_penalty
    if params.logit_bias:
        ids, biases = zip(*params.logit_bias, strict=True)
        row[list(ids)] += row.new_tensor(biases)
    if params.banned and output.shape[0] < params.min_tokens:
        row[list(params.banned)] = -math.inf
    return row


def truncate(scores: Tensor, params: SamplingParams) -> Tensor:
    """top_k, then top_p of what is left, and min_p: [V] scores, the rest set to -inf.

    Each keeps a prefix of the ids sorted by (score, id), so the shortest prefix decides.
    """
    size = scores.shape[0]
    top_k = params.top_k if 0 < params.top_k < size else size
    if top_k == size and params.top_p >= 1.0 and params.min_p <= 0.0:
        return scores
    ordered, ids = scores.sort(descending=True, stable=True)
    keep = top_k
    if params.top_p < 1.0:
        share = (ordered[:top_k] - ordered[0]).double().exp().cumsum(0)
        keep = 1 + int((share[:-1] < params.top_p * share[-1]).sum())
    if params.min_p > 0.0:
        keep = min(keep, int((ordered >= ordered[0] + math.log(params.min_p)).sum()))
    cut = scores.new_full((size,), -math.inf)
    kept = ids[: max(keep, 1)]
    cut[kept] = scores[kept]
    return cut


def gumbel(size: int, seed: int, choice: int, position: int, stream: int = 0) -> Tensor:
    """Standard Gumbel noise, [size] fp64, a function of the arguments alone."""
    return torch.from_numpy(-np.log(-np.log(_uniform(size, seed, choice, position, stream))))


def _uniform(size: int, seed: int, choice: int, position: int, stream: int) -> NDArray[np.float64]:
    """Uniform noise, [size], a function of the arguments alone (Philox)."""
    # Arrays: numpy would turn a list with a large number into floats.
    key = np.array([seed & _WORD, choice & _WORD], dtype=np.uint64)
    source = np.random.Philox(key=key, counter=np.array([0, 0, position, stream], dtype=np.uint64))
    # In the open interval (0, 1): both logarithms of a Gumbel number are finite.
    return np.asarray(((source.random_raw(size) >> np.uint64(11)) + 0.5) * 2.0**-53, np.float64)


def logprob(row: Tensor, token: int, top: int) -> TokenLogprob:
    """Log probability and rank (from 1) of ``token`` under the raw logits [V], and the ``top`` best
    ids. Neither temperature nor penalties count."""
    row = row.float().clone()
    logs = (row - row.max()).double()
    logs -= logs.exp().sum().log()
    value = row[token]
    ahead = (row > value).sum() + (row[:token] == value).sum()
    best: tuple[tuple[int, float], ...] = ()
    if top > 0:
        ids = row.sort(descending=True, stable=True).indices[:top]
        best = tuple(zip(ids.tolist(), logs[ids].tolist(), strict=True))
    return TokenLogprob(token, float(logs[token]), best, int(ahead) + 1)
