"""What every launcher asserts, and sizes that Triton wants as powers of two."""

from functools import cache

import torch
from torch import Tensor

ALIGNMENT = 16
"""Bytes. Layouts, and so the order of sums, follow from what the compiler knows of alignment: a
tensor that starts elsewhere would be another kernel."""


def aligned(*tensors: Tensor) -> None:
    """Assert that every tensor starts at a multiple of 16 bytes and has a dense last dimension."""
    for tensor in tensors:
        assert tensor.data_ptr() % ALIGNMENT == 0, "a tensor starts off the 16-byte grid"
        assert tensor.ndim == 0 or tensor.shape[-1] <= 1 or tensor.stride(-1) == 1, tensor.stride()


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least ``n``."""
    return 1 << max(n - 1, 0).bit_length()


def blocks(n: int, size: int) -> int:
    """How many blocks of ``size`` cover ``n``."""
    return -(-n // size)


@cache
def overlaps(device: torch.device) -> bool:
    """Whether a launch there may begin before the one it depends on has ended: from Hopper on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
