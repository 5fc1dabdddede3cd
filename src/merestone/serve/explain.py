"""``merestone serve --explain``: the retention gate as a table, and what it chooses here."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from merestone.engine.build import EngineOptions, retention_of


def explain_retention(console: Console, options: EngineOptions) -> None:
    """Print the whole gate, the rows that hold for ``options`` marked, and the choice.

    Raises:
        ValueError: the retention that ``options`` ask for does not exist or cannot be kept.
    """
    chosen, reason, rows = retention_of(options)
    shown = Table("here", "condition", "--retention auto keeps", "because", box=None)
    for condition, kept, why, here in rows:
        shown.add_row("*" if here else "", condition, kept, why)
    console.print(shown)
    console.print(f"retention {chosen}: {reason}", highlight=False, soft_wrap=True)
