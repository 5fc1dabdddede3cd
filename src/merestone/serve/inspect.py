"""``merestone inspect``: a server's cache in the terminal, as the tree of its boundaries.

Reads ``GET /cache`` and ``GET /metrics`` of any merestone; changes nothing there.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text
from rich.tree import Tree

from merestone.serve.terminal import ServerRefusal, check

Entry = Mapping[str, Any]
COLOURS = {"instruction": "cyan", "turn": "green", "response": "green", "mark": "magenta"}


def inspect_cache(
    console: Console,
    url: str,
    api_key: str | None,
    *,
    query: Mapping[str, str | int],
    limit: int,
    every_s: float | None,
) -> None:
    """Print the cache once, or again every ``every_s`` seconds until interrupted.

    ``query``: filters of ``GET /cache``; at most ``limit`` checkpoints are shown.

    Raises:
        ServerRefusal: the server cannot be reached, or is not a merestone.
    """
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    base = url.rstrip("/").removesuffix("/v1")
    with httpx.Client(base_url=base, headers=headers, timeout=30) as http:
        if every_s is None:
            console.print(_look(http, query, limit))
            return
        with Live(console=console, auto_refresh=False, vertical_overflow="visible") as live:
            while True:
                live.update(_look(http, query, limit), refresh=True)
                time.sleep(every_s)


def _look(http: httpx.Client, query: Mapping[str, str | int], limit: int) -> Group:
    try:
        entries, more = _entries(http, query, limit)
        answer = http.get("/metrics")
        check(answer)
        families = text_string_to_metric_families(answer.text)
        samples = {
            (sample.name, *sorted(sample.labels.values())): sample.value
            for family in families
            for sample in family.samples
        }
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise ServerRefusal(f"{http.base_url}: {error}") from error
    rest = [Text(f"and more: the first {limit} are shown", "dim")] if more else []
    return Group(summary(entries, samples), tree(entries), *rest)


def _entries(
    http: httpx.Client, query: Mapping[str, str | int], limit: int
) -> tuple[list[Entry], bool]:
    """The first ``limit`` checkpoints, page by page, and whether there are more."""
    found: list[Entry] = []
    more = True
    while more and len(found) < limit:
        after = found[-1]["id"] if found else 0
        page = {**query, "after": after, "limit": min(1000, limit - len(found))}
        answer = http.get("/cache", params=page)
        check(answer)
        body = answer.json()
        found += body["data"]
        more = body["has_more"]
    return found, more


def summary(entries: Sequence[Entry], samples: Mapping[tuple[str, ...], float]) -> Text:
    """Two lines: the pool and what is in it; what became of checkpoints so far."""
    used, total = (samples.get((f"merestone_frames_{what}",), 0) for what in ("used", "total"))
    kinds = Counter(str(entry["kind"]) for entry in entries)
    held = sum(int(entry["bytes"]) for entry in entries)
    share = used / total if total else 0.0
    out = Text(f"pool {share:.1%} used, {used:,.0f} of {total:,.0f} frames; ")
    out.append(f"{len(entries)} checkpoints hold {size(held)} alone: ")
    out.append(", ".join(f"{count} {kind}" for kind, count in kinds.most_common()) or "none")
    so_far = [
        f"{sum(v for key, v in samples.items() if key[0] == f'merestone_{name}_total'):,.0f} {what}"
        for name, what in (
            ("checkpoints_published", "published"),
            ("checkpoints_restored", "restored"),
            ("checkpoints_evicted", "evicted"),
            ("checkpoints_discarded", "discarded"),
            ("saved_tokens", "tokens saved"),
        )
    ]
    return out.append("\n" + ", ".join(so_far))


def tree(entries: Sequence[Entry]) -> Tree:
    """Checkpoints by root, each behind the deepest one that is a beginning of it; a branch only
    where conversations part."""
    whole = Tree("", hide_root=True)
    depth = {entry["id"]: int(entry["tokens"]) for entry in entries}
    heirs = Counter(entry["parent"] for entry in entries)
    roots: dict[str, Tree] = {}
    lines: dict[int, Tree] = {}
    branches: dict[int, Tree] = {}
    for entry in sorted(entries, key=lambda e: (e["root"], e["tokens"], e["id"])):
        root, parent = str(entry["root"]), entry["parent"]
        if root not in roots:
            roots[root] = whole.add(Text(f"salt {root}" if root else "no salt", "bold"))
        home = roots[root]
        if parent in lines:
            home = lines[parent] if heirs[parent] == 1 else branches[parent]
        lines[entry["id"]] = home
        branches[entry["id"]] = home.add(label(entry, depth.get(parent, 0)))
    return whole


def label(entry: Entry, above: int) -> Text:
    """One checkpoint: kind, tokens, tokens since the one ``above``, bytes, hits, age, holds."""
    kind, tokens = str(entry["kind"]), int(entry["tokens"])
    out = Text(kind, COLOURS.get(kind, ""))
    out.append(f" {tokens:,}", "bold")
    out.append(f" (+{tokens - above:,})" if above else "", "dim")
    out.append(f"  {size(int(entry['bytes']))}", "")
    hits = int(entry["hits"])
    out.append(f"  {hits} hit{'s' * (hits != 1)}", "green" if hits else "dim")
    out.append(f"  {float(entry['age_s']):,.0f} s old", "dim")
    if entry["leases"]:
        out.append(f"  {entry['leases']} reading", "yellow")
    if entry["spared_s"]:
        out.append(f"  spared for {float(entry['spared_s']):,.0f} s", "magenta")
    return out


def size(count: int) -> str:
    """Bytes for people: "12.3 MiB"."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
