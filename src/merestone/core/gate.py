"""The retention gate: which boundaries are kept, decided once at start-up, with a reason.

Knows names of options and which combinations are proven. Must not know how any of them works.
It fails closed: whatever is not known to keep boundaries exact gets aligned states instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

DEFAULT_GRID = 512
"""Tokens between the states that are kept where boundaries cannot be."""

SPECULATION = {
    "none": "",
    "mtp": "",
    "dflash": "",
    "dynamic": "",
}
"""Why boundaries cannot be kept under each kind of speculation; empty where they can."""

STORES = {
    "none": "",
    "boundaries": "",
    "aligned": "the store does not declare support for boundaries",
}
"""The same for what a store declares."""

PROVEN_LAYOUTS = frozenset({(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)})
"""(TP, DCP) of the layouts whose boundaries the tests prove."""


class Retention(NamedTuple):
    """``mode`` "boundaries", "aligned" or "none"; ``grid`` tokens between aligned states (or 0)."""

    mode: str
    grid: int = 0

    def __str__(self) -> str:
        return f"{self.mode}:{self.grid}" if self.grid else self.mode


class GateRefusal(ValueError):
    """The retention that was asked for does not exist, or cannot be kept here."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What the gate looks at. ``asked``: "auto", "boundaries", "aligned:N" or "none".

    ``speculation`` is a key of ``SPECULATION``, ``store`` one of ``STORES``; ``proven`` says
    whether the tests prove the layout of ``tp`` x ``dcp`` ranks.
    """

    asked: str = "auto"
    speculation: str = "none"
    tp: int = 1
    dcp: int = 1
    store: str = "none"
    proven: bool = True


def choose(setup: Setup, chunk: int) -> tuple[Retention, str]:
    """What is kept, and why. Aligned states lie at multiples of ``chunk`` tokens.

    Raises:
        GateRefusal: an unknown retention, a grid between the chunks, or boundaries where they
            cannot be kept.
    """
    asked = parse(setup.asked, chunk)
    if asked is not None and asked.mode != "boundaries":
        return asked, "as asked for"
    obstacle = "; ".join(obstacles(setup))
    if not obstacle:
        return Retention("boundaries"), "as asked for" if asked else "boundaries are exact here"
    if asked is not None:
        raise GateRefusal(f"--retention boundaries: {obstacle}; use auto or aligned:{DEFAULT_GRID}")
    return Retention("aligned", DEFAULT_GRID), obstacle


def obstacles(setup: Setup) -> list[str]:
    """Everything that keeps boundaries from being promised."""
    found = [SPECULATION[setup.speculation], STORES[setup.store]]
    if not setup.proven:
        found.append(f"no test proves boundaries at TP {setup.tp} with DCP {setup.dcp}")
    return [reason for reason in found if reason]


def table(setup: Setup) -> list[tuple[str, str, str, bool]]:
    """The whole gate, a row a condition: (condition, what ``auto`` keeps, why, holds here)."""
    rows = []
    for option, reasons, chosen in (
        ("speculation", SPECULATION, setup.speculation),
        ("store", STORES, setup.store),
    ):
        for name, why in reasons.items():
            rows.append((f"{option} {name}", _kept(why), why, name == chosen))
    for tp, dcp in sorted(PROVEN_LAYOUTS):
        here = setup.proven and (tp, dcp) == (setup.tp, setup.dcp)
        rows.append((f"TP {tp}, DCP {dcp}", _kept(""), "", here))
    why = "no test proves their boundaries"
    rows.append(("other layouts", _kept(why), why, not setup.proven))
    return rows


def _kept(obstacle: str) -> str:
    return str(Retention("aligned", DEFAULT_GRID) if obstacle else Retention("boundaries"))


def parse(asked: str, chunk: int) -> Retention | None:
    """The retention named; None for "auto".

    Raises:
        GateRefusal: it does not exist.
    """
    mode, colon, number = asked.partition(":")
    if mode == "aligned" and number.isascii() and number.isdigit():
        grid = int(number)
        if grid < chunk or grid % chunk:
            raise GateRefusal(f"--retention {asked}: {grid} is not a multiple of {chunk} tokens")
        return Retention("aligned", grid)
    if colon or mode not in ("auto", "boundaries", "none"):
        raise GateRefusal(
            f"--retention {asked!r} is not one of auto, boundaries, aligned:N and none"
        )
    return None if mode == "auto" else Retention(mode)
