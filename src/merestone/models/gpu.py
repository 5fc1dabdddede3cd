"""The families on a GPU: the same weights, layer order and state, over a step's static tables.

Knows how each family puts its layers together. Must not know checkpoints' names: those are the CPU
models', which are made first and whose tensors move here.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from merestone.layers.dense_mla import DenseMlaLayer
from merestone.layers.gpu.kda import GpuKda
from merestone.layers.gpu.mla import GpuDenseMla, GpuMla
from merestone.layers.gpu.mlp import gpu_mlp
from merestone.layers.gpu.ranks import GpuVocabulary
from merestone.layers.gpu.step import DeviceState, Rebuild, SlotField, Step
from merestone.layers.kda import KdaLayer
from merestone.layers.mla import MlaLayer
from merestone.layers.state import Field
from merestone.models.glm5_next import Glm5Next, _Hyper
from merestone.models.interface import CHUNK, Model, ModelInfo
from merestone.models.kimi_linear import KimiLinear
from merestone.ops.triton.hyper import enter, leave, mean
from merestone.ops.triton.norms import add_rms_norm, rms_norm
from merestone.parallel.world import World

Attention = GpuKda | GpuMla | GpuDenseMla


class GpuModel(Protocol):
    """A rank's share of a model, on a GPU. ``heads`` of latent attention that it computes (those of
    all ranks with which it shares tokens), 0 without any; ``pool``: tokens of a pool of the sparse
    index, 0 without an index."""

    info: ModelInfo
    world: World
    heads: int
    pool: int
    attention: list[Attention]

    def forward(
        self, step: Step, state: DeviceState, taps: tuple[int, ...] = ()
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Compute the step's rows: read and write ``state``, return the hidden rows after the final
        norm, [N, hidden_size] in the model's dtype, and such rows of the residual after each layer
        of ``taps`` (averaged, if it has streams)."""
        ...

    def embed(self, tokens: Tensor) -> Tensor:
        """[N] int32 -> [N, hidden_size] in the model's dtype."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[M, hidden_size] -> [M, vocab_size] fp32."""
        ...


def fields(model: GpuModel) -> tuple[Field, ...]:
    """All state, of every layer."""
    return tuple(field for layer in model.attention for field in layer.fields())


def recurrent(model: GpuModel) -> list[GpuKda]:
    """The recurrent layers."""
    return [layer for layer in model.attention if isinstance(layer, GpuKda)]


def slot_fields(model: GpuModel) -> tuple[SlotField, ...]:
    """All caches of slots, of every layer."""
    return tuple(field for layer in recurrent(model) for field in layer.slot_fields())


def rebuild(model: GpuModel, old: Rebuild, state: DeviceState) -> None:
    """Make the recurrent layers' caches of old rows again."""
    for layer in recurrent(model):
        layer.rebuild(old, state)


def on_gpu(model: Model, device: str) -> GpuModel:
    """``model`` on ``device``. Takes its experts away: the CPU model is of no use afterwards.

    Raises:
        ValueError: a family that has no GPU layers.
    """
    if isinstance(model, Glm5Next):
        return GpuGlm5Next(model, device)
    if isinstance(model, KimiLinear):
        return GpuKimiLinear(model, device)
    raise ValueError(f"--device {device}: the family {model.info.family} runs on the CPU only")


def _attention(layer: KdaLayer | MlaLayer | DenseMlaLayer, device: str) -> Attention:
    if isinstance(layer, KdaLayer):
        return GpuKda(layer, device, CHUNK)
    return GpuMla(layer, device) if isinstance(layer, MlaLayer) else GpuDenseMla(layer, device)


class _GpuHyper:
    """The hyper-connection into one sublayer, with the sublayer's norm."""

    def __init__(self, hyper: _Hyper, device: str) -> None:
        self._config = hyper._config
        self._fn = hyper._fn.to(device)
        self._base = hyper._base.to(device)
        self._scale = hyper._scale.to(device)
        self._norm = hyper._norm.to(device)

    def enter(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[N, n, D] -> the sublayer's normed input [N, D], and what ``leave`` needs."""
        c = self._config
        return enter(
            streams, self._fn, self._base, self._scale, self._norm, eps=c.hc_eps,
            rms_eps=c.rms_eps, norm_eps=c.rms_eps, iterations=c.hc_sinkhorn_iters,
        )  # fmt: skip


class GpuGlm5Next:
    """GLM-5.3-Flash (`glm5_next`): a :class:`GpuModel`."""

    def __init__(self, model: Glm5Next, device: str) -> None:
        config = self._config = model._config
        self.info = model.info
        self.pool = config.index_kpool
        self.world = model.vocabulary.world
        self.heads = self.world.heads(config.num_heads, "latent attention") * self.world.dcp
        self._ends = GpuVocabulary(model.vocabulary, device)
        self._norm = model._norm.to(device)
        self.attention: list[Attention] = []
        self._rest = []
        for layer in model._layers:
            self.attention.append(_attention(layer.attention, device))
            into = _GpuHyper(layer._attn_hyper, device), _GpuHyper(layer._ffn_hyper, device)
            self._rest.append((*into, gpu_mlp(layer._mlp, device)))

    def forward(
        self, step: Step, state: DeviceState, taps: tuple[int, ...] = ()
    ) -> tuple[Tensor, dict[int, Tensor]]:
        features: dict[int, Tensor] = {}
        rows = self._ends.embed(step.tokens)
        streams = rows[:, None].expand(-1, self._config.hc_mult, -1).contiguous()
        selection: tuple[Tensor, Tensor] | None = None
        layers = zip(self.attention, self._rest, strict=True)
        for i, (attention, (into, into_mlp, mlp)) in enumerate(layers):
            x, post, comb = into.enter(streams)
            if isinstance(attention, GpuMla):
                y, selection = attention.forward(x, step, state, selection)
            else:
                y, selection = attention.forward(x, step, state), None
            streams = leave(streams, y, post, comb)
            x, post, comb = into_mlp.enter(streams)
            streams = leave(streams, mlp.forward(x), post, comb)
            if i in taps:
                features[i] = mean(streams)
        return rms_norm(mean(streams), self._norm, self._config.rms_eps), features

    def embed(self, tokens: Tensor) -> Tensor:
        return self._ends.embed(tokens)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._ends.logits(hidden)


class GpuKimiLinear:
    """Kimi Linear (`kimi_linear`): a :class:`GpuModel`."""

    pool = 0

    def __init__(self, model: KimiLinear, device: str) -> None:
        self.info = model.info
        self.world = model.vocabulary.world
        self._eps = model._eps
        self._ends = GpuVocabulary(model.vocabulary, device)
        self.attention: list[Attention] = []
        self._rest = []
        self._first = model._layers[0]._input_norm.to(device)
        following = [layer._input_norm for layer in model._layers[1:]] + [model._norm]
        for layer, after in zip(model._layers, following, strict=True):
            self.attention.append(_attention(layer.attention, device))
            # Of each sum the norm that reads it next is a part of the same launch.
            norms = layer._mlp_norm.to(device), after.to(device)
            self._rest.append((*norms, gpu_mlp(layer._mlp, device)))
        dense = [layer for layer in self.attention if isinstance(layer, GpuDenseMla)]
        self.heads = dense[0].shape.heads * self.world.dcp if dense else 0

    def forward(
        self, step: Step, state: DeviceState, taps: tuple[int, ...] = ()
    ) -> tuple[Tensor, dict[int, Tensor]]:
        features: dict[int, Tensor] = {}
        x = self._ends.embed(step.tokens)
        a = rms_norm(x, self._first, self._eps)
        layers = zip(self.attention, self._rest, strict=True)
        for i, (attention, (mlp_norm, next_norm, mlp)) in enumerate(layers):
            assert not isinstance(attention, GpuMla)
            x, a = add_rms_norm(x, attention.forward(a, step, state), mlp_norm, self._eps)
            x, a = mlp.add(x, a, next_norm, self._eps)
            if i in taps:
                features[i] = x
        return a, features

    def embed(self, tokens: Tensor) -> Tensor:
        return self._ends.embed(tokens)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._ends.logits(hidden)
