"""A slice of GLM-5.3-Flash on one GPU: eight layers at true dimensions, random weights.

    python -m bench.gpu [--save FILE]        (--tiny: a tiny model on the CPU, to try the program)

First tokens cold and replayed, prefill and decode rates, what retention costs, and what exactness
costs: the same engine with cuBLAS products and fla-core's kernels, whose state is rewritten in
place, instead of ours. In process; refuses to report when results are wrong. The last line of the
output is one JSON object.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.about import publish
from bench.engine_rows import decode_rate, figures, prefill_rate, running
from bench.inexact import inexact
from bench.inprocess import InProcess, WrongResult
from bench.shapes import write_glm_slice
from bench.timing import about_device
from merestone.engine.build import EngineOptions
from merestone.models.tiny import write_tiny

LENGTHS = (8192, 32768)
STREAMS = (1, 8, 64)
PROMPT, COUNT = 1024, 128


def rates(asked: InProcess, tiny: bool, *, cache: bool) -> dict[str, Any]:
    """Prefill and decode, with checkpoints kept or without."""
    streams, prompt, count = ((1, 2), 64, 16) if tiny else (STREAMS, PROMPT, COUNT)
    return {
        "prefill_tokens_s": prefill_rate(asked, 512 if tiny else LENGTHS[0], cache=cache),
        "decode": {str(n): decode_rate(asked, n, prompt, count, cache=cache) for n in streams},
    }


def shares(ours: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    """Ours over the other's, row by row."""
    found = {"prefill": ours["prefill_tokens_s"] / other["prefill_tokens_s"]}
    for streams, rate in ours["decode"].items():
        found[f"decode {streams}"] = rate / other["decode"][streams]
    return found


def measure(asked: InProcess, tiny: bool) -> dict[str, Any]:
    """Rows of the exact engine."""
    found: dict[str, Any] = {"first_token": figures(asked, (256, 512) if tiny else LENGTHS)}
    found["boundaries"] = rates(asked, tiny, cache=True)
    found["none"] = rates(asked, tiny, cache=False)
    found["retention"] = shares(found["boundaries"], found["none"])
    return found


def main(
    tiny: Annotated[bool, typer.Option(help="A tiny model on the CPU.")] = False,
    save: Annotated[Path | None, typer.Option(help="Write the JSON there, too.")] = None,
) -> None:
    """Measure and report."""
    options = EngineOptions(
        device="cuda", dtype="bfloat16", load_format="random", max_model_len=36864,
        max_running=64, token_budget=8192, memory=24 << 30,
    )  # fmt: skip
    if tiny:
        options = EngineOptions(threads=1)
    write = write_tiny if tiny else write_glm_slice
    report: dict[str, Any] = about_device() | {
        "model": "tiny" if tiny else "GLM-5.3-Flash, 8 layers"
    }
    began = time.perf_counter()
    try:
        with running(write, options, "bench") as engine:
            report["start_s"] = time.perf_counter() - began
            report |= measure(InProcess(engine), tiny)
        if not tiny:
            print(json.dumps(report), flush=True)
            with inexact(), running(write, options, "bench") as engine:
                report["inexact"] = rates(InProcess(engine), tiny, cache=False)
            report["exactness"] = shares(report["none"], report["inexact"])
    except WrongResult as error:
        print(json.dumps({**report, "refused": str(error)}))
        sys.exit(1)
    publish(report, save)


if __name__ == "__main__":
    typer.run(main)
