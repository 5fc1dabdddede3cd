"""Manifests: what a stored checkpoint consists of, and the checksums that it must have.

Knows the format on disk and on the wire. Must not know where manifests are kept.
"""

from __future__ import annotations

from hashlib import blake2b

import msgspec

FORMAT = 1
SUM = 16


class StoreFault(Exception):
    """A tier could not do what it was asked; ``reason`` is one word, counted under that name."""

    def __init__(self, reason: str, message: str = "") -> None:
        super().__init__(message or reason)
        self.reason = reason


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """A segment: its address, its bytes over all ranks, its checksum on each rank."""

    address: str
    size: int
    sums: tuple[bytes, ...]


class Manifest(msgspec.Struct, frozen=True):
    """A checkpoint as a store keeps it. It holds no token ids: ``address`` is their digest.

    ``bucket`` is the address of its whole chunks, by which a prompt finds it. (``anchor`` may lie
    a chunk lower, where accepted drafts ran past the boundary.)
    ``identity`` digests model, configuration, dtype and layout; ``about`` says them to people.
    """

    format: int
    address: str
    bucket: str
    identity: str
    about: str
    at: int
    anchor: int
    kind: str
    ranks: int
    segments: tuple[Entry, ...]


def checksum(data: bytes | memoryview) -> bytes:
    """The checksum of a segment's bytes on one rank."""
    return blake2b(data, digest_size=SUM).digest()


def encode(manifest: Manifest) -> bytes:
    """Bytes of a manifest, its own checksum behind it. Their number does not depend on sums."""
    body = msgspec.msgpack.encode(manifest)
    return body + checksum(body)


def decode(data: bytes, address: str) -> Manifest:
    """The manifest kept under ``address``.

    Raises:
        StoreFault: "damaged", or "foreign" if it is whole but that of something else.
    """
    body, found = data[:-SUM], data[-SUM:]
    if checksum(body) != found:
        raise StoreFault("damaged", f"manifest {address}: wrong checksum")
    try:
        manifest = msgspec.msgpack.decode(body, type=Manifest)
    except msgspec.DecodeError as error:
        raise StoreFault("foreign", f"manifest {address}: {error}") from error
    if manifest.format != FORMAT or manifest.address != address:
        raise StoreFault("foreign", f"manifest {address}: another format or another checkpoint's")
    return manifest
