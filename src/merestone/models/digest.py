"""What a model directory holds, in a few digits: ranks on several machines compare them.

Knows the layout of safetensors files. Must not know what the tensors are for.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

SAMPLES, SAMPLE_BYTES = 4, 64
"""Places of a tensor that are read, spread evenly, and how much is read at each."""
CONFIGS = ("config.json", "generation_config.json")


def digest_configs(directory: Path) -> str:
    """Of the configuration files, byte by byte."""
    digest = hashlib.sha256()
    for name in CONFIGS:
        path = directory / name
        digest.update(path.read_bytes() if path.exists() else b"absent")
    return digest.hexdigest()[:16]


def digest_weights(directory: Path) -> str:
    """Of every tensor's name, dtype and shape, and of samples of its bytes.

    Reads a few hundred bytes a tensor, whatever its size: other weights of the same shapes are
    told apart, a flipped bit is not found.

    Raises:
        ValueError: a file that is no safetensors file, or is cut off.
        OSError: a file that cannot be read.
    """
    digest = hashlib.sha256()
    for path in sorted(directory.glob("*.safetensors")):
        digest.update(path.name.encode())
        try:
            for piece in _pieces(path):
                digest.update(piece)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}: damaged or cut off") from error
    return digest.hexdigest()[:16]


def _pieces(path: Path) -> Iterator[bytes]:
    """Of a file: length of the header (8 bytes), header (JSON), then the tensors' bytes."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if 8 + length > path.stat().st_size:
            raise ValueError("the header is longer than the file")
        header = json.loads(file.read(length))
        for name in sorted(header.keys() - {"__metadata__"}):
            entry = header[name]
            yield f"{name} {entry['dtype']} {entry['shape']}".encode()
            begin, end = entry["data_offsets"]
            for place in range(SAMPLES):
                offset = begin + max(0, end - begin - SAMPLE_BYTES) * place // (SAMPLES - 1)
                file.seek(8 + length + offset)
                yield file.read(min(SAMPLE_BYTES, end - begin))
