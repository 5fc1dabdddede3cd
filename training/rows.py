"""Batches of equally long conversations, made by worker processes in a fixed order.

The conversation of a place in a batch depends on the seed, the batch's number and the place only,
so the number of workers changes nothing. Start the workers before touching a GPU.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
from dataclasses import dataclass
from multiprocessing.context import ForkContext, ForkProcess
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from training import prose
from training.dialogue import Span, Weights, load_tokenizer
from training.scenes import Mix, converse


@dataclass(frozen=True, slots=True)
class Examples:
    """``ids`` [B, L + 1] uint16; ``weights`` [B, L] of predicting ids[:, 1:]; ``probes`` [B, R]
    positions at which to teach the index; ``spans``: the replies in each row."""

    ids: NDArray[np.uint16]
    weights: NDArray[np.float32]
    probes: NDArray[np.int64]
    spans: list[list[Span]]


def make(
    seed: int, number: int, rows: int, length: int, tokenizer_file: Path, mix: Mix | None = None
) -> Examples:
    """Batch ``number`` of the run ``seed``."""
    tokenizer = load_tokenizer(tokenizer_file)
    talks = [
        converse((seed, number, row, length), tokenizer, length + 1, mix) for row in range(rows)
    ]
    ids = np.array([talk.ids for talk in talks], dtype=np.uint16)
    weights = Weights.of(tokenizer)(ids)
    return Examples(
        ids, weights, _probes(weights, f"{seed}:{number}"), [talk.spans for talk in talks]
    )


def _probes(weights: NDArray[np.float32], seed: str) -> NDArray[np.int64]:
    """One position in 32, half of them in replies."""
    rng = np.random.default_rng(Random(seed).getrandbits(64))
    rows, length = weights.shape
    asked = max(length // 32, 4)
    chosen = rng.integers(0, length, (rows, asked))
    for row in range(rows):
        inside = np.flatnonzero(weights[row] == 1.0)
        if len(inside):
            chosen[row, : asked // 2] = rng.choice(inside, asked // 2)
    return chosen


def _work(orders: Any, results: Any, seed: int, tokenizer_file: Path) -> None:
    while (order := orders.get()) is not None:
        number, rows, length = order
        results.put((number, make(seed, number, rows, length, tokenizer_file)))


class Supply:
    """Batches in the order in which they were asked for, made ahead by ``workers`` processes."""

    def __init__(self, seed: int, tokenizer_file: Path, workers: int) -> None:
        load_tokenizer(tokenizer_file)
        prose.documentation()  # before the fork, so that no worker reads it again
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        context: ForkContext = multiprocessing.get_context("fork")
        self._orders, self._results = context.Queue(), context.Queue()
        self._asked = self._given = 0
        self._early: dict[int, Examples] = {}
        self._processes: list[ForkProcess] = [
            context.Process(
                target=_work, args=(self._orders, self._results, seed, tokenizer_file), daemon=True
            )
            for _ in range(workers)
        ]
        for process in self._processes:
            process.start()

    def ask(self, rows: int, length: int) -> None:
        self._orders.put((self._asked, rows, length))
        self._asked += 1

    @property
    def waiting(self) -> int:
        """Batches asked for and not taken yet."""
        return self._asked - self._given

    def take(self) -> Examples:
        """The next batch.

        Raises:
            RuntimeError: a worker died.
        """
        while self._given not in self._early:
            try:
                number, examples = self._results.get(timeout=20)
            except queue.Empty:
                if not all(process.is_alive() for process in self._processes):
                    raise RuntimeError("a worker died") from None
                continue
            self._early[number] = examples
        examples = self._early.pop(self._given)
        self._given += 1
        return examples

    def __enter__(self) -> Supply:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._orders.cancel_join_thread()
        self._results.cancel_join_thread()
