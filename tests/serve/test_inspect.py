"""``merestone inspect``: the tree of boundaries, and what it asks a server."""

from __future__ import annotations

import io

import pytest
from live_server import Running
from rich.console import Console

from merestone.serve.inspect import inspect_cache, size, summary, tree
from merestone.serve.terminal import ServerRefusal


def entry(
    id_: int, parent: int | None, kind: str, tokens: int, **more: object
) -> dict[str, object]:
    plain = {"root": "", "bytes": 512, "hits": 0, "age_s": 3.2, "leases": 0, "spared_s": 0.0}
    return {"id": id_, "parent": parent, "kind": kind, "tokens": tokens, **plain, **more}


ENTRIES = [
    entry(5, 2, "turn", 40, hits=2),
    entry(2, None, "instruction", 17, bytes=3 << 20, hits=1, spared_s=299.6),
    entry(3, 2, "turn", 31, leases=1),
    entry(4, 3, "prompt", 32),
    entry(9, 7, "mark", 8, root="ab12cd34"),
]


def shown(what: object) -> str:
    out = io.StringIO()
    Console(file=out, width=120).print(what)
    return out.getvalue()


def test_a_branch_only_where_conversations_part() -> None:
    assert [line.rstrip() for line in shown(tree(ENTRIES)).splitlines()] == [
        "no salt",
        "└── instruction 17  3.0 MiB  1 hit  3 s old  spared for 300 s",
        "    ├── turn 31 (+14)  512 B  0 hits  3 s old  1 reading",
        "    ├── prompt 32 (+1)  512 B  0 hits  3 s old",
        "    └── turn 40 (+23)  512 B  2 hits  3 s old",
        "salt ab12cd34",
        "└── mark 8  512 B  0 hits  3 s old",
    ]


def test_the_summary_counts_kinds_and_bytes() -> None:
    samples = {
        ("merestone_frames_used",): 25.0,
        ("merestone_frames_total",): 100.0,
        ("merestone_checkpoints_evicted_total", "turn"): 3.0,
        ("merestone_checkpoints_evicted_total", "prompt"): 4.0,
    }
    first, second = summary(ENTRIES, samples).plain.splitlines()
    assert first.startswith("pool 25.0% used, 25 of 100 frames; 5 checkpoints hold 3.0 MiB alone")
    assert "2 turn" in first
    assert "7 evicted" in second


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 40, "5.0 TiB")]
)
def test_sizes(count: int, text: str) -> None:
    assert size(count) == text


def test_what_it_shows_of_a_server(server: Running) -> None:
    for prompt in ("hello", "hello you"):
        server.client.completions.create(model="fake", prompt=prompt, max_tokens=3)
    out = io.StringIO()
    console = Console(file=out, width=120)
    inspect_cache(console, server.url, None, query={"kind": "prompt"}, limit=1, every_s=None)
    assert "prompt 5" in out.getvalue()
    assert "response" not in out.getvalue()
    assert "the first 1 are shown" in out.getvalue()
    with pytest.raises(ServerRefusal, match="min_tokens"):
        inspect_cache(console, server.url, None, query={"min_tokens": -1}, limit=1, every_s=None)
    with pytest.raises(ServerRefusal):
        inspect_cache(console, "http://127.0.0.1:9", None, query={}, limit=1, every_s=None)
