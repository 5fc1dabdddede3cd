"""Manifold-constrained hyper-connections: n residual streams around each sublayer.

All maths in fp32; streams and the sublayer's input are rounded once, in :func:`collapse` and
:func:`expand`, to the streams' dtype. Source: models with `hc_mult` streams in transformers
(`Glm5NextTextHyperConnection`), which rounds the coefficients as well.
"""

from __future__ import annotations

from torch import Tensor

from merestone.ops.elementwise import sigmoid, softmax
from merestone.ops.gemm import linear


def coefficients(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    eps: float,
    rms_eps: float,
    iterations: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The mixing weights of each row: streams [T, n, D], fn [n (2 + n), n D], base [n (2 + n)],
    scale [n (2 + n)] (each of the three scales repeated over its part), all fp32 but the streams.

    Returns pre [T, n] (streams into the sublayer), post [T, n] (its output into the streams),
    comb [T, n, n] (stream i into stream j), fp32. The columns of comb sum to 1.
    """
    rows, n = streams.shape[:2]
    flat = streams.reshape(rows, -1).float()
    # One RMS over all streams; it commutes with the product, where it is cheaper.
    norm = (flat * flat).mean(-1, keepdim=True).add_(rms_eps).sqrt_()
    z = linear(flat, fn).div(norm).mul_(scale).add_(base)
    gates = sigmoid(z[:, : 2 * n])
    comb = _balance(softmax(z[:, 2 * n :].reshape(rows, n, n)).add_(eps), eps, iterations)
    return gates[:, :n] + eps, gates[:, n:] * 2.0, comb


def _balance(comb: Tensor, eps: float, iterations: int) -> Tensor:
    """Sinkhorn's iterations in place, [T, n, n]: columns first, columns last."""
    # A scalar tensor: a Python number would be converted anew in each of the many calls.
    little = comb.new_full((), eps)
    comb.div_(comb.sum(1, keepdim=True).add_(little))
    for _ in range(iterations - 1):
        comb.div_(comb.sum(2, keepdim=True).add_(little))
        comb.div_(comb.sum(1, keepdim=True).add_(little))
    return comb


def collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """sum_i pre_i X_i: [T, n, D], [T, n] -> [T, D] in the streams' dtype."""
    total = streams[:, 0] * pre[:, :1]
    for i in range(1, streams.shape[1]):
        total += streams[:, i] * pre[:, i : i + 1]
    return total.to(streams.dtype)


def expand(streams: Tensor, out: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """X'_j = post_j y + sum_i comb[i, j] X_i: streams [T, n, D], y [T, D] -> [T, n, D]."""
    total = post[:, :, None] * out[:, None]
    for i in range(streams.shape[1]):
        total += comb[:, i, :, None] * streams[:, i, None]
    return total.to(streams.dtype)


def mean(streams: Tensor) -> Tensor:
    """The mean of the streams: [T, n, D] -> [T, D] in their dtype."""
    total = streams[:, 0].float()
    for i in range(1, streams.shape[1]):
        total = total + streams[:, i]
    return (total / streams.shape[1]).to(streams.dtype)
