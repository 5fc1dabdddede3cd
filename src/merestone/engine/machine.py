"""What this machine offers: its devices, its memory, and how many threads to use."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def room(what: str) -> Iterator[None]:
    """Inside, memory that does not suffice is the user's error: one line with the numbers.

    Raises:
        ValueError: ``what``, and how much was asked for and is there, as far as it was said.
    """
    try:
        yield
    except RuntimeError as error:
        line = str(error).partition("\n")[0]
        _, of_host, numbers = line.rpartition("can't allocate memory: ")
        # The allocator's, or the driver's, to whom kernels, graphs and locked memory are due.
        if not (of_host or "out of memory" in line):
            raise
        # What was tried, and what the device has; then come hints for programmers.
        raise ValueError(f"{what}: {'. '.join(numbers.split('. ')[:3])}") from error


def default_threads(directory: Path, load_format: str = "auto") -> int:
    """One thread for small models, where waking a second one costs more than it computes.

    A model of random weights counts as large: true sizes are what it is for.
    """
    if load_format == "random":
        return torch.get_num_threads()
    weights = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    return 1 if weights < SMALL_WEIGHTS else torch.get_num_threads()
