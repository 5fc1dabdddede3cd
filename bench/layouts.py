"""The equality suite over layouts of ranks: a server each, asked by the probe.

Every row holds a warm answer against a cold one of the same server, bit for bit, and counts the
restored tokens. Besides, the same prompts must restore the same counts on every layout. The last
line of the output is one JSON object; the exit status is 1 if anything differed.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.about import heading, keep, publish
from bench.serving import merestone_process
from merestone.models.config import read_dtype
from merestone.probe.chat import TOOLS, assistant, system, tool_round, user
from merestone.probe.client import Server
from merestone.probe.context import Probe
from merestone.probe.discover import discover
from merestone.probe.reply import Broken
from merestone.probe.report import FAIL, PASS, UNSUPPORTED, Check, as_json, conclude
from merestone.probe.rows import run, select
from merestone.probe.streams import text

TALKS = "power,records-instruction,records-continuation,records-tools,records-concurrent"
QUICK = "power,replay-quiet,appended,C06,C38,C48,C50"
ALL = (
    "power,replay-quiet,replay-between,replay-16-at-once,appended,open-case,"
    "chat-thinking-stripped,chat-thinking-kept,C02,C04,C05,C06,C10,C11,C20,C33,C38,C48,C50"
)
SETS = {"talks": TALKS, "quick": QUICK, "all": f"{ALL},{TALKS}"}
RUNGS = (1, 63, 64, 65, 129, 700)


async def script(probe: Probe, check: Check) -> list[int]:
    """Restored tokens of requests that are the same for every layout: replays, responses with more
    behind them, a shared beginning, a chat with tools. What can be held against a cold run is."""
    found = []
    for number, length in enumerate(RUNGS):
        prompt, salt = probe.stream(length, number), probe.salt()
        cold, again = [await probe.send(prompt, 6, salt) for _ in range(2)]
        longer = prompt + again.ids + probe.stream(5, number + 40)
        onward = await probe.send(longer, 2, salt)
        check.equal(again, cold, f"{length} tokens again")
        check.equal(onward, await probe.cold(longer, 2), f"{length} tokens and their response")
        found += [cold.cached, again.cached, onward.cached]
    shared, salt = probe.stream(333, 50), probe.salt()
    for number in range(3):
        prompt = shared + probe.stream(70, 60 + number)
        reply = await probe.server.complete(prompt, 2, salt=salt, marks=[333])
        found.append(reply.cached)
    texts = [shared + probe.stream(10 + n, 70 + n) for n in range(8)]
    replies = await asyncio.gather(*(probe.send(text, 4, salt) for text in texts))
    check.equal(replies[-1], await probe.cold(texts[-1], 4), "the last of eight at once")
    return found + [reply.cached for reply in replies] + await chat_script(probe, check)


async def chat_script(probe: Probe, check: Check) -> list[int]:
    """Two turns and the replay of the last, in a history that is not the model's own."""
    if "chat" not in probe.have:
        return []
    found, salt = [], probe.salt()
    messages = [system(text(60, 1)), user(text(12, 2))]
    for turn in range(2):
        for _ in range(1 + turn):
            reply = await probe.server.chat(messages, 2, salt=salt, tools=TOOLS)
            found.append(reply.cached)
        oracle = await probe.server.chat(messages, 2, salt=probe.salt(), tools=TOOLS)
        check.equal(reply, oracle, f"chat, turn {turn + 1}")
        messages += [*tool_round(turn, text(30, 3)), assistant("So it is."), user(text(9, 4))]
    return found


async def ask(url: str, rows: Sequence[str], full: bool) -> dict[str, Any]:
    """Everything that one server is asked."""
    async with Server(url) as server:
        probe = await discover(server, full=full, seed=0)
        check, began = Check(), time.perf_counter()
        restored = await script(probe, check)
        scripted = conclude("script", check, time.perf_counter() - began, None)
        health = await server.get("/health")
        results = await run(
            probe,
            select(rows),
            lambda row: print(
                f"    {row.name}: {row.verdict} {row.seen} ({row.seconds:.1f} s)", flush=True
            ),
        )
    report = as_json([scripted, *results], {})
    return {"restored": restored, "retention": health["retention"], **report}


def without_a_server(why: str) -> dict[str, Any]:
    """A cell that could not be asked, which is a failure."""
    check = Check()
    check.that(False, why)
    print(f"    {why}", flush=True)
    return {"restored": [], "retention": "", **as_json([conclude("server", check, 0.0, None)], {})}


def concluded(cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What all cells say together."""
    rows = [row for cell in cells for row in cell["rows"]]
    return {
        "restored_alike": all(cell["restored"] == cells[0]["restored"] for cell in cells),
        "failed": sum(row["verdict"] == FAIL for row in rows),
        "unsupported": sorted({row["name"] for row in rows if row["verdict"] == UNSUPPORTED}),
        "cells": list(cells),
    }


def main(
    model: Annotated[Path, typer.Argument(help="Directory of the model.")],
    layouts: Annotated[str, typer.Option(help="TPxDCP, with commas between.")] = (
        "1x1,2x1,2x2,4x1,4x2,4x4"
    ),
    speculate: Annotated[str, typer.Option(help="As merestone serve takes them.")] = "none",
    rows: Annotated[str, typer.Option(help="Rows of the probe; talks, quick or all.")] = "quick",
    full: Annotated[bool, typer.Option("--full", help="The sizes that the cases name.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the JSON there, too.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    options: Annotated[str, typer.Option(help="Further options of merestone serve.")] = "",
) -> None:
    """Run the equality suite on every layout, without and with speculation."""
    names = SETS.get(rows, rows).split(",")
    about = {
        **heading("layouts", model, device),
        "checkpoint_dtype": str(read_dtype(model)).removeprefix("torch."),
        "options": options,
        "full": full,
    }
    cells: list[dict[str, Any]] = []
    for drafts in speculate.split(","):
        for layout in layouts.split(","):
            tp, _, dcp = layout.partition("x")
            arguments = [str(model), "--device", device, "--tp", tp, "--dcp", dcp]
            arguments += [*options.split(), "--speculate", drafts]
            print(f"TP {tp}, DCP {dcp}, speculation {drafts}", flush=True)
            try:
                with merestone_process(arguments) as url:
                    found = asyncio.run(ask(url, names, full))
            except (RuntimeError, Broken) as error:  # others may still be worth the time
                found = without_a_server(str(error))
            cells.append({"tp": int(tp), "dcp": int(dcp), "speculate": drafts, **found})
            report = {**about, **concluded(cells)}
            keep(report, out)  # what there is, should the next server take too long
    for cell in cells:
        passed = cell["verdicts"].get(PASS, 0)
        print(
            f"TP {cell['tp']} DCP {cell['dcp']} {cell['speculate']}: {passed} of"
            f" {len(cell['rows'])} rows pass, {sum(row['checks'] for row in cell['rows'])} checks"
        )
    publish(report, out)
    if report["failed"] or not report["restored_alike"]:
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
