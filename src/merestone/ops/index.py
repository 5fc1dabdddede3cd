"""The sparse index: pooled keys, their scores, and the choice of the best pools.

Knows pools and rows. Must not know pages. Ties go to the lowest pool. Source: `Glm5NextTextIndexer`
in transformers, which re-pools its whole cache at every call and leaves ties to `topk`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from merestone.ops.gemm import bmm


def pool(keys: Tensor, gates: Tensor, positions: Tensor) -> Tensor:
    """One key per pool: the members' mean, weighted by a softmax over them for each channel.

    keys, gates [n, P, D] of the pools' members, positions [P, D] added to the gates -> [n, D] in
    the keys' dtype; fp32 inside.
    """
    logits = gates.float() + positions
    weights = (logits - logits.amax(1, keepdim=True)).exp_()
    values = weights * keys.float()
    total, mixed = weights[:, 0], values[:, 0]
    for i in range(1, keys.shape[1]):
        total, mixed = total + weights[:, i], mixed + values[:, i]
    return (mixed / total).to(keys.dtype)


def pool_scores(q: Tensor, weights: Tensor, pools: Tensor) -> Tensor:
    """sum_h weights_h relu(q_h . pool / sqrt(D)), fp32.

    q [G, R, H, D], weights [G, R, H], pools [G, P, D] (shared by the R rows) -> [G, R, P].
    """
    groups, rows, heads, dim = q.shape
    count = pools.shape[1]
    if groups == 1:
        left = pools.expand(rows, count, dim)
    else:
        left = pools[:, None].expand(groups, rows, count, dim).reshape(-1, count, dim)
    scale: float = dim**-0.5
    right = (q * scale).reshape(-1, heads, dim).transpose(1, 2)
    products = bmm(left, right).clamp_(min=0.0)  # [G R, P, H]
    return products.mul_(weights.reshape(-1, 1, heads)).sum(-1).view(groups, rows, count)


def choose(scores: Tensor, complete: Tensor, k: int) -> Tensor:
    """The ``k`` best of each row's first ``complete`` pools, ascending: [R, P], [R] -> [R, k].

    Among equal scores the lowest pools are taken. A row with fewer than ``k`` pools fills up with
    what follows them; P is at least ``k``. A row with a score that is not a number has no best
    ones: it gets -1.
    """
    lowest = float("-inf")
    outside = torch.arange(scores.shape[1]) >= complete[:, None]
    unknown = scores.isnan()
    scores = scores.masked_fill(outside | unknown, lowest)
    # topk's values are exact; which of several equal ones it picks is not used.
    threshold = scores.topk(k).values[:, -1:]
    above = scores > threshold
    equal = scores == threshold
    wanted = k - above.sum(1, keepdim=True)
    taken = above | (equal & (equal.cumsum(1) <= wanted))
    best: Tensor = taken.nonzero()[:, 1].view(-1, k)
    return best.masked_fill((unknown & ~outside).any(1, keepdim=True), -1)


def candidates(scores: Tensor, complete: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The ``k`` best of a part of the pools, to be compared with other parts': their scores and
    places, [R, P], [R] -> [R, k] twice.

    Among equal scores the lowest places are taken, which are the only ones that the whole choice
    can want. A row with fewer pools fills up with -inf; a row with a NaN gets NaN.
    """
    scores = torch.nn.functional.pad(scores, (0, max(k - scores.shape[1], 0)))
    best = choose(scores, complete, k)
    damaged = best < 0
    best = best.masked_fill(damaged, 0)
    values = scores.gather(1, best).masked_fill(best >= complete[:, None], float("-inf"))
    return values.masked_fill(damaged, float("nan")), best


def choose_candidates(scores: Tensor, pools: Tensor, k: int) -> Tensor:
    """The ``k`` best of all parts' candidates, ascending: scores and pools [R, n] -> [R, k].

    The same choice as :func:`choose` among all pools: ties go to the lowest, NaN gives -1.
    """
    ordered, places = pools.sort(dim=1, stable=True)
    count = torch.full((scores.shape[0],), scores.shape[1])
    best = choose(scores.gather(1, places), count, k)
    chosen: Tensor = ordered.gather(1, best.clamp(min=0))
    return chosen.masked_fill(best < 0, -1)


def members(pools: Tensor, complete: Tensor, size: int, width: int) -> Tensor:
    """Tokens of the chosen pools, then those of the open one: [R, k], [R] -> [R, width].

    Row r's first k * size entries are members of its pools; the next size - 1 are the tokens from
    ``complete[r] * size`` on (fewer are meant: the caller knows how many). The rest is 0.
    """
    rows = pools.shape[0]
    inside = (pools[:, :, None] * size + torch.arange(size)).view(rows, -1)
    after = complete[:, None] * size + torch.arange(size - 1)
    tokens = torch.cat([inside, after], 1)
    return torch.nn.functional.pad(tokens, (0, width - tokens.shape[1]))
