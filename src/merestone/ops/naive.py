"""Plain definitions, token by token: what the operators mean. Oracles for tests, close in fp32.

Nothing here is row-invariant or fast.
"""

from __future__ import annotations

import torch
from torch import Tensor


def kda_recurrent(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """q, k, g [T, H, K], v [T, H, V], beta [T, H], state [H, K, V] -> outputs [T, H, V], state.

    Decay, read for the delta, write, read for the output.
    """
    outs = []
    for t in range(q.shape[0]):
        state = state * g[t].exp()[..., None]
        delta = beta[t][:, None] * (v[t] - torch.einsum("hk,hkv->hv", k[t], state))
        state = state + k[t][..., None] * delta[:, None]
        outs.append(torch.einsum("hk,hkv->hv", q[t], state))
    return torch.stack(outs), state


def attention(q: Tensor, keys: Tensor, allowed: Tensor, scale: float) -> Tensor:
    """q [R, H, L] on latents [S, L] -> [R, H, L]; ``allowed`` [R, S] says who sees what."""
    scores = torch.einsum("rhl,sl->rhs", q, keys) * scale
    scores = scores.masked_fill(~allowed[:, None], float("-inf"))
    return scores.softmax(-1) @ keys


def pool_keys(keys: Tensor, gates: Tensor, positions: Tensor) -> Tensor:
    """keys, gates [T, D], positions [P, D]: one vector per complete pool of P rows, [T // P, D]."""
    size = positions.shape[0]
    whole = keys.shape[0] // size * size
    logits = gates[:whole].view(-1, size, gates.shape[1]) + positions
    return (logits.softmax(1) * keys[:whole].view(-1, size, keys.shape[1])).sum(1)


def chosen_tokens(
    q: Tensor, weights: Tensor, pools: Tensor, position: int, size: int, top: int
) -> list[int]:
    """Tokens that the row at ``position`` attends to: q [H, D], weights [H], pools [N, D].

    Members of its best ``top // size`` complete pools (ties: the lowest), then the open pool.
    """
    complete = (position + 1) // size
    scores = (weights[:, None] * (q @ pools[:complete].T).relu()).sum(0).tolist()
    best = sorted(range(complete), key=lambda j: (-scores[j], j))[: top // size]
    tokens = [j * size + e for j in sorted(best) for e in range(size)]
    return tokens + list(range(complete * size, position + 1))


def experts(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """x [T, D], ids and weights [T, k], gate_up [E, 2I, D], down [E, D, I] -> [T, D]."""
    outs = []
    for row, chosen, weight in zip(x, ids.tolist(), weights, strict=True):
        parts = []
        for expert, share in zip(chosen, weight, strict=True):
            gate, up = (gate_up[expert] @ row).chunk(2)
            parts.append(share * (down[expert] @ (torch.nn.functional.silu(gate) * up)))
        outs.append(torch.stack(parts).sum(0))
    return torch.stack(outs)
