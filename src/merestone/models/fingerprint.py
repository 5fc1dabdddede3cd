"""The fingerprint of a model directory: equal for equal weights and configuration.

Knows files as bytes, and where safetensors files keep their tensors. Must not know models.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

READ_WHOLE = 1 << 30
"""Bytes of weights up to which all of them are read. Beyond, three samples of every tensor are."""
SAMPLE = 4096


def fingerprint(directory: Path, load_format: str = "auto") -> str:
    """A digest of configuration and weights (of the configuration alone for random weights).

    Raises:
        OSError: a file cannot be read.
        ValueError: a weight file whose header is none.
    """
    digest = blake2b(load_format.encode(), digest_size=16)
    digest.update((directory / "config.json").read_bytes())
    if load_format == "random":
        return digest.hexdigest()
    files = sorted(directory.glob("*.safetensors"))
    whole = sum(path.stat().st_size for path in files) <= READ_WHOLE
    for path in files:
        digest.update(path.name.encode())
        with path.open("rb") as file:
            for piece in _everything(file) if whole else _samples(file, path):
                digest.update(piece)
    return digest.hexdigest()


def _everything(file: BinaryIO) -> Iterator[bytes]:
    while piece := file.read(1 << 20):
        yield piece


def _samples(file: BinaryIO, path: Path) -> Iterator[bytes]:
    """The header, which names every tensor, and the begin, middle and end of each."""
    size = file.read(8)
    header = file.read(int.from_bytes(size, "little"))
    yield header
    try:
        tensors = json.loads(header)
        spans = [t["data_offsets"] for name, t in sorted(tensors.items()) if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no safetensors file: {error}") from error
    base = 8 + len(header)
    for first, last in spans:
        for at in (first, (first + last) // 2, max(first, last - SAMPLE)):
            file.seek(base + at)
            yield file.read(min(SAMPLE, last - at))
