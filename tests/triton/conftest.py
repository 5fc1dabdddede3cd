"""Kernels on a CUDA device, or else under Triton's interpreter (chosen in tests/conftest.py)."""

import os
from collections.abc import Callable

import pytest
import torch

from merestone.ops.triton import attention, attention_wide

CUDA = torch.cuda.is_available()
assert CUDA or os.environ.get("TRITON_INTERPRET") == "1"

DEVICE = "cuda" if CUDA else "cpu"


@pytest.fixture
def ordered_dot(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's product is numpy's, whose rows depend on their mates. A tensor core adds
    to its accumulator in a fixed order: so does this one."""
    if CUDA:
        return
    from triton.runtime import interpreter

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        total = d.data
        left, right = a.data.astype(total.dtype), b.data.astype(total.dtype)
        for k in range(left.shape[1]):
            total = total + left[:, k : k + 1] * right[k : k + 1]
        return interpreter.TensorHandle(total, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


@pytest.fixture
def short_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans of two small tiles: little work for an interpreter, and many merges."""
    monkeypatch.setattr(attention, "TILE", 16)
    monkeypatch.setattr(attention, "SPAN", 32)
    monkeypatch.setattr(attention_wide, "ROWS", 16)
    monkeypatch.setattr(attention_wide, "_BAND", 2)


@pytest.fixture
def draw() -> Callable[..., torch.Tensor]:
    """Standard normal tensors on the device, from one seeded source."""
    source = torch.Generator().manual_seed(0)

    def one(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=source).to(DEVICE)

    return one


@pytest.fixture
def device() -> str:
    return DEVICE
