"""Lanes: failures are reasons, and said once, however often they happen."""

from __future__ import annotations

import logging

import pytest

from merestone.store.lane import Lane
from merestone.store.manifest import StoreFault


def test_a_failure_is_said_once_and_so_is_its_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "merestone.store")
    done: list[tuple[int | None, str]] = []

    def fail(reason: str) -> int:
        raise StoreFault(reason, "somebody's words")

    def crash() -> int:
        raise KeyError("nobody's words")

    lane = Lane("merestone-tape-writer")
    for job in [*2 * [lambda: fail("unreachable")], lambda: fail("full"), lambda: 7, crash, crash]:
        lane.post(lambda: None, lambda value, reason: None, proof=False)
        lane.post(job, lambda value, reason: done.append((value, reason)))
    lane.close()
    reasons = ["unreachable", "unreachable", "full", "", "failed", "failed"]
    assert done == [(7 if not reason else None, reason) for reason in reasons]
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "merestone-tape-writer: unreachable (somebody's words)"),
        ("WARNING", "merestone-tape-writer: full (somebody's words)"),
        ("INFO", "merestone-tape-writer: works again"),
        ("ERROR", 'merestone-tape-writer: failed, KeyError("nobody\'s words") (see the traceback)'),
    ]
    assert caplog.records[-1].exc_info
