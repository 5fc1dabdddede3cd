"""The equality suite over layouts of ranks: a server each, asked by the probe.

Every row holds a warm answer against a cold one of the same server, bit for bit, and counts the
restored tokens. Besides, the same prompts must restore the same counts on every layout. The last
line of the output is one JSON object; the exit status is 1 if anything differed.
"""

from __future__ import annotations

import asyncio
import platform
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.about import publish
from bench.serving import merestone_process
from merestone import __version__
from merestone.probe.client import Server
from merestone.probe.context import Probe
from merestone.probe.discover import discover
from merestone.probe.report import FAIL, PASS, as_json
from merestone.probe.rows import run, select

QUICK = "power,replay-quiet,appended,C06,C38,C48,C50"
ALL = (
    "power,replay-quiet,replay-between,replay-16-at-once,appended,open-case,"
    "chat-thinking-stripped,chat-thinking-kept,C02,C04,C05,C06,C10,C11,C20,C33,C38,C48,C50"
)
RUNGS = (1, 63, 64, 65, 129, 700)


async def restored_counts(probe: Probe) -> list[int]:
    """Restored tokens of one script of requests: replays, appended answers, a shared beginning."""
    found = []
    for number, length in enumerate(RUNGS):
        prompt, salt = probe.stream(length, number), probe.salt()
        for _ in range(2):
            reply = await probe.send(prompt, 6, salt)
            found.append(reply.cached)
        longer = prompt + reply.ids + probe.stream(5, number + 40)
        found.append((await probe.send(longer, 2, salt)).cached)
    shared, salt = probe.stream(333, 50), probe.salt()
    for number in range(3):
        prompt = shared + probe.stream(70, 60 + number)
        reply = await probe.server.complete(prompt, 2, salt=salt, marks=[333])
        found.append(reply.cached)
    texts = [shared + probe.stream(10 + n, 70 + n) for n in range(8)]
    replies = await asyncio.gather(*(probe.send(text, 4, salt) for text in texts))
    return found + [reply.cached for reply in replies]


async def ask(url: str, rows: Sequence[str], full: bool) -> dict[str, Any]:
    """Everything that one server is asked."""
    async with Server(url) as server:
        probe = await discover(server, full=full, seed=0)
        restored = await restored_counts(probe)
        health = await server.get("/health")
        results = await run(
            probe,
            select(rows),
            lambda row: print(f"    {row.name}: {row.verdict} {row.seen} ({row.seconds:.1f} s)"),
        )
    report = as_json(results, {})
    return {"restored": restored, "retention": health["retention"], **report}


def main(
    model: Annotated[Path, typer.Argument(help="Directory of the model.")],
    layouts: Annotated[str, typer.Option(help="TPxDCP, with commas between.")] = (
        "1x1,2x1,2x2,4x1,4x2,4x4"
    ),
    speculate: Annotated[str, typer.Option(help="As merestone serve takes them.")] = "none",
    rows: Annotated[str, typer.Option(help="Rows of the probe; quick or all.")] = "quick",
    full: Annotated[bool, typer.Option("--full", help="The sizes that the cases name.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the JSON there, too.")] = None,
    options: Annotated[str, typer.Option(help="Further options of merestone serve.")] = "",
) -> None:
    """Run the equality suite on every layout, without and with speculation."""
    names = {"quick": QUICK, "all": ALL}.get(rows, rows).split(",")
    cells = []
    for drafts in speculate.split(","):
        for layout in layouts.split(","):
            tp, _, dcp = layout.partition("x")
            arguments = [str(model), "--tp", tp, "--dcp", dcp, *options.split()]
            if drafts != "none":
                arguments += ["--speculate", drafts]
            print(f"TP {tp}, DCP {dcp}, speculation {drafts}", flush=True)
            with merestone_process(arguments) as url:
                found = asyncio.run(ask(url, names, full))
            cells.append({"tp": int(tp), "dcp": int(dcp), "speculate": drafts, **found})
    first = cells[0]["restored"]
    same = all(cell["restored"] == first for cell in cells)
    failed = [c for c in cells for row in c["rows"] if row["verdict"] == FAIL]
    report = {
        "bench": "layouts",
        "began": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": __version__,
        "model": model.name,
        "machine": f"{platform.system()} {platform.machine()}",
        "full": full,
        "restored_alike": same,
        "failed": len(failed),
        "cells": cells,
    }
    for cell in cells:
        passed = cell["verdicts"].get(PASS, 0)
        print(
            f"TP {cell['tp']} DCP {cell['dcp']} {cell['speculate']}: {passed} of"
            f" {len(cell['rows'])} rows pass, {sum(row['checks'] for row in cell['rows'])} checks"
        )
    publish(report, out)
    if failed or not same:
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
