"""One GPU against several, in one go: prefill, decode, bytes a token, seals and restores of each
rank, sums over ranks.

Refuses to report when a restored answer has not the bits of the cold one. The last line of the
output is one JSON object.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from bench import collectives
from bench.about import heading, keep, publish
from bench.asking import Answer, ask
from bench.timed_rank import medians
from merestone.engine.build import EngineOptions, build_engine, over_ranks
from merestone.engine.engine import LocalEngine
from merestone.engine.ranks.messages import RankOptions
from merestone.probe.streams import stream

STREAMS = 8
SHORT, DECODED = 64, 65
RUNS = 3
BITS = 2  # log probabilities of each token, where bits are compared


class WrongResult(Exception):
    """The answers are not what they must be; figures would be worth nothing."""


def alike(cold: Answer, warm: Answer, restored: int, what: str) -> None:
    """Raises WrongResult unless ``warm`` restored so much and has the bits of ``cold``."""
    if cold.error or warm.error:
        raise WrongResult(f"{what}: {cold.error or warm.error}")
    if warm.restored != restored:
        raise WrongResult(f"{what}: {warm.restored} of {restored} tokens restored")
    if (warm.ids, warm.logprobs) != (cold.ids, cold.logprobs):
        raise WrongResult(f"{what}: other ids or log probabilities than the cold run's")


def prefill(engine: LocalEngine, length: int) -> dict[str, Any]:
    """Tokens a second of a cold prompt, and seconds to the first token of its replay."""
    colds, warms = [], []
    for run in range(RUNS):
        prompt, salt = stream(length, run, vocab=engine.info.vocab_size), f"prefill {run}"
        (cold,) = ask(engine, [prompt], 4, salt)
        for _ in range(2):
            (warm,) = ask(engine, [prompt], 4, salt)
            alike(cold, warm, length, f"{length} tokens")
            warms.append(warm.first_s)
        colds.append(cold.first_s)
        onward = [*prompt, *cold.ids, 5]
        (resumed,) = ask(engine, [onward], 4, salt, BITS)
        (control,) = ask(engine, [onward], 4, f"{salt} cold", BITS)
        alike(control, resumed, length + 3, f"{length} tokens and an answer")
    return {
        "tokens": length,
        "tokens_per_s": round(length / median(colds), 1),
        "cold_first_s": round(median(colds), 5),
        "replay_first_s": round(median(warms), 5),
    }


def decode(engine: LocalEngine) -> dict[str, Any]:
    """Tokens a second of one stream, and of several together."""
    vocab = engine.info.vocab_size
    prompts = [stream(SHORT, number, vocab=vocab) for number in range(STREAMS)]
    alone, together = [], []
    for run in range(RUNS):
        (one,) = ask(engine, prompts[:1], DECODED, f"decode one {run}")
        many = ask(engine, prompts, DECODED, f"decode many {run}")
        alike(one, many[0], 0, "alone and in company")
        alone.append(one.decode_rate)
        spent = max(m.total_s for m in many) - max(m.first_s for m in many)
        together.append(STREAMS * (DECODED - 1) / spent)
    return {"alone_per_s": round(median(alone), 1), "together_per_s": round(median(together), 1)}


def measure(model: Path, options: EngineOptions, lengths: list[int]) -> dict[str, Any]:
    """Everything about one layout."""
    ranks = options.ranks
    print(f"TP {ranks.tp}, DCP {ranks.dcp}, speculation {options.speculate}", flush=True)
    times = Path(tempfile.mkdtemp(prefix="merestone-"))
    if ranks.tp == 1:
        engine = build_engine(model, options, "bench")
    else:
        command = (sys.executable, "-m", "bench.timed_rank", str(times))
        engine = over_ranks(model, options, "bench", command)
    engine.start()
    try:
        full = next(group for group in engine.cache.spec.groups if group.name == "full")
        frame = engine.cache.spec.frame_bytes
        ask(engine, [stream(SHORT, 99, vocab=engine.info.vocab_size)], DECODED, "warm-up")
        found = {
            "tp": ranks.tp,
            "dcp": ranks.dcp,
            "speculate": options.speculate,
            "device": engine.info.device,
            "dtype": engine.info.dtype,
            "frame_bytes": frame,
            "tokens_a_full_page": full.span,
            "bytes_a_token_and_rank": round(frame / full.span, 1),
            "anchor_frames": engine.cache.spec.anchor_frames,
            "prefill": [prefill(engine, length) for length in lengths],
            "decode": decode(engine),
        }
    finally:
        engine.stop()
    if ranks.tp > 1:
        found["steps_by_rank"] = medians(times, ranks.tp)
    print(json.dumps(found), flush=True)
    return found


def main(
    model: Annotated[Path, typer.Argument(help="Directory of the model.")],
    layouts: Annotated[str, typer.Option(help="TPxDCP, with commas between.")] = "1x1,2x1,2x2",
    speculate: Annotated[str, typer.Option(help="none, mtp:K or dflash; commas.")] = "none",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cuda",
    lengths: Annotated[str, typer.Option(help="Prompt tokens, with commas.")] = "8192,32768",
    dtype: Annotated[str | None, typer.Option(help="Default: the checkpoint's.")] = None,
    load_format: Annotated[str, typer.Option(help="As merestone serve takes it.")] = "auto",
    token_budget: Annotated[int, typer.Option(help="Rows of a step.")] = 4096,
    memory: Annotated[int | None, typer.Option(help="Bytes of the pool. Default: all.")] = None,
    graphs: Annotated[bool, typer.Option(help="CUDA graphs.")] = True,
    out: Annotated[Path | None, typer.Option(help="Write the JSON there, too.")] = None,
) -> None:
    """Measure layouts of ranks against one rank."""
    logging.basicConfig(level="WARNING")
    sizes = [int(length) for length in lengths.split(",")]
    report: dict[str, Any] = {
        **heading("multi_gpu", model, device),
        "cells": [],
        "collectives": {},
        "errors": [],
    }
    for drafts in speculate.split(","):
        for layout in layouts.split(","):
            tp, _, dcp = layout.partition("x")
            options = EngineOptions(
                device=device,
                dtype=dtype,
                load_format=load_format,
                token_budget=token_budget,
                memory=memory,
                graphs=graphs,
                max_running=STREAMS,
                speculate=drafts,
                ranks=RankOptions(tp=int(tp), dcp=int(dcp)),
            )
            try:
                report["cells"].append(measure(model, options, sizes))
            except (WrongResult, ValueError, RuntimeError, OSError) as error:
                report["errors"].append(f"TP {tp}, DCP {dcp}, speculation {drafts}: {error}")
                print(report["errors"][-1], flush=True)
            keep(report, out)  # what there is, should the next layout take too long
    for ranks in sorted({int(layout.partition("x")[0]) for layout in layouts.split(",")} - {1}):
        report["collectives"][ranks] = collectives.over_ranks(collectives.compare, ranks, device)[0]
    publish(report, out)
    if report["errors"]:
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
