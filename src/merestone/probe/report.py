"""What a row found, and how it is shown: a table for people, JSON for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.markup import escape
from rich.table import Table

from merestone.probe.reply import Reply, difference

PASS, FAIL, UNSUPPORTED = "pass", "FAIL", "unsupported"
_COLOURS = {PASS: "green", FAIL: "bold red", UNSUPPORTED: "yellow"}


@dataclass(slots=True)
class Check:
    """The findings of one row while it runs.

    ``done`` counts what was judged; ``failures`` says what was wrong; ``skipped`` what the server
    could not run though the row could go on; ``numbers`` is what was measured and not judged.
    """

    done: int = 0
    failures: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)

    def that(self, ok: bool, failure: str) -> bool:
        """Judge one thing; ``failure`` says what is wrong if it is."""
        self.done += 1
        if not ok:
            self.failures.append(failure)
        return ok

    def equal(self, reply: Reply, oracle: Reply, what: str) -> bool:
        """EQB: the ids and the log probabilities' bits of the oracle."""
        wrong = difference(reply, oracle)
        return self.that(wrong is None, f"{what}: {wrong} (C={reply.cached})")

    def cached(self, reply: Reply, expected: int, what: str) -> bool:
        """C is exactly what it should be."""
        lost = reply.account.get("lost")
        why = f" ({lost})" if lost else ""
        return self.that(reply.cached == expected, f"{what}: C={reply.cached}, not {expected}{why}")

    def at_least(self, reply: Reply, floor: int, what: str) -> bool:
        """C is no less than it should be."""
        lost = reply.account.get("lost")
        why = f" ({lost})" if lost else ""
        return self.that(
            reply.cached >= floor, f"{what}: C={reply.cached}, at least {floor} expected{why}"
        )

    def note(self, name: str, value: object) -> None:
        """Report a number without judging it. Numbers of one name are gathered in a list."""
        if isinstance(value, float):
            value = round(value, 4)
        self.numbers.setdefault(name, []).append(value)


@dataclass(frozen=True, slots=True)
class RowResult:
    """A finished row. ``seen`` is one line: the first failure, what was missing, or the count."""

    name: str
    verdict: str
    seen: str
    seconds: float
    checks: int
    failures: list[str]
    skipped: list[str]
    numbers: dict[str, Any]


def conclude(name: str, check: Check, seconds: float, missing: str | None) -> RowResult:
    """A verdict. Nothing judged is never a pass; a failure outweighs what was missing.

    ``missing``: what the server lacks, if that ended the row.
    """
    lacks = [*([missing] if missing else []), *check.skipped]
    if check.failures:
        more = len(check.failures) - 1
        verdict, seen = FAIL, check.failures[0] + (f" (and {more} more)" if more else "")
    elif lacks or not check.done:
        verdict, seen = UNSUPPORTED, "; ".join(lacks) or "nothing could be judged"
    else:
        verdict, seen = PASS, f"{check.done} checks"
    return RowResult(
        name,
        verdict,
        seen,
        round(seconds, 3),
        check.done,
        check.failures,
        lacks,
        check.numbers,
    )


def table(results: Sequence[RowResult], title: str) -> Table:
    """One line a row."""
    out = Table(title=title, title_justify="left", show_lines=False, expand=False)
    out.add_column("row", no_wrap=True)
    out.add_column("verdict", no_wrap=True)
    out.add_column("seen", overflow="fold", max_width=72)
    out.add_column("numbers", overflow="fold", max_width=48)
    out.add_column("time", justify="right", no_wrap=True)
    for row in results:
        colour = _COLOURS[row.verdict]
        out.add_row(
            escape(row.name),
            f"[{colour}]{row.verdict}[/]",
            escape(row.seen),
            escape(_brief(row.numbers)),
            f"{row.seconds:.1f} s",
        )
    return out


def _brief(numbers: dict[str, Any]) -> str:
    """Every name once: a few values, or their range."""
    parts = []
    for name, values in numbers.items():
        plain = [value for value in values if isinstance(value, int | float)]
        if len(values) > 3 and len(plain) == len(values):
            middle = sorted(plain)[len(plain) // 2]
            parts.append(f"{name} {min(plain)}..{max(plain)}, median {middle}")
        else:
            parts.append(f"{name} {', '.join(map(str, values[:3]))}")
    return "; ".join(parts)


def as_json(results: Sequence[RowResult], about: dict[str, Any]) -> dict[str, Any]:
    """Everything measured, for a file."""
    verdicts = [row.verdict for row in results]
    counts = {verdict: verdicts.count(verdict) for verdict in (PASS, FAIL, UNSUPPORTED)}
    return {**about, "verdicts": counts, "rows": [asdict(row) for row in results]}
