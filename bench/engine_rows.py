"""What is measured of an engine in process, on whichever device: first tokens, decode rates, reuse.

Every row checks its answers first: a replay must restore all and repeat the cold ids, a stream
among others must give the ids it gives alone.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from bench.inprocess import InProcess, WrongResult, rates_together
from bench.over_http import OverHttp
from merestone.engine.build import EngineOptions, build_engine
from merestone.engine.engine import LocalEngine
from merestone.probe.streams import stream

Asked = InProcess | OverHttp
REPLAYS = 3
INSTRUCTIONS = 3000
OPENING, TURN, ANSWER, TURNS = 8000, 300, 32, 4


@contextmanager
def running(
    write: Callable[[Path], None], options: EngineOptions, name: str
) -> Iterator[LocalEngine]:
    """An engine of the checkpoint that ``write`` writes, started; stopped at the end."""
    logging.getLogger("merestone").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as scratch:
        write(Path(scratch))
        engine = build_engine(Path(scratch), options, name)
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


def first_tokens(asked: Asked, length: int, *, runs: int = 2) -> dict[str, float]:
    """Seconds to the first token of a cold prompt (the best of ``runs``: the first one compiles)
    and of its exact replays, and what both make of each other."""
    vocab = asked.vocab
    colds, warms = [], []
    for run in range(runs):
        prompt, salt = stream(length, run, vocab=vocab), f"first-{length}-{run}"
        (cold,) = asked.generate([prompt], 8, salt)
        colds.append(cold.first_s)
        for _ in range(REPLAYS):
            (warm,) = asked.generate([prompt], 8, salt)
            if warm.ids != cold.ids:
                raise WrongResult(f"{length} tokens: warm {warm.ids}, cold {cold.ids}")
            if warm.restored != length:
                raise WrongResult(f"{length} tokens: {warm.restored} restored")
            warms.append(warm.first_s)
    cold_s, warm_s = min(colds), median(warms)
    return {
        "cold_s": cold_s,
        "replay_s": warm_s,
        "replay_to_cold": warm_s / cold_s,
        "prefill_tokens_s": length / cold_s,
    }


def prefill_rate(asked: InProcess, length: int, *, cache: bool, runs: int = 3) -> float:
    """Prompt tokens a second of cold prompts, the best run."""
    vocab = asked.vocab
    firsts = []
    for run in range(runs):
        prompt = stream(length, 100 + run, vocab=vocab)
        (cold,) = asked.generate([prompt], 1, f"prefill-{cache}-{run}", cache=cache)
        firsts.append(cold.first_s)
    return length / min(firsts)


def decode_rate(
    asked: Asked, streams: int, prompt: int, count: int, *, cache: bool = True, runs: int = 3
) -> float:
    """Tokens a second of ``streams`` streams together, prefills apart: where the cache is used, all
    prompts are restored at once. The median of ``runs``."""
    vocab = asked.vocab
    prompts = [stream(prompt, 200 + number, vocab=vocab) for number in range(streams)]
    salt = f"decode-{streams}"
    if cache:
        asked.generate(prompts, 1, salt)
    tries = [asked.generate(prompts, count, salt, cache=cache) for _ in range(runs)]
    if cache:  # else it may be an engine whose answers are not checked
        many = tries[0]
        if any([one.ids for one in other] != [one.ids for one in many] for other in tries):
            raise WrongResult(f"{streams} streams answer otherwise when asked again")
        (alone,) = asked.generate(prompts[:1], min(count, 64), f"{salt}-alone")
        if many[0].ids[: len(alone.ids)] != alone.ids:
            raise WrongResult(f"alone {alone.ids}, among {streams} {many[0].ids}")
    return median(map(rates_together, tries))


def shared_instructions(asked: InProcess, length: int = INSTRUCTIONS) -> dict[str, float]:
    """A second request with the same instructions and another question."""
    vocab = asked.vocab
    system = stream(length, 300, vocab=vocab)
    found = []
    for number in range(2):
        prompt = [*system, *stream(500, 301 + number, vocab=vocab)]
        boundaries = ((length, "instruction"),)
        found += asked.generate([prompt], 8, "instructions", boundaries=boundaries)
    first, second = found
    if second.restored != length:
        raise WrongResult(f"{second.restored} of {length} instruction tokens restored")
    return {"restored": second.restored, "cold_s": first.first_s, "warm_s": second.first_s}


def conversation(
    asked: InProcess, opening: int = OPENING, turn: int = TURN
) -> list[dict[str, Any]]:
    """Turns of one conversation: a prompt is the last one, its answer and ``turn`` new tokens."""
    vocab = asked.vocab
    prompt = stream(opening, 310, vocab=vocab)
    expected, rows = 0, []
    for number in range(TURNS):
        (reply,) = asked.generate([prompt], ANSWER, "conversation")
        if reply.restored != expected:
            raise WrongResult(f"turn {number}: {reply.restored} restored, not {expected}")
        rows.append({"tokens": len(prompt), "restored": reply.restored, "first_s": reply.first_s})
        # All but the last token of the answer, which was never read.
        expected = len(prompt) + ANSWER - 1
        prompt = [*prompt, *reply.ids, *stream(turn, 311 + number, vocab=vocab)]
    return rows


def figures(asked: Asked, lengths: Sequence[int]) -> dict[str, Any]:
    """First tokens at each length."""
    return {str(length): first_tokens(asked, length) for length in lengths}
