"""A long mixed run on a pool that is too small: nothing may break, leak, or change an answer.

An engine and its HTTP server run in this process, so that the audit can be asked between two
steps; the last line of the output is one JSON object, and the exit status says whether all is well.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Annotated, Any

import psutil
import typer

from bench.about import publish
from bench.serving import serving
from bench.traffic import COMPLETIONS, Traffic
from merestone.core.audit import audit
from merestone.engine.build import EngineOptions, build_engine
from merestone.engine.engine import LocalEngine
from merestone.models.tiny import write_tiny
from merestone.probe.client import Refused, Server
from merestone.probe.reply import Broken
from merestone.serve.app import create_app
from merestone.serve.service import ServerOptions, Service
from merestone.serve.template import load_text

EVERY = 50  # requests between two looks at memory and books
GROWTH, SLACK = 1.05, 24 << 20
"""Memory is flat when the last third's peak is no more than the middle third's, by this factor,
and this many bytes, which an allocator may need for no reason of ours."""


@dataclass
class Findings:
    """What came of a run. ``rss`` in bytes, one for every ``EVERY`` requests."""

    requests: int = 0
    disconnects: int = 0
    compared: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    errors: list[str] = field(default_factory=list)
    unequal: list[str] = field(default_factory=list)
    rss: list[int] = field(default_factory=list)
    audits: int = 0

    @property
    def flat(self) -> bool:
        """Whether memory stopped growing; True of a run too short to tell."""
        third = len(self.rss) // 3
        if third < 2:
            return True
        return max(self.rss[-third:]) <= GROWTH * max(self.rss[third:-third]) + SLACK


@dataclass
class Soak:
    """One run against one server. A share ``disconnect`` of the requests is left at a random
    moment, a share ``compare`` compared with a cold run: which ones is the seed's, not the time's.
    """

    server: Server
    engine: LocalEngine
    traffic: Traffic
    seed: int
    disconnect: float
    compare: float
    found: Findings = field(default_factory=Findings)

    async def run(self, requests: int, clients: int) -> None:
        """Send that many requests from that many clients."""
        left = iter(range(requests))

        async def client() -> None:
            for number in left:
                await self._one(Random(f"{self.seed}/chance/{number}"))
                self.found.requests += 1
                if self.found.requests % EVERY == 0:
                    await self.look()

        await asyncio.gather(*(client() for _ in range(clients)))
        await self._rest()
        await self.look()

    async def _one(self, chance: Random) -> None:
        path, body = self.traffic.next()
        fate, stream = chance.random(), chance.random() < 0.5
        patience = chance.expovariate(1 / 0.15)
        try:
            if fate < self.disconnect:
                self.found.disconnects += await self._leave(path, body, stream, patience, chance)
            elif fate < self.disconnect + self.compare:
                await self._compare(path, body)
            else:
                await self._send(path, body, stream, chance)
        except (Broken, Refused) as error:
            self.found.errors.append(f"{path}: {error}")

    async def _send(self, path: str, body: dict[str, Any], stream: bool, chance: Random) -> None:
        reply = await self.server.generate(
            path, body, body["max_tokens"], body["cache_salt"], stream
        )
        self.found.prompt_tokens += reply.prompt_tokens or 0
        self.found.cached_tokens += reply.cached
        if path == COMPLETIONS and reply.ids and chance.random() < 0.2:
            longer = {**body, "prompt": [*body["prompt"], *reply.ids, 1, 2, 3], "n": 1}
            await self._send(path, longer, stream, chance)

    async def _leave(
        self, path: str, body: dict[str, Any], stream: bool, after_s: float, chance: Random
    ) -> bool:
        """Close the connection at a random moment: in the queue, in a prefill, in a stream."""
        try:
            async with asyncio.timeout(after_s):
                await self._send(path, body, stream, chance)
        except TimeoutError:
            return True
        return False

    async def _compare(self, path: str, body: dict[str, Any]) -> None:
        """The same under a salt never used before: every choice, with its log probabilities."""
        self.found.compared += 1
        salt = f"cold-{self.found.compared}"  # before another comparison begins
        warm = await self.server.post(path, body)
        cold = await self.server.post(path, {**body, "cache_salt": salt})
        if cold["usage"]["prompt_tokens_details"]["cached_tokens"]:
            self.found.errors.append(f"{path}: a hit under a salt never used before")
        for one, other in zip(warm["choices"], cold["choices"], strict=True):
            same = all(one[key] == other[key] for key in ("token_ids", "logprobs"))
            if not same:
                usage = warm["usage"]["prompt_tokens_details"]
                self.found.unequal.append(f"{path}, choice {one['index']}, {usage}, {body}")

    async def look(self) -> None:
        """Memory, and the books with every live lease."""
        self.found.rss.append(psutil.Process().memory_info().rss)
        try:
            await asyncio.to_thread(self.engine.ask, self._audit)
        except AssertionError as error:
            self.found.errors.append(f"audit: {error}")
        self.found.audits += 1

    def _audit(self) -> None:
        running = [sequence.lease for sequence in self.engine.scheduler.running]
        audit(self.engine.cache, [lease for lease in running if lease is not None])

    async def _rest(self) -> None:
        """Wait until nobody runs any more: the last aborts are on their way."""
        deadline = time.monotonic() + 60
        while (health := self.engine.health())["running"] or health["waiting"]:
            if time.monotonic() > deadline:
                self.found.errors.append(f"does not come to rest: {health}")
                return
            await asyncio.sleep(0.05)


def main(
    requests: Annotated[int, typer.Option(min=1)] = 2000,
    seed: Annotated[int, typer.Option()] = 0,
    memory: Annotated[int, typer.Option(help="MiB of the pool.")] = 8,
    clients: Annotated[int, typer.Option(min=1)] = 12,
    disconnect: Annotated[float, typer.Option(help="Share of requests left early.")] = 0.2,
    compare: Annotated[float, typer.Option(help="Share compared with cold.")] = 0.02,
    threads: Annotated[int, typer.Option(help="Of the engine.")] = 2,
    model: Annotated[Path | None, typer.Option(help="Default: a tiny random one.")] = None,
    save: Annotated[Path | None, typer.Option(help="Write the JSON there, too.")] = None,
) -> None:
    """Run it and report."""
    logging.getLogger("merestone").setLevel(logging.ERROR)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        directory = model or Path(scratch)
        if model is None:
            write_tiny(directory)
        options = EngineOptions(threads=threads, memory=memory << 20, poison=True)
        engine = build_engine(directory, options, "soak")
        service = Service(engine, load_text(directory), ServerOptions("soak"))

        async def everything(url: str) -> tuple[Findings, int, dict[str, float]]:
            async with Server(url, model="soak") as server:
                traffic = Traffic(seed, min(engine.info.vocab_size, 256))
                soak = Soak(server, engine, traffic, seed, disconnect, compare)
                await soak.run(requests, clients)
                status = (await server.get("/health"))["status"]
                if status != "ok":
                    soak.found.errors.append(f"/health: {status}")
                samples = await server.metrics()
                dropped = (await server.post("/cache/reset", {}))["dropped"]
                await soak.look()
                return soak.found, dropped, samples

        with serving(create_app(service)) as url:
            found, dropped, samples = asyncio.run(everything(url))
    report = summary(found, samples) | {
        "dropped_at_the_end": dropped,
        "seed": seed,
        "memory_mib": memory,
        "threads": threads,
        "seconds": round(time.monotonic() - began, 1),
    }
    publish(report, save)
    sys.exit(0 if report["ok"] else 1)


def summary(found: Findings, samples: dict[str, float]) -> dict[str, Any]:
    """The findings as numbers, with the engine's own counts."""

    def count(name: str) -> float:
        return sum(value for key, value in samples.items() if key.split("{")[0] == name)

    report = asdict(found)
    rss = report.pop("rss")
    report |= {
        "errors": found.errors[:10],
        "unequal": found.unequal[:10],
        "rss_start_mib": rss[0] >> 20,
        "rss_peak_mib": max(rss) >> 20,
        "rss_end_mib": rss[-1] >> 20,
        "memory_flat": found.flat,
        "cached_share": round(found.cached_tokens / max(found.prompt_tokens, 1), 3),
        "evicted": count("merestone_checkpoints_evicted_total"),
        "preemptions": count("merestone_preemptions_total"),
    }
    report["ok"] = not found.errors and not found.unequal and found.flat
    return report


if __name__ == "__main__":
    typer.run(main)
