"""What this machine offers: its devices, and how many threads to use."""

from __future__ import annotations

import re
from pathlib import Path

import torch

SMALL_WEIGHTS = 256 << 20
"""Bytes of weights below which one thread is faster."""


def resolve_device(device: str) -> str:
    """The device that ``device`` means here.

    Raises:
        ValueError: it is not one, or is not there.
    """
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device != "cpu" and not re.fullmatch(r"cuda(:\d+)?", device):
        raise ValueError(f"--device {device!r} is not one of auto, cpu, cuda, cuda:N")
    if device != "cpu" and int(device[5:] or 0) >= torch.cuda.device_count():
        raise ValueError(f"--device {device}: no such CUDA device is available")
    return device


def default_threads(directory: Path, load_format: str = "auto") -> int:
    """One thread for small models, where waking a second one costs more than it computes.

    A model of random weights counts as large: true sizes are what it is for.
    """
    if load_format == "random":
        return torch.get_num_threads()
    weights = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    return 1 if weights < SMALL_WEIGHTS else torch.get_num_threads()
