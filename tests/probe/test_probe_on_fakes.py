"""The probe must pass a right server, catch each broken one, and never pass what it cannot see."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import typer
from bench.serving import serving
from typer.testing import CliRunner

from merestone.probe import client
from merestone.probe.cli import probe as probe_command
from merestone.probe.client import Server
from merestone.probe.discover import discover
from merestone.probe.report import FAIL, PASS, UNSUPPORTED, RowResult
from merestone.probe.rows import ROWS, run, select
from probe.fake_server import CONTEXT, VOCAB, Clock, FakeServer, Faults, create_app


def verdicts(server: FakeServer, *names: str) -> dict[str, RowResult]:
    """Run rows against a fake, and return what came of each."""

    async def ask(url: str) -> list[RowResult]:
        async with Server(url) as asked:
            found = await discover(asked, full=False, seed=0)
            return await run(found, select(names))

    with pytest.MonkeyPatch.context() as patch, serving(create_app(server)) as url:
        if server.clock is not None:
            patch.setattr(client, "time", server.clock)
        return {row.name: row for row in asyncio.run(ask(url))}


def test_a_right_server_passes_every_row() -> None:
    # The clock's rows need a prefill that takes time; the others are quicker without.
    slow = {"C18", "C23", "C35", "C36"}
    small = {"replay-overturned"}
    others = {name for name, _, _ in ROWS} - slow - small - {"counter"}
    rows = verdicts(FakeServer(), *others)
    rows |= verdicts(FakeServer(seconds=1e-4), *slow)
    rows |= verdicts(FakeServer(room=60), *small)
    rows |= verdicts(FakeServer(seconds=1e-4, clock=Clock()), "counter")
    wrong = {name: row.seen for name, row in rows.items() if row.verdict != PASS}
    assert not wrong
    assert set(rows) == {name for name, _, _ in ROWS}


@pytest.mark.parametrize(
    ("faults", "names"),
    [
        (Faults(grid=256), ("replay-quiet", "appended", "C01", "C08", "C33", "C44")),
        (Faults(grid=64), ("replay-quiet", "C02", "C47", "chat-thinking-kept")),
        (Faults(wrong_ids=True), ("replay-quiet", "replay-between", "C20", "C38")),
        (Faults(wrong_bits=True), ("replay-quiet", "appended", "open-case", "C06", "C24")),
        (Faults(drops_tail=True), ("replay-quiet", "C22", "C32", "C38")),
        (Faults(shares_salts=True), ("replay-quiet", "C28")),
        (Faults(alternates=True), ("C44",)),
        (Faults(forgets_junctions=True), ("junction",)),
        (Faults(batch_matters=True), ("replay-inflight", "replay-4-at-once", "C21", "C51")),
    ],
    ids=lambda value: (
        None
        if isinstance(value, tuple)
        else next(name for name, fault in vars(value).items() if fault != getattr(Faults(), name))
        + f"-{value.grid}"
    ),
)
def test_a_broken_server_fails(faults: Faults, names: tuple[str, ...]) -> None:
    rows = verdicts(FakeServer(faults), *names)
    wrong = {name: rows[name].verdict for name in names if rows[name].verdict != FAIL}
    assert not wrong


def test_a_counter_that_lies_is_held_against_the_clock() -> None:
    liar = FakeServer(Faults(lies=True), seconds=1e-4, clock=Clock())
    rows = verdicts(liar, "counter", "C10", "replay-quiet")
    assert rows["counter"].verdict == FAIL
    assert "in 1.00 of cold" in rows["counter"].seen
    assert rows["replay-quiet"].verdict == PASS  # its ids are right: only the clock can tell


def test_a_state_published_before_it_was_written_is_caught() -> None:
    rows = verdicts(FakeServer(Faults(publishes_early=True), seconds=1e-4), "C18")
    assert rows["C18"].verdict == FAIL


def test_equality_without_power_counts_for_nothing() -> None:
    rows = verdicts(FakeServer(Faults(forgetful=True)), "replay-quiet", "C01")
    assert {row.verdict for row in rows.values()} == {UNSUPPORTED}


@pytest.mark.parametrize(
    ("lacking", "names"),
    [
        ("ids", [name for name, _, _ in ROWS]),
        ("tokens", [name for name, _, _ in ROWS]),
        ("cached", [name for name, _, _ in ROWS]),
        ("salt", [name for name, _, _ in ROWS]),
        ("logprobs", [name for name, _, _ in ROWS]),
        ("marks", ["C06", "C37", "C40"]),
        ("render", ["C02", "C04", "C39", "cache-control", "earlier-messages"]),
        ("metrics", ["C14", "C46", "replay-overturned"]),
    ],
)
def test_what_a_server_lacks_is_never_a_pass(lacking: str, names: list[str]) -> None:
    rows = verdicts(FakeServer(Faults(lacks=frozenset({lacking}))), *names)
    wrong = {name: rows[name].verdict for name in names if rows[name].verdict != UNSUPPORTED}
    assert not wrong


def test_discovery_finds_limits() -> None:
    async def ask(url: str) -> None:
        async with Server(url + "/v1/") as client:
            found = await discover(client, full=False, seed=0)
            assert (found.vocab, found.context) == (VOCAB, CONTEXT)
            assert client.model == "fake"

    with serving(create_app(FakeServer())) as url:
        asyncio.run(ask(url))


def test_the_command_ends_in_a_table_json_and_a_status(tmp_path: Path) -> None:
    app, runner, path = typer.Typer(), CliRunner(), tmp_path / "found.json"
    app.command()(probe_command)
    with serving(create_app(FakeServer())) as url:
        good = runner.invoke(app, ["--url", url, "--only", "C01,C08", "--json", str(path)])
        unknown = runner.invoke(app, ["--url", url, "--only", "C99"])
    assert good.exit_code == 0, good.output
    assert "3 pass" in good.output
    report = json.loads(path.read_text())
    assert [row["name"] for row in report["rows"]] == ["power", "C01", "C08"]
    assert unknown.exit_code == 2
    with serving(create_app(FakeServer(Faults(grid=64)))) as url:
        bad = runner.invoke(app, ["--url", url, "--only", "C01"])
    assert bad.exit_code == 1
    nobody = runner.invoke(app, ["--url", "http://127.0.0.1:9"])
    assert nobody.exit_code == 1
