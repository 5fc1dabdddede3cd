"""Strict reading of a model's weights: every tensor taken exactly once, none left over.

Knows names, shapes and dtypes. Must not know files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from merestone.ops.gemm import aligned


class WeightError(ValueError):
    """A weight that is missing, misshapen or unknown to the model."""


class Source(Protocol):
    """Makes the tensors that a model declares, when it asks for them."""

    def draw(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor ``name`` of ``shape``, in any float dtype."""
        ...


class Weights:
    """The not yet taken weights of a model, by published name, in a stored ``dtype``.

    ``tensors``: all of them, or a source that makes each one on demand (and has no leftovers).
    """

    def __init__(self, tensors: Mapping[str, Tensor] | Source, dtype: torch.dtype) -> None:
        self._source = None if isinstance(tensors, Mapping) else tensors
        self._left = dict(tensors) if isinstance(tensors, Mapping) else {}
        self._dtype = dtype

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """The weight ``name``, contiguous, in the model's dtype or the one asked for.

        Raises:
            WeightError: it is missing (or already taken), or has another shape.
        """
        tensor = self._source.draw(name, shape) if self._source else self._left.pop(name, None)
        if tensor is None:
            raise WeightError(f"weight {name} is missing")
        if tuple(tensor.shape) != shape:
            raise WeightError(f"weight {name} has shape {tuple(tensor.shape)}, expected {shape}")
        return aligned(tensor.to(dtype or self._dtype))

    def fp32(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The weight ``name`` in fp32, whatever the model's dtype."""
        return self.take(name, shape, torch.float32)

    def stack(self, names: tuple[str, ...], rows: tuple[int, ...], columns: int) -> Tensor:
        """Several [rows, columns] weights under one another, to be one product."""
        return aligned(
            torch.cat([self.take(n, (r, columns)) for n, r in zip(names, rows, strict=True)])
        )

    def finish(self) -> None:
        """Raises WeightError if anything is left over, naming up to five."""
        if self._left:
            names = sorted(self._left)
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise WeightError(f"weights unknown to the model: {', '.join(names[:5])}{more}")
