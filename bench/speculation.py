"""What speculation brings: steps and tokens a second, accepted drafts, cold and restored.

    python -m bench.speculation --save bench/results/speculation-NAME.json
    python -m bench.speculation --device cuda --dtype bfloat16 --slice

Answers are chats like those that the bundled model was trained on, one stream at a time. Refuses to
report when a kind of speculation changes an id or a bit of a log probability, or when a restored
request accepts other drafts than the cold one, step by step. The last line of the output is one
JSON object.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from training.evaluate import HELD_OUT
from training.rows import make

from bench.about import about, publish, rounded
from bench.inprocess import TIMEOUT_S, WrongResult
from bench.shapes import write_glm_slice
from merestone.engine.api import Event, Finished, GenerateRequest, TokenEvent
from merestone.engine.build import EngineOptions, build_engine
from merestone.engine.engine import LocalEngine
from merestone.sched.plan import SamplingParams

KINDS, SLICE_KINDS = "none,mtp:3,dflash", "none,mtp:3"
BUNDLED = Path(__file__).parents[1] / "src" / "merestone" / "assets" / "merestone-tiny"


@dataclass(slots=True)
class Answer:
    """One request's: ids, their log probabilities where asked for, how many tokens came in each
    step, and when the first and the last came, by the clock and by the process's own time."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    restored: int = 0
    first: tuple[float, float] = (0.0, 0.0)
    last: tuple[float, float] = (0.0, 0.0)

    @property
    def decode_s(self) -> float:
        return self.last[0] - self.first[0]

    @property
    def decode_cpu_s(self) -> float:
        return self.last[1] - self.first[1]

    @property
    def accepted(self) -> list[int]:
        """Drafts accepted by each step that could verify some."""
        return [count - 1 for count in self.steps[1:]]


def prompts(count: int, length: int) -> list[list[int]]:
    """Seeded chats of exactly ``length`` tokens that end where a reply begins."""
    found: list[list[int]] = []
    number = 0
    while len(found) < count:
        chat = make(HELD_OUT, 100 + number, 1, length + 600, BUNDLED / "tokenizer.json")
        number += 1
        for span in chat.spans[0]:
            # The prefix of every chat, then what comes before the reply.
            if length <= span.start and span.end - span.start >= 16:
                ids = chat.ids[0].tolist()
                found.append(ids[:2] + ids[span.start - length + 2 : span.start])
                break
    return found


def ask(
    engine: LocalEngine, prompt: Sequence[int], count: int, name: str, logprobs: int | None = None
) -> Answer:
    """``count`` greedy tokens after the prompt, end tokens ignored; ``name`` is its own cache."""
    answer, ended = Answer(), threading.Event()
    request = GenerateRequest(
        f"{name}-{time.perf_counter_ns()}",
        tuple(prompt),
        SamplingParams(logprobs=logprobs),
        max_tokens=count,
        salt=name,
    )
    engine.submit(request, _sink(answer, ended))
    if not ended.wait(TIMEOUT_S):
        raise WrongResult("the engine did not answer")
    return answer


def _sink(answer: Answer, ended: threading.Event) -> Callable[[list[Event]], None]:
    def sink(events: list[Event]) -> None:
        now = time.perf_counter(), time.process_time()
        drawn = [e for e in events if isinstance(e, TokenEvent)]
        if drawn:
            answer.first = answer.first if answer.steps else now
            answer.last = now
            answer.steps.append(len(drawn))
            answer.tokens += [event.token for event in drawn]
            answer.logprobs += [event.logprob.logprob for event in drawn if event.logprob]
        for event in events:
            if isinstance(event, Finished):
                answer.restored = event.cache.restored
                ended.set()

    return sink


def run(
    directory: Path, options: EngineOptions, texts: Sequence[Sequence[int]], count: int
) -> tuple[list[Answer], list[Answer]]:
    """Every text cold, then restored. Bits are compared in a third round: log probabilities are
    taken on the host, which would be most of a step's time."""
    engine = build_engine(directory, options)
    engine.start()
    try:
        ask(engine, texts[0][:100], 16, "warm-up")
        colds = [ask(engine, text, count, f"t{i}") for i, text in enumerate(texts)]
        again = [ask(engine, text, count, f"t{i}") for i, text in enumerate(texts)]
        third = [ask(engine, text, count, f"t{i}", 0) for i, text in enumerate(texts)]
    finally:
        engine.stop()
    for text, cold, restored, told in zip(texts, colds, again, third, strict=True):
        if told.tokens != cold.tokens or told.steps != cold.steps:
            raise WrongResult(f"{options.speculate}: log probabilities change what is drawn")
        cold.logprobs = told.logprobs
        if (cold.restored, restored.restored) != (0, len(text)):
            raise WrongResult(f"{options.speculate}: {restored.restored} tokens restored")
        if restored.tokens != cold.tokens:
            raise WrongResult(f"{options.speculate}: a restored answer differs from the cold one")
        if restored.steps != cold.steps:
            raise WrongResult(f"{options.speculate}: a restored request accepts other drafts")
    return colds, again


def figures(answers: Sequence[Answer]) -> dict[str, Any]:
    """Medians over the prompts; rates count from the first token. What a step costs in the
    process's own time does not depend on what else the machine does."""
    steps = [len(a.steps) - 1 for a in answers]
    return {
        "steps_per_s": median(n / a.decode_s for n, a in zip(steps, answers, strict=True)),
        "step_cpu_ms": median(
            1000 * a.decode_cpu_s / n for n, a in zip(steps, answers, strict=True)
        ),
        "tokens_per_s": median((len(a.tokens) - 1) / a.decode_s for a in answers),
        "accepted": median(sum(a.accepted) / n for n, a in zip(steps, answers, strict=True)),
        "accepted_of_each": [
            round(sum(a.accepted) / n, 3) for n, a in zip(steps, answers, strict=True)
        ],
    }


def measure(
    directory: Path,
    options: dict[str, Any],
    kinds: Sequence[str],
    texts: Sequence[Sequence[int]],
    count: int,
) -> dict[str, Any]:
    """Figures of each of ``kinds``, the first of which is "none"."""
    report: dict[str, Any] = {}
    plain: list[Answer] = []
    for kind in kinds:
        cold, restored = run(directory, EngineOptions(speculate=kind, **options), texts, count)
        plain = plain or cold
        if [(a.tokens, a.logprobs) for a in cold] != [(a.tokens, a.logprobs) for a in plain]:
            raise WrongResult(f"{kind}: an answer differs from the one without speculation")
        report[kind] = {"cold": figures(cold), "restored": figures(restored)}
        print(kind, json.dumps(rounded(report[kind])), flush=True)
    base = report["none"]["cold"]
    for kind in kinds[1:]:
        found = report[kind]["cold"]
        report[kind]["tokens_to_none"] = found["tokens_per_s"] / base["tokens_per_s"]
        report[kind]["step_cost"] = base["steps_per_s"] / found["steps_per_s"]
        report[kind]["step_cpu_cost"] = found["step_cpu_ms"] / base["step_cpu_ms"]
    return report


def main(
    model: Annotated[Path, typer.Option(help="With an MTP layer, and a draft inside.")] = BUNDLED,
    true_sizes: Annotated[
        bool, typer.Option("--slice", help="Random layers of published sizes instead.")
    ] = False,
    layers: Annotated[int, typer.Option(min=4, help="Of the slice.")] = 8,
    kinds: Annotated[str, typer.Option(help="Of speculation; none comes first.")] = "",
    device: Annotated[str, typer.Option()] = "cpu",
    dtype: Annotated[str, typer.Option()] = "float32",
    threads: Annotated[int, typer.Option(min=1)] = 1,
    length: Annotated[int, typer.Option(min=64, help="Prompt tokens.")] = 4096,
    count: Annotated[int, typer.Option(min=2, help="Tokens of an answer.")] = 129,
    chats: Annotated[int, typer.Option(min=1)] = 5,
    memory: Annotated[int, typer.Option(help="MiB of the pool.")] = 1024,
    save: Annotated[Path | None, typer.Option(help="Write the JSON there, too.")] = None,
) -> None:
    """Measure, compare and report."""
    logging.getLogger("merestone").setLevel(logging.ERROR)
    report = about(threads, "slice of GLM-5.3-Flash" if true_sizes else model.name, device)
    report |= {"dtype": dtype, "prompt": length, "answer": count}
    options: dict[str, Any] = {
        "device": device,
        "dtype": dtype,
        "threads": threads,
        "memory": memory << 20,
        "max_running": 1,
    }
    kinds = kinds or (SLICE_KINDS if true_sizes else KINDS)
    texts = prompts(chats, length)
    with tempfile.TemporaryDirectory() as scratch:
        if true_sizes:
            model = Path(scratch)
            write_glm_slice(model, experts=64, layers=layers, mtp=True)
            report |= {"layers": layers, "experts": 64}
            options["load_format"] = "random"
        try:
            report |= measure(model, options, kinds.split(","), texts, count)
        except WrongResult as error:
            print(json.dumps({**report, "refused": str(error)}))
            sys.exit(1)
    report = rounded(report)
    publish(report, save)


if __name__ == "__main__":
    typer.run(main)
