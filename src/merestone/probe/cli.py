"""``merestone probe``: what a server can show, as a table, and as JSON for the record."""

from __future__ import annotations

import asyncio
import json
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from merestone.probe.client import Refused, Server
from merestone.probe.discover import discover
from merestone.probe.reply import Broken
from merestone.probe.report import FAIL, RowResult, as_json, table
from merestone.probe.rows import run, select


def probe(
    url: Annotated[str, typer.Option(help="Any OpenAI-compatible server.")],
    model: Annotated[str | None, typer.Option(help="Default: the first it lists.")] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="MERESTONE_API_KEY", help="Bearer token.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="The sizes that the cases name.")] = False,
    only: Annotated[str, typer.Option(help="Rows to run, with commas between.")] = "",
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write every result and number there.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the prompts.")] = 0,
    vocab: Annotated[int | None, typer.Option(help="Ids below this exist. Default: asked.")] = None,
    context: Annotated[int | None, typer.Option(help="Tokens. Default: as listed.")] = None,
    pool_tokens: Annotated[
        int | None, typer.Option(help="Size of the cache, where /metrics does not show evictions.")
    ] = None,
    fill_limit: Annotated[
        int, typer.Option(help="Requests that turning the pool over may take.")
    ] = 4000,
) -> None:
    """Show how exact and how complete a server's prefix cache is. Exits with 1 if a row fails."""
    names = [name.strip() for name in only.split(",") if name.strip()]
    errors = Console(stderr=True)
    console = Console(width=None if sys.stdout.isatty() else 150)
    try:
        rows = select(names)
    except ValueError as error:
        errors.print(str(error), highlight=False)
        raise typer.Exit(2) from error

    async def everything() -> tuple[list[RowResult], dict[str, object]]:
        async with Server(url, model=model, api_key=api_key) as server:
            found = await discover(
                server,
                full=full,
                seed=seed,
                vocab=vocab,
                context=context,
                pool_tokens=pool_tokens,
                fill_limit=fill_limit,
            )
            began = datetime.now(UTC).isoformat(timespec="seconds")
            about: dict[str, object] = {
                "url": server.root,
                "model": server.model,
                "began": began,
                "full": full,
                "seed": seed,
                "vocab": found.vocab,
                "context": found.context,
                "abilities": sorted(found.have),
                "client": f"{platform.system()} {platform.machine()}",
            }
            results = await run(
                found,
                rows,
                lambda row: errors.print(f"{row.name}: {row.verdict} ({row.seconds:.1f} s)"),
            )
            return results, about

    try:
        results, about = asyncio.run(everything())
    except (Broken, Refused) as error:
        errors.print(f"{url}: {error}", highlight=False, markup=False)
        raise typer.Exit(1) from error
    console.print(table(results, f"{about['model']} at {about['url']}"))
    report = as_json(results, about)
    if json_file is not None:
        json_file.write_text(json.dumps(report, indent=1) + "\n")
    counts = ", ".join(f"{count} {verdict}" for verdict, count in report["verdicts"].items())
    console.print(counts, highlight=False)
    if any(row.verdict == FAIL for row in results):
        raise typer.Exit(1)
