"""The retention gate: every combination, with a reason; it fails closed."""

from __future__ import annotations

from itertools import product

import pytest

from merestone.core.gate import (
    DEFAULT_GRID,
    PROVEN_LAYOUTS,
    SPECULATION,
    STORES,
    GateRefusal,
    Retention,
    Setup,
    choose,
    obstacles,
    table,
)

EVERYTHING = [
    Setup("auto", speculation, tp, dcp, store, proven)
    for speculation, (tp, dcp), store, proven in product(
        SPECULATION, [(1, 1), (2, 1), (4, 4)], STORES, [True, False]
    )
]


@pytest.mark.parametrize("setup", EVERYTHING, ids=str)
def test_auto_keeps_boundaries_only_where_nothing_stands_against_them(setup: Setup) -> None:
    safe = setup.store != "aligned" and setup.proven
    retention, reason = choose(setup, 64)
    assert retention == (Retention("boundaries") if safe else Retention("aligned", DEFAULT_GRID))
    assert reason not in ("", "as asked for"), "auto names what it looked at"
    assert bool(obstacles(setup)) != safe


def test_every_obstacle_is_named() -> None:
    worst = Setup("auto", "dynamic", 8, 2, "aligned", proven=False)
    _, reason = choose(worst, 64)
    for part in ("store does not declare", "TP 8 with DCP 2"):
        assert part in reason


@pytest.mark.parametrize(
    ("asked", "kept"),
    [
        ("none", Retention("none")),
        ("aligned:64", Retention("aligned", 64)),
        ("aligned:2048", Retention("aligned", 2048)),
        ("boundaries", Retention("boundaries")),
    ],
)
def test_what_is_asked_for_is_kept(asked: str, kept: Retention) -> None:
    assert choose(Setup(asked), 64) == (kept, "as asked for")
    if kept.mode != "boundaries":
        worst = Setup(asked, "dynamic", 8, 2, "aligned", proven=False)
        assert choose(worst, 64) == (kept, "as asked for")
    assert str(kept) == asked


def test_boundaries_asked_for_are_refused_rather_than_broken() -> None:
    with pytest.raises(GateRefusal, match="--retention boundaries: the store does not declare"):
        choose(Setup("boundaries", store="aligned"), 64)


@pytest.mark.parametrize(
    "asked",
    [
        *("", "aligned", "aligned:", "aligned:0", "aligned:100", "aligned:-64", "none:64", "x"),
        *("aligned:\uff16\uff14", "aligned:\u00b2"),
    ],
)
def test_what_does_not_exist_is_refused_by_name(asked: str) -> None:
    with pytest.raises(GateRefusal, match="--retention"):
        choose(Setup(asked), 64)


@pytest.mark.parametrize("setup", EVERYTHING, ids=str)
def test_the_table_says_what_the_gate_does(setup: Setup) -> None:
    rows = table(setup)
    assert [condition for condition, *_ in rows] == [
        *(f"speculation {name}" for name in SPECULATION),
        *(f"store {name}" for name in STORES),
        *(f"TP {tp}, DCP {dcp}" for tp, dcp in sorted(PROVEN_LAYOUTS)),
        "other layouts",
    ]
    here = {condition: (kept, why) for condition, kept, why, holds in rows if holds}
    layout = f"TP {setup.tp}, DCP {setup.dcp}" if setup.proven else "other layouts"
    assert list(here) == [f"speculation {setup.speculation}", f"store {setup.store}", layout]
    assert here[layout][1] == ("" if setup.proven else "no test proves their boundaries")
    reasons = [why for _, why in here.values() if why]
    assert len(reasons) == len(obstacles(setup))
    wanted = {"boundaries", f"aligned:{DEFAULT_GRID}"} if reasons else {"boundaries"}
    assert {kept for kept, _ in here.values()} == wanted


def test_the_layouts_that_tests_prove() -> None:
    """tests/parallel and tests/processes run these, and no other ones."""
    proven = {(tp, dcp) for tp in (1, 2, 4) for dcp in (1, 2, 4) if tp % dcp == 0}
    assert proven == PROVEN_LAYOUTS
