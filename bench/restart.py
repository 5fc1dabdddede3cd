"""A server restarts over its store: what comes back, how fast, and what was written for it.

Refuses to report when an answer after the restart is not the cold one, bit for bit. The last line
of the output is one JSON object.
"""

from __future__ import annotations

import json
import re
import signal
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx
import psutil
import typer

from bench.serving import merestone_process
from merestone.device.layout import plan_layout
from merestone.models.interface import CHUNK
from merestone.models.loader import load_model
from merestone.probe.streams import stream
from merestone.serve.cli import BUNDLED

OUTPUT = 32
TURNS, TURN = 10, 200  # of the chat, and the new tokens of each


class WrongResult(Exception):
    """The answers are not what they must be; figures would be worth nothing."""


@dataclass
class Answer:
    first_s: float
    ids: list[int]
    cached: int
    logprobs: list[Any]


def ask(url: str, prompt: list[int], salt: str, count: int = OUTPUT) -> Answer:
    """Stream a completion, timed by the client."""
    body = {
        "model": "merestone", "prompt": prompt, "max_tokens": count, "temperature": 0,
        "stream": True, "ignore_eos": True, "return_token_ids": True, "logprobs": 3,
        "cache_salt": salt, "stream_options": {"include_usage": True},
    }  # fmt: skip
    answer = Answer(0.0, [], 0, [])
    began = time.perf_counter()
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=600) as reply:
        reply.raise_for_status()
        for line in reply.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            for choice in chunk["choices"]:
                if choice.get("token_ids"):
                    answer.first_s = answer.first_s or time.perf_counter() - began
                    answer.ids += choice["token_ids"]
                    answer.logprobs.append(choice["logprobs"]["token_logprobs"])
            if chunk.get("usage"):
                answer.cached = chunk["usage"]["prompt_tokens_details"]["cached_tokens"]
    return answer


def metric(url: str, name: str) -> float:
    text = httpx.get(f"{url}/metrics").text
    found = re.findall(rf"^merestone_{name}(?:_total)?(?:\{{.*\}})? (\S+)$", text, re.M)
    return sum(map(float, found))


def settled(url: str) -> None:
    """Wait until everything published is on disk."""
    until = time.monotonic() + 60
    while metric(url, "store_waiting"):
        if time.monotonic() > until:
            raise WrongResult("the store does not settle")
        time.sleep(0.02)


def check(name: str, got: Answer, wanted: Answer) -> None:
    if (got.ids, got.logprobs) != (wanted.ids, wanted.logprobs):
        raise WrongResult(f"{name}: another answer than the cold one")


@dataclass
class Restart:
    """Seconds to the first token: cold, from memory, from the store after each kind of end."""

    prompt: int
    cold_s: float
    memory_s: float
    stored_s: float
    killed_s: float
    continued: int
    of: int


def restart(arguments: list[str], length: int) -> Restart:
    prompt = list(stream(length, 1, vocab=200))
    with merestone_process(arguments) as url:
        ask(url, list(stream(200, 2, vocab=200)), "warm-up", 4)
        cold = ask(url, prompt, "a")
        memory = ask(url, prompt, "a")
        check("replay", memory, cold)
        settled(url)
    longer = [*prompt, *cold.ids, *stream(50, 3, vocab=200)]
    seconds, continued = [], 0
    for end in (signal.SIGKILL, signal.SIGTERM):
        with merestone_process(arguments, end) as url:
            ask(url, list(stream(200, 4, vocab=200)), "warm-up", 4)
            stored = ask(url, prompt, "a")
            if stored.cached != length:
                raise WrongResult(f"{stored.cached} of {length} tokens came back")
            check("restored", stored, cold)
            seconds.append(stored.first_s)
            further = ask(url, longer, "a")
            continued = continued or further.cached
            check("continued", further, ask(url, longer, "another"))
            settled(url)
    return Restart(
        length, cold.first_s, memory.first_s, *seconds, continued, len(longer)
    )  # fmt: skip


@dataclass
class Chat:
    """Bytes that a chat writes. ``ideal``: each page and row once, and one state a turn."""

    turns: int
    tokens: int
    written: float
    ideal: float
    replays: float


def ideal(model: Path, turns: list[int]) -> float:
    """Bytes of the rows of a chat, each once, and of one state at each of ``turns``."""
    loaded = load_model(model, None, None)
    layout = plan_layout(
        loaded.fields(),
        hidden_bytes=loaded.info.hidden_size * loaded.info.dtype.itemsize,
        chunk=CHUNK,
        page_multiple=loaded.info.page_multiple,
    )
    state = layout.anchor_bytes + layout.hidden_bytes
    rows = turns[-1] * layout.row_bytes["full"]
    return rows + sum(state + at % CHUNK * layout.row_bytes["open"] for at in turns)


def chat(arguments: list[str], model: Path) -> Chat:
    with merestone_process(arguments) as url:
        history: list[int] = list(stream(300, 5, vocab=200))
        before = metric(url, "store_written_bytes")
        turns = []
        for turn in range(TURNS):
            answer = ask(url, history, "chat", 20)
            turns.append(len(history) + len(answer.ids) - 1)
            history += [*answer.ids, *stream(TURN, 6 + turn, vocab=200)]
        settled(url)
        written = metric(url, "store_written_bytes") - before
        for _ in range(10):
            ask(url, history[: -TURN - 20], "chat", 20)
        settled(url)
        replays = metric(url, "store_written_bytes") - before - written
        return Chat(TURNS, turns[-1], written, ideal(model, turns), replays)


@dataclass
class Budgets:
    """Bytes, at most at any time while ``chats`` were served. ``resident``: beyond what the
    process took before, with its pool full and its memory store empty."""

    chats: int
    memory_budget: int
    resident: int
    disk_budget: int
    on_disk: int
    evicted: float


def _size(place: Path) -> int:
    size = 0
    for path in place.glob("*/*/*"):
        with suppress(FileNotFoundError):  # erased meanwhile
            size += path.stat().st_blocks * 512
    return size


def budgets(arguments: list[str], place: Path, chats: int) -> Budgets:
    memory, disk = 24 << 20, 48 << 20
    stores = ["--store", f"memory:{memory}", "--store", f"disk:{place}:{disk}"]
    found = Budgets(chats, memory, 0, disk, 0, 0.0)
    with merestone_process([*arguments, "--memory", "32MiB", *stores]) as url:
        (server,) = psutil.Process().children()
        prompts = [[n // 100, *stream(60, n % 100, vocab=200)] for n in range(chats)]
        for prompt in prompts[:30]:
            ask(url, prompt, "warm-up", 8)
        settled(url)
        httpx.post(f"{url}/cache/reset").raise_for_status()
        start = server.memory_info().rss
        for prompt in prompts:
            answer = ask(url, prompt, "chat", 8)
            ask(url, [*prompt, *answer.ids, *stream(20, 7, vocab=200)], "chat", 8)
            found.resident = max(found.resident, server.memory_info().rss - start)
            found.on_disk = max(found.on_disk, _size(place))
        found.evicted = metric(url, "store_evicted")
    return found


def main(
    length: Annotated[int, typer.Option(help="Prompt tokens.")] = 8192,
    chats: Annotated[int, typer.Option(help="Chats of the budgets' run.")] = 200,
    model: Annotated[str | None, typer.Option(help="Directory. Default: bundled.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the JSON object there, too.")] = None,
) -> None:
    with tempfile.TemporaryDirectory() as place:
        arguments = [*([model] if model else []), "--served-model-name", "merestone"]
        first = [*arguments, "--store", f"disk:{place}/a:8GiB", "--store-wait", "30"]
        try:
            times = restart(first, length)
            bytes_ = chat(
                [*arguments, "--store", f"disk:{place}/b:8GiB"], Path(model) if model else BUNDLED
            )
            kept = budgets(arguments, Path(place) / "c", chats)
        except WrongResult as error:
            print(f"refused: {error}", file=sys.stderr)
            raise typer.Exit(1) from error
    print(f"first token of {times.prompt} tokens: cold {times.cold_s:.3f} s,"
          f" from memory {times.memory_s:.3f} s, from disk {times.stored_s:.3f} s,"
          f" after kill -9 {times.killed_s:.3f} s"
          f" ({100 * times.stored_s / times.cold_s:.1f}% of cold)")  # fmt: skip
    print(f"the next turn restored {times.continued} of {times.of}")
    print(f"a chat of {bytes_.turns} turns, {bytes_.tokens} tokens wrote {bytes_.written:,.0f} B,"
          f" {bytes_.written / bytes_.ideal:.2f} times its rows and one state a turn;"
          f" ten replays wrote {bytes_.replays:,.0f} B")  # fmt: skip
    print(f"{kept.chats} chats: memory store of {kept.memory_budget:,} B, resident at most"
          f" {kept.resident:,} B more; disk store of {kept.disk_budget:,} B, at most"
          f" {kept.on_disk:,} B; {kept.evicted:,.0f} checkpoints evicted")  # fmt: skip
    result = json.dumps({"restart": asdict(times), "chat": asdict(bytes_), "budgets": asdict(kept)})
    if out is not None:
        out.write_text(result + "\n")
    print(result)


if __name__ == "__main__":
    typer.run(main)
