"""The quick probe against the real server, with a tiny model on hostile memory."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from bench.serving import serving

from merestone.engine.build import EngineOptions, build_engine
from merestone.models.tiny import write_tiny
from merestone.probe.client import Server
from merestone.probe.discover import discover
from merestone.probe.report import PASS, RowResult
from merestone.probe.rows import ROWS, run, select
from merestone.serve.app import create_app
from merestone.serve.service import ServerOptions, Service
from merestone.serve.template import load_text

CEILING = ("C49",)  # needs a pool that one prompt fills
TURNED = ("replay-overturned",)  # needs one that is quickly filled


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    write_tiny(directory)
    return directory


def found(model: Path, options: EngineOptions, names: Sequence[str]) -> dict[str, RowResult]:
    engine = build_engine(model, options, "tiny")
    service = Service(engine, load_text(model), ServerOptions("tiny"))

    async def ask(url: str) -> list[RowResult]:
        async with Server(url) as server:
            probe = await discover(server, full=False, seed=0)
            return await run(probe, select(names))

    with serving(create_app(service)) as url:
        return {row.name: row for row in asyncio.run(ask(url))}


def all_pass(rows: dict[str, RowResult]) -> None:
    wrong = {name: row.failures or row.seen for name, row in rows.items() if row.verdict != PASS}
    assert not wrong


def test_every_row_passes(model: Path) -> None:
    names = {name for name, _, _ in ROWS} - {*CEILING, *TURNED}
    rows = found(model, EngineOptions(threads=1, memory=256 << 20, poison=True), sorted(names))
    all_pass(rows)
    assert set(rows) == names


def test_a_pool_turned_over(model: Path) -> None:
    all_pass(found(model, EngineOptions(threads=1, memory=24 << 20, poison=True), TURNED))


def test_prompts_near_the_ceiling(model: Path) -> None:
    all_pass(found(model, EngineOptions(threads=1, frames=320, poison=True), CEILING))
