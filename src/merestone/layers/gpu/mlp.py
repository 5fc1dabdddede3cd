"""Feed-forward sublayers on a GPU: dense, or a mixture of experts. They keep no state."""

from __future__ import annotations

import torch
from torch import Tensor

from merestone.layers.gpu.ranks import summed_linear
from merestone.layers.mlp import DenseMlp, MoeMlp
from merestone.ops.triton.gemm import linear
from merestone.ops.triton.grouped import experts, route
from merestone.ops.triton.norms import swiglu


class GpuMlp:
    """The weights of ``layer`` on ``device``."""

    def __init__(self, layer: DenseMlp, device: str) -> None:
        self._gate_up = layer.gate_up.to(device)
        self._down = layer.down.to(device)
        self._limit = layer._limit
        self._world = layer.world

    def forward(self, x: Tensor) -> Tensor:
        """[N, hidden] -> [N, hidden]."""
        inner = swiglu(linear(x, self._gate_up), self._limit)
        return summed_linear(inner, self._down, self._world)

    def partial(self, x: Tensor) -> Tensor:
        """[N, hidden] -> this rank's part of the sum, [N, hidden] fp32."""
        inner = swiglu(linear(x, self._gate_up), self._limit)
        return linear(inner, self._down, out_dtype=torch.float32)


class GpuMoe:
    """The weights of ``layer`` on ``device``, experts behind each other. Takes the layer's experts
    away, so that no two copies of all exist."""

    def __init__(self, layer: MoeMlp, device: str) -> None:
        self._world = layer.world
        self._chosen = layer._chosen
        self._normalise = layer._normalise
        self._scaling = layer._scaling
        self._limit = layer._limit
        self._router = layer._router.to(device)
        self._bias = layer._bias.to(device)
        self._gate_up = _stacked(layer._gate_up, device)
        self._down = _stacked(layer._down, device)
        self._shared = GpuMlp(layer._shared, device) if layer._shared else None

    def forward(self, x: Tensor) -> Tensor:
        """[N, hidden] -> [N, hidden]; routed and shared results are added in fp32."""
        ids, shares = route(
            x, self._router, self._bias, self._chosen, self._normalise, self._scaling
        )
        if self._world.tp == 1:
            more = self._shared.forward(x) if self._shared is not None else None
            return experts(
                x, ids, shares, self._gate_up, self._down, self._limit, more=more, out_dtype=x.dtype
            )
        out = experts(x, ids, shares, self._gate_up, self._down, self._limit, partial=True)
        if self._shared is not None:
            out = out + self._shared.partial(x)
        return self._world.ranks.sum(out, x.dtype)


def gpu_mlp(layer: DenseMlp | MoeMlp, device: str) -> GpuMlp | GpuMoe:
    """``layer``, on ``device``."""
    return GpuMlp(layer, device) if isinstance(layer, DenseMlp) else GpuMoe(layer, device)


def _stacked(each: list[Tensor], device: str) -> Tensor:
    """[E, ...] of the experts' weights, which are taken from the list one by one."""
    out = torch.empty(len(each), *each[0].shape, dtype=each[0].dtype, device=device)
    for i in reversed(range(len(each))):
        out[i] = each.pop()
    return out
