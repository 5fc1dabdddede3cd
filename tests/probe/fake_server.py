"""A tiny OpenAI-compatible server with an exact prefix cache, and ways to be broken.

The "model" is a rolling hash of all ids so far: every token and every log probability depends on
the whole prefix, so whatever a cache gets wrong shows.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

VOCAB, CONTEXT, CHUNK = 320, 3300, 500
BOS, SYSTEM, USER, ASSISTANT, TOOL, THINK, END_THINK, CALL = range(256, 264)
ROLE = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT, "tool": TOOL}
Root = tuple[str, tuple[int, ...]]


@dataclass
class Faults:
    """How this server is broken; without any it is right."""

    grid: int = 1  # reuse ends at multiples of this
    wrong_ids: bool = False  # a hit begins with another state
    wrong_bits: bool = False  # a hit changes the last bit of a log probability
    drops_tail: bool = False  # a hit forgets the last token of the boundary
    lies: bool = False  # says that repeats are restored and computes them
    shares_salts: bool = False
    alternates: bool = False  # seals only what missed
    publishes_early: bool = False  # an aborted prefill is kept as if it had finished
    batch_matters: bool = False  # answers depend on who else runs
    forgets_junctions: bool = False
    lacks: frozenset[str] = frozenset()
    forgetful: bool = False  # only the last 64 ids matter


@dataclass
class Clock:
    """Stands in for the module ``time``: it goes on where a server says so."""

    now: float = 0.0

    def perf_counter(self) -> float:
        return self.now


@dataclass
class FakeServer:
    """``seconds`` a prompt token, of the ``clock``'s if there is one; at most ``room`` checkpoints
    are kept."""

    faults: Faults = field(default_factory=Faults)
    seconds: float = 0.0
    clock: Clock | None = None
    room: int = 400
    kept: OrderedDict[Root, int] = field(default_factory=OrderedDict)
    counts: Counter[str] = field(default_factory=Counter)
    running: int = 0
    begun: int = 0

    def lookup(self, salt: str, prompt: Sequence[int]) -> tuple[int, int]:
        """The deepest boundary that begins the prompt, and the state there."""
        ends = sorted({len(ids) for owner, ids in self.kept if owner == salt}, reverse=True)
        for end in ends:
            key = (salt, tuple(prompt[:end]))
            if end <= len(prompt) and key in self.kept:
                self.kept.move_to_end(key)
                return end, self.kept[key]
        return 0, 0

    def junction(self, salt: str, prompt: Sequence[int], cached: int) -> int:
        """Where the prompt parts from what is known, if that is far above what is cached."""
        known = [ids for owner, ids in self.kept if owner == salt]
        part = max((common(ids, prompt) for ids in known), default=0)
        return part if part - cached >= 64 and not self.faults.forgets_junctions else 0

    def seal(self, salt: str, ids: Sequence[int], state: int) -> None:
        if len(ids) % self.faults.grid == 0:
            self.kept[salt, tuple(ids)] = state
        while len(self.kept) > self.room:
            self.kept.popitem(last=False)
            self.counts["evicted"] += 1

    async def generate(self, call: Call) -> AsyncIterator[tuple[int, list[tuple[int, float]]]]:
        """Tokens with their best alternatives; ``call.cached`` is set before the first."""
        salt = "" if self.faults.shares_salts else call.salt
        cached, state = (0, 0) if call.scored else self.lookup(salt, call.prompt)
        whole = cached == len(call.prompt)
        self.counts["exact" if whole else "partial" if cached else "miss"] += not call.scored
        self.counts["not_eligible"] += call.scored
        call.cached, hit = cached, cached > 0
        if hit:
            state += self.faults.wrong_ids
            if self.faults.drops_tail:
                state = roll(0, call.prompt[: cached - 1])
        if self.faults.lies and hit:
            call.cached, cached, state = len(call.prompt), 0, 0
        call.marks = sorted({*call.marks, self.junction(salt, call.prompt, cached)} - {0})
        self.running += 1
        self.begun += 1
        try:
            state = await self._prefill(call, salt, cached, state, seals=not hit)
            # Never twice the same: two batches of one size must not be wrong alike.
            alone = self.running == 1 or not self.faults.batch_matters
            noise = 0 if alone else self.begun
            output: list[int] = []
            while len(output) < call.max_tokens:
                await self._compute(1)
                seen = state if not self.faults.forgetful else self._forget(call.prompt, output)
                token, top = row(seen + noise)
                if self.faults.wrong_bits and hit:
                    top[0] = (top[0][0], top[0][1] * (1 + 2**-52))
                output.append(token)
                if len(output) == call.max_tokens and not (self.faults.alternates and hit):
                    self.seal(salt, [*call.prompt, *output[:-1]], state)
                yield token, top
                state = roll(state, [token])
        finally:
            self.running -= 1

    async def _prefill(self, call: Call, salt: str, at: int, state: int, seals: bool) -> int:
        if self.faults.publishes_early:
            self.seal(salt, call.prompt, roll(0, call.prompt[: len(call.prompt) // 2]))
        stops = sorted({*call.marks, *range(CHUNK, len(call.prompt), CHUNK), len(call.prompt)})
        for stop in stops:
            if stop > at:
                await self._compute(stop - at)
                state, at = roll(state, call.prompt[at:stop]), stop
                inner = stop < len(call.prompt) and stop not in call.marks
                if (seals or not self.faults.alternates) and not (inner and call.keeps_nothing):
                    call.passed.append((stop, state))
                    if not inner:
                        self.seal(salt, call.prompt[:stop], state)
        return state

    async def _compute(self, tokens: int) -> None:
        if self.clock is not None:
            self.clock.now += tokens * self.seconds
        await asyncio.sleep(0 if self.clock is not None else tokens * self.seconds)

    def _forget(self, prompt: Sequence[int], output: Sequence[int]) -> int:
        return roll(0, [*prompt, *output][-64:])

    def abandoned(self, call: Call) -> None:
        """Keep what an aborted prefill has finished."""
        if call.passed:
            self.seal(call.salt, call.prompt[: call.passed[-1][0]], call.passed[-1][1])


@dataclass
class Call:
    prompt: list[int]
    max_tokens: int
    salt: str
    marks: list[int]
    scored: bool
    cached: int = 0
    keeps_nothing: bool = False
    passed: list[tuple[int, int]] = field(default_factory=list)


def common(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def roll(state: int, ids: Sequence[int]) -> int:
    for token in ids:
        state = (state * 6364136223846793005 + token + 1) % (2**61 - 1)
    return state


def row(state: int) -> tuple[int, list[tuple[int, float]]]:
    """The greedy letter of a state, and five alternatives."""
    first = state // 64 % 26
    return 97 + first, [(97 + (first + k) % 26, -(state % 997 + k + 1) / 991) for k in range(5)]


def text_of(content: Any) -> str:
    return "".join(p["text"] for p in content) if isinstance(content, list) else content or ""


def render(messages: Sequence[dict[str, Any]], header: bool, keep: bool) -> list[int]:
    last = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)
    ids = [BOS]
    for i, message in enumerate(messages):
        ids.append(ROLE[message["role"]])
        if (thought := message.get("reasoning_content")) is not None:
            ids += [THINK, *(thought.encode() if keep or i > last else b""), END_THINK]
        ids += text_of(message.get("content")).encode()
        for call in message.get("tool_calls") or ():
            ids += [CALL, *json.dumps(call["function"]).encode()]
    return [*ids, ASSISTANT] if header else ids


def conversation(body: dict[str, Any]) -> tuple[list[int], list[tuple[int, str]]]:
    messages, keep = body["messages"], False
    variables = body.get("chat_template_kwargs") or {}
    keep = variables.get("clear_thinking") is False
    leading = 0
    while leading < len(messages) and messages[leading]["role"] == "system":
        leading += 1
    whole = render(messages, True, keep)
    found = [(len(render(messages, False, keep)), "turn")]
    for count in range(leading + 1, len(messages)):
        part = render(messages[:count], False, keep)
        if part == whole[: len(part)]:
            found.append((len(part), "message"))
    for count, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list) and content[0].get("cache_control"):
            begun = [*messages[:count], {**message, "content": content[:1]}]
            found.append((len(render(begun, False, keep)), "mark"))
    if leading:
        found.insert(0, (len(render(messages[:leading], False, keep)), "instruction"))
    return whole, sorted(found)


def refuse(message: str, status: int = 400) -> Response:
    return JSONResponse({"error": {"message": message}}, status)


def create_app(server: FakeServer) -> FastAPI:
    app, lacks = FastAPI(), server.faults.lacks

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = await request.json()
        prompt = body["prompt"]
        if isinstance(prompt, str) or "ids" in lacks:
            return refuse("prompt must be a list of ids" if "ids" not in lacks else "only text")
        if any(not 0 <= token < VOCAB for token in prompt):
            return refuse(f"ids must be below {VOCAB}")
        return await answer(body, prompt, body.get("cache_boundaries") or [], chat=False)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        body = await request.json()
        prompt, boundaries = conversation(body)
        return await answer(body, prompt, [at for at, _ in boundaries], chat=True)

    async def answer(body: dict[str, Any], prompt: list[int], marks: Any, chat: bool) -> Response:
        if "salt" not in lacks and not isinstance(body.get("cache_salt"), str):
            return refuse("cache_salt must be a string")
        if "marks" in lacks:
            marks = []
        elif not isinstance(marks, list):
            return refuse("cache_boundaries must be a list")
        if len(prompt) + body["max_tokens"] > CONTEXT:
            return refuse(f"{len(prompt)} tokens are too many for {CONTEXT}")
        salt = "" if "salt" in lacks else body["cache_salt"]
        scored = body.get("prompt_logprobs") is not None
        call = Call(prompt, body["max_tokens"], salt, marks, scored)
        if body.get("stream"):
            return StreamingResponse(events(body, call, chat), media_type="text/event-stream")
        pairs = [pair async for pair in server.generate(call)]
        whole = {**choice(body, call, pairs, chat), "finish_reason": "length"}
        if not chat and scored:
            whole["prompt_logprobs"] = [None, *prompt[1:]]
        extra = {"prompt_token_ids": prompt} if chat and "tokens" not in lacks else {}
        return JSONResponse({"choices": [whole], "usage": usage(call), **extra})

    async def events(body: dict[str, Any], call: Call, chat: bool) -> AsyncIterator[str]:
        done = False
        try:
            async for pair in server.generate(call):
                chunk: dict[str, Any] = {"choices": [choice(body, call, [pair], chat)]}
                if chat and "tokens" not in lacks:
                    chunk["prompt_token_ids"] = call.prompt
                yield f"data: {json.dumps(chunk)}\n\n"
            yield f"data: {json.dumps({'choices': [], 'usage': usage(call)})}\n\n"
            yield "data: [DONE]\n\n"
            done = True
        finally:
            if not done:
                server.abandoned(call)

    def choice(body: dict[str, Any], call: Call, pairs: list[Any], chat: bool) -> dict[str, Any]:
        text = "".join(chr(token) for token, _ in pairs)
        out: dict[str, Any] = {"index": 0}
        if "tokens" not in lacks:
            out["token_ids"] = [token for token, _ in pairs]
        if chat:
            key = "delta" if body.get("stream") else "message"
            out[key] = {"role": "assistant", "content": text}
        else:
            out |= {"text": text, "prompt_token_ids": call.prompt}
        if "logprobs" not in lacks:
            out["logprobs"] = chat_table(pairs) if chat else table(pairs)
        return out

    def usage(call: Call) -> dict[str, Any]:
        counts: dict[str, Any] = {"prompt_tokens": len(call.prompt)}
        if "cached" not in lacks:
            counts["prompt_tokens_details"] = {"cached_tokens": call.cached}
        return counts

    add_reports(app, server)
    return app


def table(pairs: list[Any]) -> dict[str, Any]:
    return {
        "token_logprobs": [top[0][1] for _, top in pairs],
        "top_logprobs": [{chr(token): value for token, value in top} for _, top in pairs],
    }


def chat_table(pairs: list[Any]) -> dict[str, Any]:
    rows = [[{"token": chr(t), "logprob": value} for t, value in top] for _, top in pairs]
    return {"content": [{**top[0], "top_logprobs": top} for top in rows]}


def add_reports(app: FastAPI, server: FakeServer) -> None:
    lacks = server.faults.lacks

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"data": [{"id": "fake", "max_model_len": CONTEXT}]})

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        body = await request.json()
        if "render" in lacks:
            return refuse("no such path", 404)
        if "messages" not in body:
            return JSONResponse({"tokens": list(body["prompt"].encode())})
        ids, boundaries = conversation(body)
        return JSONResponse({"tokens": ids, "boundaries": boundaries})

    @app.get("/metrics")
    async def metrics() -> Response:
        if "metrics" in lacks:
            return refuse("no such path", 404)
        counts = server.counts
        lines = [
            f"merestone_checkpoints {len(server.kept)}",
            f"merestone_checkpoints_evicted_total {counts['evicted']}",
            f"merestone_frames_used {len(server.kept)}",
            f"merestone_requests_running {server.running}",
            "merestone_preemptions_total 0",
            "merestone_smallest_reusable_tokens 1",
        ]
        for outcome in ("exact", "partial", "miss", "not_eligible"):
            name = f'merestone_lookups_total{{outcome="{outcome}"}}'
            lines.append(f"{name} {counts[outcome]}")
        return PlainTextResponse("\n".join(lines) + "\n")
