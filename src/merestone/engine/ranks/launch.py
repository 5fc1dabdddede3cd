"""The processes of this machine's ranks: started, watched, ended.

Knows processes. Must not know messages nor what the ranks compute.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from merestone.engine.ranks.messages import RankConfig

WORKER = (sys.executable, "-m", "merestone.engine.ranks.worker")


class Processes:
    """One process a rank. ``command`` is what each is started with.

    Each reads its configuration from its standard input, which stays open: when this process ends,
    however it does, the input ends and so do they. They have sessions of their own, so that a
    Ctrl-C in the terminal reaches only us.
    """

    def __init__(self, configs: Sequence[RankConfig], command: Sequence[str] = WORKER) -> None:
        self.running: dict[int, subprocess.Popen[bytes]] = {}
        for config in configs:
            process = subprocess.Popen(
                [*command], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
            )
            self.running[config.rank] = process
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # it has ended already: `dead` tells
                process.stdin.write(msgspec.json.encode(config) + b"\n")
                process.stdin.flush()

    def ended(self) -> dict[int, int]:
        """The exit status of every rank that has ended."""
        found = {rank: process.poll() for rank, process in list(self.running.items())}
        return {rank: status for rank, status in found.items() if status is not None}

    def dead(self) -> str | None:
        """What became of a rank that has ended; None while all live."""
        for rank, status in self.ended().items():
            return f"rank {rank} (process {self.running[rank].pid}) {_ended(status)}"
        return None

    def end(self, grace_s: float = 0.0) -> None:
        """All of them end: by themselves within ``grace_s``, else by force, stopped ones too.
        Any thread may call, several at once."""
        until = time.monotonic() + grace_s
        ending = list(self.running.values())
        for process in ending:
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
        for process in ending:
            process.wait()
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.close()
        self.running.clear()


def _ended(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"
