"""Strict reading of a model's weights: every tensor taken exactly once, none left over.

Knows names, shapes, dtypes and a rank's share. Must not know files. Of a tensor that maps a file
only the rank's rows or columns are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from merestone.ops.gemm import aligned
from merestone.parallel.world import SINGLE, World


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
    ``world``: the rank that takes. Shapes are those of whole tensors; ``split`` is the dimension
    along which ranks share one, each taking its :meth:`World.part` (None: everybody has all of it).
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor] | Source,
        dtype: torch.dtype,
        world: World = SINGLE,
    ) -> None:
        self.world = world
        self._source = None if isinstance(tensors, Mapping) else tensors
        self._left = dict(tensors) if isinstance(tensors, Mapping) else {}
        self._dtype = dtype

    def take(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype | None = None,
        *,
        split: int | None = None,
    ) -> Tensor:
        """The weight ``name``, contiguous, in the model's dtype or the one asked for.

        Raises:
            WeightError: it is missing (or already taken), has another shape, or too few rows or
                columns for every rank to have some.
        """
        tensor = self._source.draw(name, shape) if self._source else self._left.pop(name, None)
        if tensor is None:
            raise WeightError(f"weight {name} is missing")
        if tuple(tensor.shape) != shape:
            raise WeightError(f"weight {name} has shape {tuple(tensor.shape)}, expected {shape}")
        if split is not None and self.world.tp > 1:
            part = self.world.part(shape[split])
            if part.start == part.stop:
                raise WeightError(f"weight {name} {shape} is too small for {self.world.tp} ranks")
            tensor = tensor.narrow(split, part.start, part.stop - part.start)
        return aligned(tensor.to(dtype or self._dtype))

    def fp32(self, name: str, shape: tuple[int, ...], *, split: int | None = None) -> Tensor:
        """The weight ``name`` in fp32, whatever the model's dtype."""
        return self.take(name, shape, torch.float32, split=split)

    def stack(
        self,
        names: tuple[str, ...],
        rows: tuple[int, ...],
        columns: int,
        *,
        split: tuple[bool, ...] | None = None,
    ) -> Tensor:
        """Several [rows, columns] weights under one another, to be one product. ``split``: of
        which of them a rank takes its part of the rows (None: of none)."""
        shared = split or (False,) * len(names)
        each = zip(names, rows, shared, strict=True)
        return aligned(
            torch.cat([self.take(n, (r, columns), split=0 if s else None) for n, r, s in each])
        )

    def finish(self) -> None:
        """Raises WeightError if anything is left over, naming up to five."""
        if self._left:
            names = sorted(self._left)
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise WeightError(f"weights unknown to the model: {', '.join(names[:5])}{more}")
