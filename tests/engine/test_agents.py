"""The simulated agents, in a second: what they show at length is a benchmark."""

from __future__ import annotations

from xml.etree import ElementTree

from bench.agents import GIB, RETENTIONS, Result, Trace, sweep, table, verdict
from bench.chart import chart

SMALL = Trace(agents=3, turns=5, head=900, retries=0.3)


def test_a_small_sweep() -> None:
    results = sweep(SMALL, (2.0, 40.0))
    assert [r.retention for r in results] == ["unlimited", *(r for r in RETENTIONS for _ in "ab")]
    assert len({r.prompt for r in results}) == 1, "every cache saw the same requests"
    most, *rest = results
    wide = {r.retention: r for r in rest if r.gib > 30}
    assert wide["boundaries"].hit == most.hit > 0.5
    assert wide["boundaries"].restored > wide["aligned:256"].restored
    assert wide["aligned:256"].restored > wide["aligned:2048"].restored
    assert wide["aligned:256"].recomputed > 0
    assert all(r.restored + r.computed >= r.prompt for r in results)
    assert "| aligned:2048 | 40 |" in table(results)


def test_the_verdict_is_taken_where_aligned_lost_half() -> None:
    results = [Result("unlimited", 0.0, hit=0.9)]
    results += [Result("aligned:256", gib, hit=hit) for gib, hit in ((4, 0.2), (8, 0.44), (9, 0.5))]
    results += [Result("boundaries", gib, hit=hit) for gib, hit in ((4, 0.3), (8, 0.88), (9, 0.9))]
    assert verdict(results) == {"halved_gib": 8, "boundaries_lose": 0.0222, "met": True}
    assert verdict([results[0], *results[3:]])["met"] is False


def test_the_chart_is_well_formed() -> None:
    lines = {"boundaries": [(8.0, 0.9), (16.0, 1.0)], "aligned:256": [(8.0, 0.5), (16.0, 0.7)]}
    root = ElementTree.fromstring(chart(lines, level=("unlimited", 1.0)))
    texts = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert {"boundaries", "aligned:256", "unlimited", "8", "16", "100%"} <= set(texts)
    assert GIB == 1 << 30
