"""Feed-forward sublayers on a GPU: dense, or a mixture of experts. They keep no state."""

from __future__ import annotations

import torch
from torch import Tensor

from merestone.layers.gpu.ranks import summed_linear
from merestone.layers.mlp import DenseMlp, MoeMlp
from merestone.ops.triton.gemm import linear, segments
from merestone.ops.triton.grouped import experts, experts_norm, route
from merestone.ops.triton.norms import add_rms_norm, swiglu

# More than these rows of a shared expert would read its weights once a tile of 16.
_FEW_ROWS = 32


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

    def add(self, x: Tensor, a: Tensor, norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """The residual x [N, hidden] and the layer's output of ``a``, added; and the RMS norm of
        the sum, with the weight ``norm``."""
        return add_rms_norm(x, self.forward(a), norm, eps)

    def partial(self, x: Tensor) -> Tensor:
        """[N, hidden] -> this rank's part of the sum, [N, hidden] fp32."""
        inner = swiglu(linear(x, self._gate_up), self._limit)
        return linear(inner, self._down, out_dtype=torch.float32)


class GpuMoe:
    """The weights of ``layer`` on ``device``, experts behind each other. Takes the layer's experts
    away, so that no two copies of all exist.

    Of few rows a shared expert is one more expert, whom every token chooses with weight 1: the same
    products, and the same sum, in three launches less.
    """

    def __init__(self, layer: MoeMlp, device: str) -> None:
        self._world = layer.world
        self._chosen = layer._chosen
        self._normalise = layer._normalise
        self._scaling = layer._scaling
        self._limit = layer._limit
        self._router = layer._router.to(device)
        self._bias = layer._bias.to(device)
        self._count = len(layer._down)
        shared = layer._shared
        self._alike = shared is not None and _alike(shared, layer)
        if shared is not None and self._alike:
            layer._gate_up.append(shared.gate_up)
            layer._down.append(shared.down)
        self._gate_up = _stacked(layer._gate_up, device)
        self._down = _stacked(layer._down, device)
        if shared is not None and self._alike:
            shared.gate_up, shared.down = self._gate_up[-1], self._down[-1]
        self._shared = GpuMlp(shared, device) if shared is not None else None

    def forward(self, x: Tensor) -> Tensor:
        """[N, hidden] -> [N, hidden]; routed and shared results are added in fp32."""
        several = self._world.tp > 1
        given, more = self._given(x)
        dtype = torch.float32 if several else x.dtype
        out = experts(x, *given, self._limit, several, more=more, out_dtype=dtype)
        return self._world.ranks.sum(out, x.dtype) if several else out

    def add(self, x: Tensor, a: Tensor, norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """As :meth:`GpuMlp.add`."""
        if self._world.tp > 1:
            return add_rms_norm(x, self.forward(a), norm, eps)
        given, more = self._given(a)
        return experts_norm(a, *given, self._limit, x, norm, eps, more=more)

    def _given(self, x: Tensor) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Tensor | None]:
        """Choices and their weights and the experts chosen from; and what a shared one adds that
        is not among them."""
        # Grouped products in fp32 take another depth of a step, which is part of their bits: there
        # any number of rows goes one way.
        few = x.shape[0] <= _FEW_ROWS or x.dtype != torch.bfloat16
        joined = self._alike and few
        ids, shares = route(
            x, self._router, self._bias, self._chosen, self._normalise, self._scaling,
            shared=joined,
        )  # fmt: skip
        more = None
        if self._shared is not None and not joined:
            more = self._shared.partial(x) if self._world.tp > 1 else self._shared.forward(x)
        count = self._count + joined
        return (ids, shares, self._gate_up[:count], self._down[:count]), more


def _alike(shared: DenseMlp, layer: MoeMlp) -> bool:
    """Whether the shared expert is one like the routed ones, and its products have one segment."""
    pairs = (shared.gate_up, layer._gate_up[0]), (shared.down, layer._down[0])
    return all(
        own.shape == other.shape and segments(own.shape[0], own.shape[1]) == 1
        for own, other in pairs
    )


def gpu_mlp(layer: DenseMlp | MoeMlp, device: str) -> GpuMlp | GpuMoe:
    """``layer``, on ``device``."""
    return GpuMlp(layer, device) if isinstance(layer, DenseMlp) else GpuMoe(layer, device)


def _stacked(each: list[Tensor], device: str) -> Tensor:
    """[E, ...] of the experts' weights, which are taken from the list one by one."""
    out = torch.empty(len(each), *each[0].shape, dtype=each[0].dtype, device=device)
    for i in reversed(range(len(each))):
        out[i] = each.pop()
    return out
