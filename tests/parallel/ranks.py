"""Ranks for tests: one process each, started once, which run functions of importable modules."""

from __future__ import annotations

import faulthandler
import multiprocessing
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from merestone.parallel.world import connect


class Ranks:
    """``size`` processes. What they run gets its world first: ``function(world, *args)``."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("forkserver")
        # Importing torch costs seconds: once, in the process that the ranks are forked from.
        context.set_forkserver_preload(["torch"])
        self._places = Path(tempfile.mkdtemp(prefix="merestone-ranks-"))
        self._count = 0
        self._pipes = []
        self._processes = []
        for _ in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(
        self,
        function: Callable[..., Any],
        tp: int,
        dcp: int,
        *args: Any,
        timeout_s: float = 60.0,
        device: str = "cpu",
        staged: bool = False,
    ) -> list[Any]:
        """What ``function`` returns on each of ``tp`` ranks; raises what went wrong on any. On
        "cuda" they are dealt over the GPUs; through host memory, if there are too few or
        ``staged``, which CPU layers need."""
        self._count += 1
        place = f"file://{self._places}/{self._count}"
        for rank, pipe in enumerate(self._pipes[:tp]):
            pipe.send((function, (rank, tp, dcp), place, timeout_s, device, staged, args))
        answers = [pipe.recv() for pipe in self._pipes[:tp]]
        for rank, (good, answer) in enumerate(answers):
            assert good, f"rank {rank} of {tp}, dcp {dcp}:\n{answer}"
        return [answer for _, answer in answers]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join()


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            function, (rank, tp, dcp), place, timeout_s, device, staged, args = pipe.recv()
        except EOFError:
            return
        # A rank that hangs says where, before the others' time-outs end it.
        faulthandler.dump_traceback_later(timeout_s / 2, file=sys.__stderr__)
        try:
            backend = None
            if device == "cuda":
                count = torch.cuda.device_count()
                device, backend = f"cuda:{rank % count}", "gloo" if staged or count < tp else None
            world = connect(
                rank, tp, dcp, rendezvous=place, timeout_s=timeout_s, device=device, backend=backend
            )
            try:
                pipe.send((True, function(world, *args)))
            finally:
                world.close()
        except Exception:
            pipe.send((False, traceback.format_exc()))
        finally:
            faulthandler.cancel_dump_traceback_later()
