"""Feed-forward sublayers: dense, or a mixture of experts with shared ones. They keep no state.

Ranks share the inner width, of every expert alike: each token then costs every rank the same,
whichever experts it chooses, and the last products sum over the ranks.
"""

from __future__ import annotations

from torch import Tensor

from merestone.layers.weights import Weights
from merestone.ops.moe import experts, feed_forward, route

GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")


class DenseMlp:
    """``prefix`` is the weights' name up to and with the last dot, ``names`` those of the gate, the
    up and the down projection; ``inner`` the hidden width."""

    def __init__(
        self,
        hidden: int,
        inner: int,
        limit: float | None,
        prefix: str,
        weights: Weights,
        names: tuple[str, str, str] = GATE_UP_DOWN,
    ) -> None:
        gate, up, down = (f"{prefix}{name}.weight" for name in names)
        self.world = weights.world
        self.gate_up = weights.stack((gate, up), (inner, inner), hidden, split=(True, True))
        self.down = weights.take(down, (hidden, inner), split=1)
        self._limit = limit

    def forward(self, x: Tensor) -> Tensor:
        """[N, hidden] -> [N, hidden]."""
        if self.world.tp == 1:
            return feed_forward(x, self.gate_up, self.down, self._limit)
        return self.world.ranks.sum(self.partial(x), x.dtype)

    def partial(self, x: Tensor) -> Tensor:
        """[N, hidden] -> this rank's part of the sum, [N, hidden] fp32."""
        return feed_forward(x, self.gate_up, self.down, self._limit, partial=True)


class MoeMlp:
    """``count`` routed experts, ``chosen`` of them for a token, and one expert of the ``shared``
    ones' joint width that sees every token unscaled (0: none). ``names``: the routed experts'
    projections, as :class:`DenseMlp` takes them."""

    def __init__(
        self,
        hidden: int,
        inner: int,
        count: int,
        chosen: int,
        shared: int,
        normalise: bool,
        scaling: float,
        limit: float | None,
        prefix: str,
        weights: Weights,
        names: tuple[str, str, str] = GATE_UP_DOWN,
    ) -> None:
        self.world = weights.world
        self._chosen = chosen
        self._normalise = normalise
        self._scaling = scaling
        self._limit = limit
        self._router = weights.fp32(f"{prefix}gate.weight", (count, hidden))
        self._bias = weights.fp32(f"{prefix}gate.e_score_correction_bias", (count,))
        each = [
            DenseMlp(hidden, inner, limit, f"{prefix}experts.{i}.", weights, names)
            for i in range(count)
        ]
        self._gate_up = [expert.gate_up for expert in each]
        self._down = [expert.down for expert in each]
        self._shared = (
            DenseMlp(hidden, inner * shared, limit, f"{prefix}shared_experts.", weights)
            if shared
            else None
        )

    def forward(self, x: Tensor) -> Tensor:
        """[N, hidden] -> [N, hidden]; routed and shared results are added in fp32."""
        ids, shares = route(
            x, self._router, self._bias, self._chosen, self._normalise, self._scaling
        )
        several = self.world.tp > 1
        out = experts(x, ids, shares, self._gate_up, self._down, self._limit, partial=several)
        if self._shared is not None:
            out = out + (self._shared.partial(x) if several else self._shared.forward(x))
        return self.world.ranks.sum(out, x.dtype)
