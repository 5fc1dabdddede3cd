"""A short soak: mixed requests, disconnects and evictions, ending in clean books."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_two_hundred_requests() -> None:
    path = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    done = subprocess.run(
        [sys.executable, "-m", "bench.soak", "--requests", "200", "--compare", "0.1"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["ok"]
    assert report["requests"] == 200
    # A run that did not do what it is for proves nothing.
    assert report["disconnects"] > 10
    assert report["compared"] > 10
    assert report["evicted"] > 50
    assert report["cached_share"] > 0.1
