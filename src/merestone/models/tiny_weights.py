"""All weights of a tiny model, by the names under which its family's checkpoints have them.

The names and shapes are those that the model itself declares; `random_weights` says what the values
are like. Must not know files.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from merestone.layers.weights import Source
from merestone.models.config import Glm5NextConfig
from merestone.models.glm5_next import Glm5Next
from merestone.models.glm5_next_mtp import Glm5NextMtp
from merestone.models.kimi_config import KimiLinearConfig
from merestone.models.kimi_linear import KimiLinear
from merestone.models.random_weights import RandomWeights


class _Recorder:
    """A source that remembers what it has made, in order."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.drawn: dict[str, Tensor] = {}

    def draw(self, name: str, shape: tuple[int, ...]) -> Tensor:
        assert name not in self.drawn, f"{name} is declared twice"
        tensor = self.drawn[name] = self._source.draw(name, shape)
        return tensor


def draw(config: Glm5NextConfig | KimiLinearConfig, seed: int) -> Iterator[tuple[str, Tensor]]:
    """All tensors of the text model (and its MTP layer) in fp32, by published name relative to it.

    A tensor's values depend on ``seed``, its name and its shape only. Replies are text.
    """
    recorder = _Recorder(RandomWeights(config, seed, text=True))
    if isinstance(config, Glm5NextConfig):
        Glm5Next(config, recorder, torch.float32)
        if config.mtp_layers:
            Glm5NextMtp(config, recorder, torch.float32)
    else:
        KimiLinear(config, recorder, torch.float32)
    yield from recorder.drawn.items()
