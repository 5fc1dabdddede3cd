"""Chats about records: the bundled model passes, a wrong answer never does, and a model that does
not answer is no evidence."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from bench.serving import serving
from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

import merestone
from merestone.engine.build import EngineOptions, build_engine
from merestone.models.tiny import write_tiny
from merestone.probe.client import Server
from merestone.probe.discover import discover
from merestone.probe.records import ROWS, Table, calls, says
from merestone.probe.reply import Reply
from merestone.probe.report import FAIL, PASS, UNSUPPORTED, RowResult
from merestone.probe.rows import run, select
from merestone.serve.app import create_app as create_merestone
from merestone.serve.service import ServerOptions, Service
from merestone.serve.template import load_text
from probe.fake_server import BOS, CALL, TOOL, USER, Call, FakeServer, Faults, create_app, roll, row

BUNDLED = Path(merestone.__file__).parent / "assets" / "merestone-tiny"
NAMES = [name for name, _, _ in ROWS]


def asked(app: Any, names: Sequence[str] = NAMES) -> dict[str, RowResult]:
    """Run rows against an application, and return what came of each."""

    async def ask(url: str) -> list[RowResult]:
        async with Server(url) as server:
            probe = await discover(server, full=False, seed=0)
            return await run(probe, select(names))

    with serving(app) as url:
        return {row.name: row for row in asyncio.run(ask(url))}


def merestone_app(model: Path, memory: int) -> Any:
    engine = build_engine(model, EngineOptions(threads=1, memory=memory), "tiny")
    return create_merestone(Service(engine, load_text(model), ServerOptions("tiny")))


def test_the_bundled_model_passes() -> None:
    rows = asked(merestone_app(BUNDLED, 512 << 20))
    wrong = {name: row.failures or row.seen for name, row in rows.items() if row.verdict != PASS}
    assert not wrong
    assert set(rows) == {"power", *NAMES}


def test_random_weights_are_no_evidence(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    rows = asked(merestone_app(tmp_path, 64 << 20))
    assert rows.pop("power").verdict == PASS
    assert {row.verdict for row in rows.values()} == {UNSUPPORTED}
    assert all("does not find one record" in row.seen for row in rows.values())


@dataclass
class Reader(FakeServer):
    """A fake that reads: it finds records in a chat, and calls the function when a name is asked
    for. ``stale``: a hit answers with another value."""

    stale: bool = False

    async def generate(self, call: Call) -> AsyncIterator[tuple[int, list[tuple[int, float]]]]:
        if call.prompt[0] != BOS or USER not in call.prompt:
            async for pair in super().generate(call):
                yield pair
            return
        call.cached, state = self.lookup(call.salt, call.prompt)
        hit = call.cached > 0
        self.running += 1
        state = await self._prefill(call, call.salt, call.cached, state, seals=True)
        await asyncio.sleep(0)
        noise = self.running - 1 if self.faults.batch_matters else 0
        answer = self.answer(call.prompt, changed=self.stale and hit)
        for at, token in enumerate(answer):
            if at == len(answer) - 1:
                self.seal(call.salt, [*call.prompt, *answer[:-1]], state)
            _, top = row(state + noise)
            if self.faults.wrong_bits and hit:
                top[0] = (top[0][0], top[0][1] * (1 + 2**-52))
            yield token, top
            state = roll(state, [token])
        self.running -= 1

    def answer(self, prompt: Sequence[int], *, changed: bool) -> list[int]:
        text = "".join(chr(token) if token < 256 else "\n" for token in prompt)
        last = max(at for at, token in enumerate(prompt) if token in (USER, TOOL))
        question = text[last:]
        if found := re.search(r"key of (\w+)", question):
            arguments = json.dumps({"name": found[1]})
            return [CALL, *json.dumps({"name": "find_key", "arguments": arguments}).encode()]
        key = re.search(r"\b[A-Z]\d+\b", question)
        value = key and re.search(rf"Record {key[0]} holds (\d+)", text[:last])
        if value is None:
            return list(b"I have read it.")
        return list(str(int(value[1]) + changed).encode())


def reader_app(server: Reader) -> FastAPI:
    """The fake's application, whose calls come as ``tool_calls``."""
    app = create_app(server)

    @app.middleware("http")
    async def take_apart(
        request: Request, proceed: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        response: Any = await proceed(request)
        body = b"".join([part async for part in response.body_iterator])
        if b"find_key" not in body or not request.url.path.endswith("/chat/completions"):
            return Response(body, response.status_code, media_type=response.media_type)
        answer = json.loads(body)
        message = answer["choices"][0]["message"]
        function = json.loads(message["content"].removeprefix(chr(CALL)))
        message |= {"content": None, "tool_calls": [{"id": "call_1", "function": function}]}
        return JSONResponse(answer)

    return app


def test_a_server_that_reads_passes() -> None:
    rows = asked(reader_app(Reader()))
    wrong = {name: row.failures or row.seen for name, row in rows.items() if row.verdict != PASS}
    assert not wrong


def test_a_wrong_value_when_warm_fails() -> None:
    rows = asked(reader_app(Reader(stale=True)))
    assert rows.pop("power").verdict == PASS
    assert {row.verdict for row in rows.values()} == {FAIL}
    for name, result in rows.items():
        literal = [
            failure for failure in result.failures if re.search(r"warm: .*, not \d", failure)
        ]
        assert literal, name
        assert not [failure for failure in result.failures if "cold:" in failure]


@pytest.mark.parametrize(
    ("faults", "names"),
    [
        (Faults(grid=64), NAMES),
        (Faults(wrong_bits=True), NAMES),
        (Faults(batch_matters=True), ["records-concurrent"]),
    ],
    ids=["grid", "bits", "batch"],
)
def test_right_values_are_not_enough(faults: Faults, names: list[str]) -> None:
    rows = asked(reader_app(Reader(faults)), names)
    assert {rows[name].verdict for name in names} == {FAIL}


def test_tables_differ_in_values_alone() -> None:
    one, other = (Table.draw(1000, number, 0) for number in (0, 1))
    assert list(one.values) == list(other.values)
    assert not [key for key in one.values if one.values[key] == other.values[key]]
    assert len(set(one.values.values())) == len(one.values) == 111
    assert [key for part in one.parts(4) for key in part.values] == list(one.values)
    keys = list(one.values)
    assert one.spread(3) == [keys[0], keys[55], keys[110]]


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("48213", True),
        ("Record K7 holds 48213.", True),
        ("48213 or 48214", False),
        ("148213", False),
        ("K48213", False),
        ("", False),
        (None, False),
    ],
)
def test_a_literal_answer(text: str | None, right: bool) -> None:
    assert (says("48213")(Reply(message={"content": text})) is None) == right


@pytest.mark.parametrize(
    ("functions", "right"),
    [
        ([("find_key", '{"name": "Ada"}')], True),
        ([("find_key", '{"name":"Ada"}')], True),
        ([("find_key", '{"name": "Eva"}')], False),
        ([("get_weather", '{"name": "Ada"}')], False),
        ([("find_key", '{"name": "Ada"}')] * 2, False),
        ([("find_key", "Ada")], False),
        ([], False),
    ],
)
def test_a_call(functions: list[tuple[str, str]], right: bool) -> None:
    made = [{"function": {"name": name, "arguments": text}} for name, text in functions]
    reply = Reply(message={"tool_calls": made})
    assert (calls("find_key", {"name": "Ada"})(reply) is None) == right
