"""A machine that only lends ranks: it keeps their processes running, and decides nothing."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from merestone.engine.ranks.launch import WORKER, Processes
from merestone.engine.ranks.loop import UNWANTED
from merestone.engine.ranks.messages import RankConfig, RankOptions

log = logging.getLogger("merestone.ranks")
TICK_S = 0.2


def rank_configs(
    options: RankOptions, endpoint: str, directory: Path, engine_options: bytes
) -> list[RankConfig]:
    """Of this machine's ranks."""
    level = logging.getLevelName(log.getEffectiveLevel()).lower()
    first = options.local[0]
    return [
        RankConfig(
            rank=rank,
            local=rank - first,
            ranks=options,
            endpoint=endpoint,
            directory=str(directory),
            options=msgspec.Raw(engine_options),
            log_level=level,
        )
        for rank in options.local
    ]


def keep_ranks(
    options: RankOptions,
    directory: Path,
    engine_options: bytes,
    *,
    command: Sequence[str] = WORKER,
) -> str | None:
    """Run this machine's ranks until node 0 ends them in order; then None.

    Otherwise the reason why they ended; with ``on_loss`` "restart" they are started again instead,
    and report to node 0, which does the same.
    """
    configs = rank_configs(options, f"tcp://{options.master}", directory, engine_options)
    while True:
        processes = Processes(configs, command)
        try:
            while not (ended := processes.ended()):
                time.sleep(TICK_S)
            reason = processes.dead()
        finally:
            processes.end(0.0 if not ended or any(ended.values()) else options.silence_s)
        if not any(ended.values()):
            return None
        if options.on_loss == "exit" or UNWANTED in ended.values():
            return reason
        log.error("%s: starting all ranks of this machine again", reason)
