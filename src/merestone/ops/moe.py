"""Mixture of experts: the router's choice, and each expert's product over its own rows.

Knows rows and experts. Must not know layers. A token's results are summed in the router's order,
best first, in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from merestone.ops.attention import in_order
from merestone.ops.elementwise import sigmoid, swiglu
from merestone.ops.gemm import linear


def route(
    x: Tensor, gate: Tensor, bias: Tensor, k: int, normalise: bool, scaling: float
) -> tuple[Tensor, Tensor]:
    """Sigmoid scores; the bias counts in the choice only; ties go to the lowest expert.

    x [T, D], gate [E, D] and bias [E] fp32 -> ids [T, k] int64, best first, weights [T, k] fp32.
    """
    scores = sigmoid(linear(x.float(), gate))
    ids = (scores + bias).sort(dim=1, descending=True, stable=True).indices[:, :k]
    weights = scores.gather(1, ids)
    if normalise:
        weights = weights / (weights.sum(1, keepdim=True) + 1e-20)
    return ids, weights * scaling


def feed_forward(
    x: Tensor, gate_up: Tensor, down: Tensor, limit: float | None, partial: bool = False
) -> Tensor:
    """Gated feed-forward: x [T, D], gate_up [2 I, D] (gate rows first), down [D, I] -> [T, D].

    ``partial``: this is a part of the inner width, so the result is left in fp32, to be summed.
    """
    gate, up = linear(x, gate_up).chunk(2, 1)
    inner = swiglu(gate, up, limit)
    return linear(inner.float(), down.float()) if partial else linear(inner, down)


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Sequence[Tensor],
    down: Sequence[Tensor],
    limit: float | None,
    partial: bool = False,
) -> Tensor:
    """The weighted sum of each token's experts: x [T, D], ids and weights [T, k] -> [T, D] fp32.

    ``partial`` as :func:`feed_forward` takes it."""
    k = ids.shape[1]
    flat = ids.flatten()
    order = flat.sort(stable=True).indices
    rows = x[order // k]
    results = rows.new_empty(rows.shape, dtype=torch.float32 if partial else rows.dtype)
    done = 0
    for expert, count in enumerate(torch.bincount(flat, minlength=len(down)).tolist()):
        if count:
            own = slice(done, done + count)
            results[own] = feed_forward(rows[own], gate_up[expert], down[expert], limit, partial)
            done += count
    sorted_back = torch.empty_like(results)
    sorted_back[order] = results
    return in_order(sorted_back.view(-1, k, x.shape[1]).float() * weights[:, :, None])
