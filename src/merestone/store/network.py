"""The network tier: a Redis server (or Valkey, which speaks the same) that replicas share.

    merestone:ADDRESS.RANK    a segment's bytes on one rank
    merestone:ADDRESS.m       a manifest
    merestone:BUCKET.b        a set of "TOKENS ADDRESS": boundaries behind the bucket's tokens

What the server evicts is a miss, and is written again. Its budget and eviction are its own
(``maxmemory``, ``maxmemory-policy allkeys-lru``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import redis
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as Unreachable
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as TimedOut
from redis.retry import Retry

from merestone.store.chain import Chain
from merestone.store.manifest import Manifest, StoreFault, decode
from merestone.store.tier import manifest_name

PREFIX = "merestone:"
TIMEOUT_S = 1.0
"""After which a call has failed. Whoever waits does not wait in the engine."""
BATCH = 512
"""Buckets asked for in one round trip, deepest first."""


class NetworkTier:
    """Implements ``tier.Tier`` and ``clerk.Shared``. The server need not be there yet.

    Raises:
        ValueError: ``url`` is none of redis://, rediss:// or unix://.
    """

    name = "network"
    boundaries = True

    def __init__(self, url: str) -> None:
        self._client = redis.Redis.from_url(
            url,
            socket_timeout=TIMEOUT_S,
            socket_connect_timeout=TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
        )

    def room(self, size: int) -> None:
        return None

    def put(self, name: str, data: bytes | memoryview) -> None:
        with _faults():
            self._client.set(PREFIX + name, data)

    def get(self, name: str) -> bytes | None:
        with _faults():
            return cast(bytes | None, self._client.get(PREFIX + name))

    def has(self, names: Sequence[str]) -> list[bool]:
        with _faults():
            calls = self._client.pipeline(transaction=False)
            for name in names:
                calls.exists(PREFIX + name)
            return [bool(found) for found in calls.execute()]

    def erase(self, names: Sequence[str]) -> None:
        if names:
            with _faults():
                self._client.unlink(*(PREFIX + name for name in names))

    def close(self) -> None:
        self._client.close()

    # -- found by others ------------------------------------------------------------------------

    def announce(self, manifest: Manifest) -> None:
        with _faults():
            entry = f"{manifest.at} {manifest.address}"
            self._client.sadd(f"{PREFIX}{manifest.bucket}.b", entry)

    def find(self, chain: Chain, above: int) -> Manifest | None:
        lowest = above // chain.chunk
        anchors = [n * chain.chunk for n in range(chain.size // chain.chunk, lowest - 1, -1)]
        for start in range(0, len(anchors), BATCH):
            buckets = [f"{PREFIX}{chain.at(at)}.b" for at in anchors[start : start + BATCH]]
            with _faults():
                calls = self._client.pipeline(transaction=False)
                for bucket in buckets:
                    calls.smembers(bucket)
                entries = calls.execute()
            for bucket, members in zip(buckets, entries, strict=True):
                found = self._deepest(bucket, members, chain, above)
                if found is not None:
                    return found
        return None

    def _deepest(
        self, bucket: str, members: set[bytes], chain: Chain, above: int
    ) -> Manifest | None:
        """The deepest of a bucket's boundaries that is one of ``chain``'s, if it is still there."""
        boundaries = []
        for member in members:
            count, _, address = member.decode().partition(" ")
            at = int(count) if count.isdigit() else 0
            if above < at <= chain.size and chain.at(at) == address:
                boundaries.append((at, address, member))
        for _, address, member in sorted(boundaries, reverse=True):
            data = self.get(manifest_name(address))
            if data is not None:
                try:
                    return decode(data, address)
                except StoreFault:
                    self.erase([manifest_name(address)])
                    raise
            with _faults():
                self._client.srem(bucket, member)
        return None


@contextmanager
def _faults() -> Iterator[None]:
    try:
        yield
    except TimedOut as error:
        raise StoreFault("timeout", str(error)) from error
    except Unreachable as error:
        raise StoreFault("unreachable", str(error)) from error
    except ResponseError as error:
        reason = "full" if str(error).startswith("OOM") else "failed"
        raise StoreFault(reason, str(error)) from error
    except RedisError as error:
        raise StoreFault("failed", str(error)) from error
