"""The one seam between a model family and the device that runs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from merestone.layers.state import Batch, Field, StateViews

CHUNK = 64
"""C: recurrent states are kept (as anchors) at multiples of this many tokens. A constant of the
checkpoint format."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the engine needs to know of a model. Lengths in tokens."""

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_length: int
    eos_ids: tuple[int, ...]
    dtype: torch.dtype
    page_multiple: int
    """A page of the ``full`` group must be a multiple of this (the index pool)."""


class Model(Protocol):
    info: ModelInfo

    def fields(self) -> tuple[Field, ...]:
        """All state, of every layer."""
        ...

    def forward(self, batch: Batch, state: StateViews) -> Tensor:
        """Compute the batch's rows: read and write ``state``, return the hidden rows after the
        final norm, [N, hidden_size] in the model's dtype (and ``batch.features``)."""
        ...

    def embed(self, tokens: Tensor) -> Tensor:
        """[N] int64 -> [N, hidden_size] in the model's dtype: what the first layer is given."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[M, hidden_size] -> [M, vocab_size] fp32."""
        ...
