"""Time to first token and decode rate on the CPU, against transformers in the same process.

Refuses to report when results are wrong: a warm answer must be the cold one, bit for bit. Where
the ids of transformers part from ours (its numerics are not row-invariant, so a near-tie may flip)
the first difference is reported. The last line of the output is one JSON object.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer

from bench.about import about, publish, rounded
from bench.inprocess import InProcess, Timed, WrongResult, rates_together
from bench.over_http import OverHttp
from bench.reference import Reference
from bench.serving import merestone_process
from merestone.engine.build import EngineOptions, build_engine
from merestone.engine.engine import LocalEngine
from merestone.models.tiny import write_tiny
from merestone.probe.streams import stream

STREAMS = 8
DECODED = 65  # tokens of a decode run
SHORT = 64  # tokens of its prompts
AGREEMENT = (64, 200, 700)  # prompt tokens of the comparison with transformers


Asked = InProcess | OverHttp


def first_tokens(asked: Asked, name: str, length: int, vocab: int, runs: int) -> dict[str, Any]:
    """Cold and warm time to first token of prompts of one length."""
    colds, warms = [], []
    for run in range(runs):
        prompt, salt = stream(length, run, vocab=vocab), f"{name}-{length}-{run}"
        (cold,) = asked.generate([prompt], 8, salt)
        for _ in range(3):
            (warm,) = asked.generate([prompt], 8, salt)
            if warm.ids != cold.ids:
                raise WrongResult(f"{length} tokens: warm {warm.ids}, cold {cold.ids}")
            if (cold.restored, warm.restored) != (0, length):
                raise WrongResult(f"{length} tokens: {warm.restored} restored")
            warms.append(warm.first_s)
        colds.append(cold.first_s)
    cold_s, warm_s = median(colds), median(warms)
    return {"cold_s": cold_s, "warm_s": warm_s, "warm_to_cold": warm_s / cold_s, "colds": colds}


def decode_rates(asked: Asked, name: str, vocab: int, runs: int) -> dict[str, Any]:
    """Tokens a second of one stream, and of ``STREAMS`` together."""
    prompts = [stream(SHORT, number, vocab=vocab) for number in range(STREAMS)]
    alone, together = [], []
    for run in range(runs):
        (one,) = asked.generate(prompts[:1], DECODED, f"{name}-one-{run}")
        many = asked.generate(prompts, DECODED, f"{name}-many-{run}")
        if many[0].ids != one.ids:
            raise WrongResult(f"alone {one.ids}, among {STREAMS} {many[0].ids}")
        alone.append(one.decode_rate)
        together.append(rates_together(many))
    return _rates(alone, together)


def _rates(alone: list[float], together: list[float]) -> dict[str, Any]:
    samples = {"alone": alone, "together": together}
    return {"alone": median(alone), "together": median(together), "samples": samples}


def reference_figures(
    reference: Reference, lengths: Sequence[int], vocab: int, runs: int
) -> dict[str, Any]:
    """The same measurements of transformers, which has no cache between requests."""
    firsts = {}
    for length in lengths:
        times = [
            reference.generate([stream(length, run, vocab=vocab)], 1)[0].first_s
            for run in range(runs)
        ]
        firsts[str(length)] = {"cold_s": median(times), "colds": times}
    prompts = [stream(SHORT, number, vocab=vocab) for number in range(STREAMS)]
    alone = [reference.generate(prompts[:1], DECODED)[0].decode_rate for _ in range(runs)]
    together = [rates_together(reference.generate(prompts, DECODED)) for _ in range(runs)]
    return {"first_token": firsts, "decode": _rates(alone, together)}


def agreement(ours: Sequence[Timed], theirs: Sequence[Timed]) -> dict[str, Any]:
    """Whether transformers gives our ids; if not, where the first differs."""
    different = []
    for one, other in zip(ours, theirs, strict=True):
        if one.ids != other.ids:
            pairs = enumerate(zip(one.ids, other.ids, strict=True))
            different.append(next(at for at, (a, b) in pairs if a != b))
    tokens = sum(len(result.ids) for result in ours)
    return {"tokens": tokens, "equal": not different, "first_differences": different}


def measure(
    directory: Path, fresh: bool, options: EngineOptions, sizes: Sequence[int], runs: int
) -> dict[str, Any]:
    """All figures. An OpenMP pool belongs to a thread, and two of them in a process slow each
    other down: the engine is built by a thread that ends, and transformers runs when the engine's
    own has ended."""

    def build() -> LocalEngine:
        if fresh:
            write_tiny(directory)
        return build_engine(directory, options, "bench")

    with ThreadPoolExecutor(1) as builder:
        engine = builder.submit(build).result()
    vocab = min(engine.info.vocab_size, 256)
    prompts = [stream(length, number, vocab=vocab) for number, length in enumerate(AGREEMENT)]
    engine.start()
    try:
        direct = InProcess(engine)
        answers = [direct.generate([prompt], 32, "agreement")[0] for prompt in prompts]
        ours = figures(direct, "direct", sizes, vocab, runs)
    finally:
        engine.stop()
    with merestone_process(_serve_options(directory, options)) as url:
        http = figures(OverHttp(url, vocab), "http", sizes, vocab, runs)
    torch.set_num_threads(options.threads or 1)
    reference = Reference(directory)
    agreed = agreement(answers, [reference.generate([p], 32)[0] for p in prompts])
    theirs = reference_figures(reference, sizes, vocab, runs)
    return {
        "agreement": agreed,
        "in_process": ours,
        "http": http,
        "transformers": theirs,
        "ratios": ratios(ours, theirs),
    }


def figures(asked: Asked, name: str, lengths: Sequence[int], vocab: int, runs: int) -> Any:
    """All measurements of one way to ask."""
    firsts = {str(n): first_tokens(asked, name, n, vocab, runs) for n in lengths}
    return {"first_token": firsts, "decode": decode_rates(asked, name, vocab, runs)}


def ratios(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """Ours against theirs (above 1 is better for rates, below 1 for seconds), and the targets."""
    cold = {
        length: entry["cold_s"] / theirs["first_token"][length]["cold_s"]
        for length, entry in ours["first_token"].items()
    }
    rate = ours["decode"]
    found = {
        "cold_to_transformers": cold,
        "decode_alone_to_transformers": rate["alone"] / theirs["decode"]["alone"],
        "decode_together_to_transformers": rate["together"] / theirs["decode"]["together"],
        "together_to_alone": rate["together"] / rate["alone"],
    }
    targets = {
        "decode alone >= transformers": found["decode_alone_to_transformers"] >= 1,
        f"{STREAMS} streams >= 3 x one": found["together_to_alone"] >= 3,
    }
    if "2048" in ours["first_token"]:
        small = ours["first_token"]["2048"]["warm_to_cold"] <= 0.03
        targets["warm <= 3 % of cold at 2048"] = small
    return {**found, "targets": targets}


def main(
    model: Annotated[Path | None, typer.Option(help="Default: a tiny random one.")] = None,
    threads: Annotated[int, typer.Option(min=1)] = 2,
    lengths: Annotated[str, typer.Option(help="Prompt tokens.")] = "512,2048,8192",
    runs: Annotated[int, typer.Option(min=1, help="Of each measurement; medians count.")] = 3,
    memory: Annotated[int, typer.Option(help="MiB of the pool.")] = 1024,
    save: Annotated[Path | None, typer.Option(help="Write the JSON there, too.")] = None,
) -> None:
    """Measure, compare and report."""
    logging.getLogger("merestone").setLevel(logging.ERROR)
    sizes = [int(length) for length in lengths.split(",")]
    report = about(threads, "tiny" if model is None else model.name)
    options = EngineOptions(dtype="float32", threads=threads, memory=memory << 20)
    with tempfile.TemporaryDirectory() as scratch:
        directory = model or Path(scratch)
        try:
            report |= measure(directory, model is None, options, sizes, runs)
        except WrongResult as error:
            print(json.dumps({**report, "refused": str(error)}))
            sys.exit(1)
    report = rounded(report)
    publish(report, save)


def _serve_options(directory: Path, options: EngineOptions) -> list[str]:
    """The command line of a server with the same engine."""
    named = ("--dtype", options.dtype, "--threads", options.threads, "--memory", options.memory)
    return [str(directory), "--served-model-name", "bench", *map(str, named)]


if __name__ == "__main__":
    typer.run(main)
