"""Kimi-Linear-48B-A3B at its full published shape on one GPU, with random weights.

    python -m bench.kimi [--save FILE]        (--tiny: a tiny model on the CPU, to try the program)

In process, ids in to first id out; ``http`` has what a client of a server sees. Refuses to report
when results are wrong. The last line of the output is one JSON object; ``orientation`` holds what
another engine (vLLM 0.25.1, dummy weights, align mode) gave on the same kind of card.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from bench.about import publish
from bench.engine_rows import (
    Asked,
    conversation,
    decode_rate,
    figures,
    running,
    shared_instructions,
)
from bench.inprocess import InProcess, WrongResult
from bench.over_http import OverHttp
from bench.serving import merestone_process
from bench.shapes import write_kimi
from bench.step_profile import kernels
from bench.timing import about_device
from merestone.engine.build import EngineOptions
from merestone.models.tiny import write_tiny_kimi
from merestone.probe.streams import stream

LENGTHS = (8192, 32768)
STREAMS = (1, 8, 64)
PROMPT, COUNT = 1024, 256
ORIENTATION = {
    "first_token": {
        "8192": {"cold_s": 0.223, "replay_s": 0.090, "prefill_tokens_s": 27400},
        "32768": {"cold_s": 0.940, "replay_s": 0.137, "prefill_tokens_s": 34800},
    },
    "decode": {"1": 259, "8": 1036, "64": 6405},
}


def routed(asked: InProcess, rows: int = 64) -> float:
    """How many experts ``rows`` rows of a prompt touch in a layer, on average."""
    from merestone.layers.gpu import mlp

    counts: list[torch.Tensor] = []
    route = mlp.route

    def counting(*args: Any, **options: Any) -> Any:
        ids, weights = route(*args, **options)
        if ids.shape[0] > rows and not torch.cuda.is_current_stream_capturing():
            counts.append(ids[-rows:].clone())
        return ids, weights

    mlp.route = counting
    try:
        asked.generate([stream(2048, 319, vocab=asked.vocab)], 1, "routed")
    finally:
        mlp.route = route
    return sum(ids.unique().numel() for ids in counts) / max(len(counts), 1)


def decoding(asked: Asked, tiny: bool) -> dict[str, float]:
    """Tokens a second at each number of streams."""
    streams, prompt, count = ((1, 2), 64, 16) if tiny else (STREAMS, PROMPT, COUNT)
    return {str(n): decode_rate(asked, n, prompt, count) for n in streams}


def rates(asked: Asked, tiny: bool) -> dict[str, Any]:
    """First tokens and decoding, the same rows however an engine is asked."""
    firsts = figures(asked, (256, 512) if tiny else LENGTHS)
    return {"first_token": firsts, "decode": decoding(asked, tiny)}


def measure(asked: InProcess, tiny: bool) -> dict[str, Any]:
    """All rows."""
    found = rates(asked, tiny)
    if not tiny:
        found["experts_of_64_rows"] = routed(asked)
        # Each step's plan made after the one before has ended.
        asked.engine.overlap = False
        found["decode_without_overlap"] = decoding(asked, tiny)
        asked.engine.overlap = True
        found["step"] = {str(n): kernels(asked, n, PROMPT) for n in STREAMS}
    opening = 300 if tiny else 8000
    found["instructions"] = shared_instructions(asked, 200 if tiny else 3000)
    found["conversation"] = conversation(asked, opening, 40 if tiny else 300)
    return found


def over_http(options: EngineOptions, vocab: int, tiny: bool) -> dict[str, Any]:
    """First tokens and decode rates that a client of ``merestone serve`` sees, ids in and out."""
    given = {
        "device": options.device, "dtype": options.dtype, "load-format": options.load_format,
        "max-model-len": options.max_model_len, "max-running": options.max_running,
        "token-budget": options.token_budget, "threads": options.threads,
    }  # fmt: skip
    named = [f"--{name}={value}" for name, value in given.items() if value is not None]
    with tempfile.TemporaryDirectory() as scratch:
        (write_tiny_kimi if tiny else write_kimi)(Path(scratch))
        with merestone_process([scratch, "--served-model-name=bench", *named]) as url:
            return rates(OverHttp(url, vocab), tiny)


def main(
    tiny: Annotated[bool, typer.Option(help="A tiny model on the CPU.")] = False,
    save: Annotated[Path | None, typer.Option(help="Write the JSON there, too.")] = None,
) -> None:
    """Measure and report."""
    options = EngineOptions(
        device="cuda", dtype="bfloat16", load_format="random", max_model_len=36864,
        max_running=64, token_budget=8192,
    )  # fmt: skip
    if tiny:
        options = EngineOptions(threads=1)
    report: dict[str, Any] = about_device() | {"model": "tiny" if tiny else "Kimi-Linear-48B-A3B"}
    began = time.perf_counter()
    try:
        with running(write_tiny_kimi if tiny else write_kimi, options, "bench") as engine:
            report["start_s"] = time.perf_counter() - began
            asked = InProcess(engine)
            report |= measure(asked, tiny)
            del asked
        if not tiny:
            report["memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
            report["orientation"] = ORIENTATION
        print(json.dumps(report), flush=True)
        vocab = engine.info.vocab_size
        del engine
        gc.collect()
        torch.cuda.empty_cache()
        report["http"] = over_http(options, vocab, tiny)
    except WrongResult as error:
        print(json.dumps({**report, "refused": str(error)}))
        sys.exit(1)
    publish(report, save)


if __name__ == "__main__":
    typer.run(main)
