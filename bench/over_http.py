"""A server asked in streams: what a client in another process sees."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from bench.inprocess import Timed
from merestone.probe.client import Server
from merestone.probe.reply import Reply


class OverHttp:
    """A server in a process of its own, whose model is called "bench" and has ``vocab`` ids."""

    def __init__(self, url: str, vocab: int) -> None:
        self.url = url
        self.vocab = vocab

    def generate(
        self, prompts: Sequence[Sequence[int]], count: int, salt: str, *, cache: bool = True
    ) -> list[Timed]:
        """As ``InProcess.generate``."""
        bodies = [{"prompt": list(prompt), "cache_prompt": cache} for prompt in prompts]

        async def ask() -> list[Timed]:
            async with Server(self.url, model="bench") as server:
                await server.get("/health")  # the connection is not what is measured
                replies = await asyncio.gather(
                    *(server.generate("/v1/completions", b, count, salt, True) for b in bodies)
                )
            return [Timed(r.ids, _times(r), r.arrivals[-1], r.cached) for r in replies]

        return asyncio.run(ask())


def _times(reply: Reply) -> list[float]:
    """When each token came. A chunk can bring several: they are dealt over the chunks evenly."""
    tokens, chunks = len(reply.ids), len(reply.arrivals)
    return [reply.arrivals[number * chunks // tokens] for number in range(tokens)]
