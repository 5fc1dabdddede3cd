"""What every row works with: the server, what it can do, salts, streams and disturbances."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import TypeVar

from merestone.probe import streams
from merestone.probe.client import Server
from merestone.probe.reply import Broken, Reply, Unsupported
from merestone.probe.report import Check

Choice = TypeVar("Choice")

DISTURBANCES = ("quiet", "between", "inflight", "overturned")
"""What happens between two legs of a comparison (C17): nothing, another prompt of 1,000 tokens,
four cold prefills at a time, or enough cold prompts to fill the pool twice over."""

_EVICTED = "merestone_checkpoints_evicted_total"
_KEPT = "merestone_checkpoints"
_USED = "merestone_frames_used"
_FRAMES = "merestone_frames_total"
_ADVICE = "start the server with less --memory, or raise --fill-limit"
_FILLER = 127  # tokens: on a hybrid model a short prompt takes nearly the memory of a long one
_AT_ONCE = 8


@dataclass(slots=True)
class Probe:
    """A run against one server. ``have`` names what the server can do (see ``discover``);
    ``context``, ``pool_tokens`` are None where unknown. ``fill_limit``: requests that one turning
    over of the pool may take."""

    server: Server
    full: bool
    seed: int
    vocab: int
    have: frozenset[str] = frozenset()
    context: int | None = None
    pool_tokens: int | None = None
    fill_limit: int = 4000
    nonce: str = field(default_factory=lambda: secrets.token_hex(6))
    numbers: count[int] = field(default_factory=count)

    def salt(self) -> str:
        """A cache salt never used before."""
        return f"probe-{self.nonce}-{next(self.numbers)}"

    def pick(self, quick: Choice, full: Choice) -> Choice:
        """One of two sizes."""
        return full if self.full else quick

    def stream(self, length: int, number: int) -> list[int]:
        """``T(length, number)`` in this vocabulary."""
        return streams.stream(length, number, vocab=self.vocab, seed=self.seed)

    def fits(self, check: Check, tokens: int) -> bool:
        """Whether the context takes that many tokens; says so in the row if not."""
        if self.context is None or tokens <= self.context:
            return True
        check.skipped.append(f"{tokens} tokens do not fit into a context of {self.context}")
        return False

    async def send(
        self, prompt: Sequence[int], max_tokens: int, salt: str, *, stream: bool = False
    ) -> Reply:
        """One greedy request under a salt."""
        return await self.server.complete(prompt, max_tokens, salt=salt, stream=stream)

    async def cold(self, prompt: Sequence[int], max_tokens: int, *, stream: bool = False) -> Reply:
        """The oracle: the same under a salt never used before.

        Raises:
            Broken: the server says that some of it was cached.
        """
        reply = await self.send(prompt, max_tokens, self.salt(), stream=stream)
        require_cold(reply)
        return reply

    async def timed(self, prompt: Sequence[int], max_tokens: int) -> Reply:
        """The oracle as it comes to one who waits for nothing else: the quicker of two."""
        runs = [await self.cold(prompt, max_tokens, stream=True) for _ in range(2)]
        return min(runs, key=lambda reply: reply.first_s)

    @asynccontextmanager
    async def disturbed(self, kind: str) -> AsyncIterator[None]:
        """Run the body under a disturbance."""
        assert kind in DISTURBANCES, kind
        if kind == "between":
            await self.send(self.stream(1000, self.vocab - 1), 1, self.salt())
        elif kind == "overturned":
            await self.overturn()
        elif kind == "inflight":
            workers = [asyncio.create_task(self._prefill_forever()) for _ in range(4)]
            try:
                await asyncio.sleep(0.05)  # let them reach the server first
                yield
                for worker in workers:
                    if worker.done():
                        worker.result()
            finally:
                for worker in workers:
                    worker.cancel()
                await asyncio.gather(*workers, return_exceptions=True)
            return
        yield

    async def _prefill_forever(self) -> None:
        while True:
            await self.send(self.stream(1000, 0), 1, self.salt())

    async def overturn(self) -> int:
        """Fill the pool twice over with cold prompts, and return how many it took.

        That is so when twice as many checkpoints as it holds were evicted; on a server that does
        not count evictions, when twice its tokens have been sent.

        Raises:
            Unsupported: the size of the pool is unknown, or ``fill_limit`` is not enough.
        """
        if self.pool_tokens is not None:
            length = min(1000, self.pool_tokens)
            requests = -(-2 * self.pool_tokens // length)
            if requests > self.fill_limit:
                raise Unsupported(f"{requests} requests fill the pool: more than --fill-limit")
            for begin in range(0, requests, _AT_ONCE):
                await self._fill(length, min(_AT_ONCE, requests - begin))
            return requests
        samples = await self._samples()
        start, sent, most = total(samples, _EVICTED) or 0.0, 0, 0.0
        while True:
            used, frames = total(samples, _USED), total(samples, _FRAMES)
            await self._fill(_FILLER, _AT_ONCE)
            sent += _AT_ONCE
            samples = await self._samples()
            evicted, kept = (total(samples, _EVICTED) or 0.0) - start, total(samples, _KEPT) or 0.0
            if evicted >= 2 * max(kept, 1):
                return sent
            # One growth says little: a seal may be counted late, and a full pool hardly grows.
            most = max(most, (total(samples, _USED) or 0.0) - (used or 0.0))
            early = sent == _AT_ONCE or not most
            if frames and not early and 2 * frames / most * _AT_ONCE > self.fill_limit:
                raise Unsupported(f"a pool of {frames:.0f} frames is too large to fill: {_ADVICE}")
            if sent >= self.fill_limit:
                raise Unsupported(f"{sent} requests evicted {evicted:.0f} checkpoints: {_ADVICE}")

    async def _fill(self, length: int, requests: int) -> None:
        prompt = self.stream(length, 0)
        await asyncio.gather(*(self.send(prompt, 1, self.salt()) for _ in range(requests)))

    async def _samples(self) -> dict[str, float]:
        if "metrics" not in self.have:
            raise Unsupported("no /metrics and no --pool-tokens: the pool's size is unknown")
        samples = await self.server.metrics()
        if total(samples, _KEPT) is None:
            raise Unsupported(f"/metrics has no {_KEPT}, and there is no --pool-tokens")
        return samples


async def gather(width: int, jobs: Sequence[Callable[[], Awaitable[None]]]) -> None:
    """Run all jobs, at most ``width`` at a time; the first failure ends the others."""
    gate = asyncio.Semaphore(width)

    async def run(job: Callable[[], Awaitable[None]]) -> None:
        async with gate:
            await job()

    async with asyncio.TaskGroup() as group:
        for job in jobs:
            group.create_task(run(job))


def require_cold(reply: Reply) -> None:
    """A request under a new salt may have found nothing in the cache."""
    if reply.cached:
        raise Broken(f"C={reply.cached} under a cache_salt never used before")


def total(samples: dict[str, float], name: str) -> float | None:
    """The sum of a metric over its labels; None if there is no such metric."""
    found = [value for key, value in samples.items() if key.split("{")[0] == name]
    return sum(found) if found else None
