"""The layout of four ranks, whole: equality suite, figures, and a rank killed in a seal.

Needs no change between machines: with four GPUs each rank has one, with fewer they share (gloo then
carries their messages), and ``--device cpu`` runs the same on small sizes. What could not run is
named, not skipped in silence. The last line of the output is one JSON object.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from bench.asking import ask
from bench.multi_gpu import BITS
from bench.serving import merestone_process
from merestone import __version__
from merestone.engine.build import EngineOptions, over_ranks
from merestone.engine.ranks.messages import RankOptions
from merestone.probe.streams import stream

LAYOUTS = "4x1,4x2,4x4"
SUITE = (
    "power,replay-quiet,replay-between,replay-16-at-once,appended,open-case,C02,C04,C06,C10,C11,"
    "chat-thinking-kept,C38,C48,C50"
)
SMALL_SUITE = "power,appended,C06,C33,C48"
BENCHY = (("4x1", "dflash"), ("4x4", "dflash"), ("4x4", "mtp:3"))
BOUND_S = 60.0
"""The longest that requests may take to end after a rank was killed, at time-outs of 10 s."""


def run(name: str, out: Path, *arguments: str) -> dict[str, Any]:
    """One of our own programs; the JSON that it writes, or why there is none."""
    print(f"-- {name} {' '.join(arguments)}", flush=True)
    command = [sys.executable, "-m", name, *arguments, "--out", str(out)]
    code = subprocess.run(command, check=False).returncode
    if not out.exists():
        return {"not run": f"{name} ended with {code}"}
    found: dict[str, Any] = json.loads(out.read_text())
    return found | {"exit": code}


def killed_in_a_seal(model: Path, device: str, dcp: int) -> dict[str, Any]:
    """Rank 2 dies between its copies and their report. Every request ends, no checkpoint of the
    step is found afterwards, and a new session gives the old bits."""
    order = Path(tempfile.mkdtemp(prefix="merestone-")) / "die"
    command = (sys.executable, "-m", "bench.fault_rank", "2", str(order))
    ranks = RankOptions(tp=4, dcp=dcp, on_loss="restart", silence_s=10.0)
    options = EngineOptions(device=device, ranks=ranks, memory=512 << 20)
    engine = over_ranks(model, options, "bench", command)
    engine.start()
    try:
        vocab = engine.info.vocab_size
        prompts = [stream(700, number, vocab=vocab) for number in range(8)]
        (before,) = ask(engine, prompts[:1], 8, "", BITS)
        while engine.ask(lambda: engine.scheduler.busy):
            time.sleep(0.01)  # the answer's own seal is none of this
        order.touch()
        began = time.perf_counter()
        answers = ask(engine, prompts, 8)
        bound = time.perf_counter() - began
        lost = [answer.error for answer in answers if answer.error]
        while engine.health()["status"] == "restarting":
            time.sleep(0.1)
        (after,) = ask(engine, prompts[:1], 8, "", BITS)
        (again,) = ask(engine, prompts[:1], 8, "", BITS)
        sessions = engine.health()["sessions"]
    finally:
        engine.stop()
    good = (
        bool(lost)
        and all(text is not None and "rank 2" in text for text in lost)
        and bound < BOUND_S + ranks.start_s
        and before.logprobs == after.logprobs == again.logprobs
        and again.restored == len(prompts[0])
        and sessions == 2
    )
    return {
        "good": good,
        "dcp": dcp,
        "ended_with_an_error": len(lost),
        "said": lost[:1],
        "all_answered_s": round(bound, 2),
        "restored_after": [after.restored, again.restored],
    }


def benchy(program: Path | None, model: Path, device: str, book: str) -> list[dict[str, Any]]:
    """llama-benchy with coherence and prefix caching at depth 8,192, where it is installed."""
    found = []
    for layout, drafts in BENCHY:
        cell: dict[str, Any] = {"layout": layout, "speculate": drafts}
        if program is None:
            found.append(cell | {"not run": "--benchy names no program"})
            continue
        tp, _, dcp = layout.partition("x")
        serve = [str(model), "--device", device, "--tp", tp, "--dcp", dcp, "--speculate", drafts]
        with merestone_process(serve) as url:
            done = subprocess.run(
                [
                    *(str(program), "--base-url", f"{url}/v1", "--model", model.name),
                    *("--tokenizer", str(model), "--book-url", book, "--depth", "8192"),
                    *("--pp", "128", "--tg", "32", "--exact-tg", "--runs", "2"),
                    *("--enable-prefix-caching", "--exit-on-first-fail"),
                ],
                capture_output=True,
                text=True,
                check=False,
            )
        passed = done.returncode == 0 and "Coherence test PASSED" in done.stdout
        found.append(cell | {"good": passed, "output": done.stdout[-4000:]})
    return found


def main(
    model: Annotated[Path, typer.Argument(help="Directory of the model.")],
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cuda",
    speculate: Annotated[str, typer.Option(help="As merestone serve; commas.")] = (
        "none,mtp:3,dflash"
    ),
    program: Annotated[Path | None, typer.Option("--benchy", help="llama-benchy.")] = None,
    book: Annotated[str, typer.Option(help="Its --book-url.")] = "http://127.0.0.1:8147/book.txt",
    out: Annotated[Path, typer.Option(help="Where the JSON goes.")] = Path("four-gpus.json"),
) -> None:
    """Run everything that four ranks must show."""
    logging.basicConfig(level="WARNING")
    place, large = Path(tempfile.mkdtemp(prefix="merestone-")), device == "cuda"
    served = f"--device {device} --token-budget {4096 if large else 512}"
    suite = run(
        "bench.layouts",
        place / "layouts.json",
        *(str(model), "--layouts", LAYOUTS, "--speculate", speculate),
        *("--rows", SUITE if large else SMALL_SUITE, "--options", served),
        *(["--full"] if large else []),
    )
    figures = run(
        "bench.multi_gpu",
        place / "figures.json",
        *(str(model), "--device", device, "--layouts", "1x1,2x1,2x2,4x1,4x2,4x4"),
        *("--lengths", "8192,32768" if large else "300"),
        *("--token-budget", "4096" if large else "512"),
    )
    pages = run(
        "bench.layouts",
        place / "pages.json",
        *(str(model), "--layouts", "4x4", "--speculate", "none", "--rows", "power,C10,C11"),
        *("--options", f"--device {device} --token-budget 4096 --page 512"),
        *(["--full"] if large else []),
    )
    faults = [killed_in_a_seal(model, device, dcp) for dcp in (1, 4)]
    report = {
        "bench": "four_gpus",
        "began": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": __version__,
        "device": torch.cuda.get_device_name() if large else "cpu",
        "gpus": torch.cuda.device_count(),
        "equality": suite,
        "budget_of_4096_pages_of_2048": pages,
        "figures": figures,
        "killed_in_a_seal": faults,
        "llama_benchy": benchy(program, model, device, book),
    }
    out.write_text(json.dumps(report, indent=1) + "\n")
    good = all(part.get("exit") == 0 for part in (suite, pages, figures))
    good = good and all(fault["good"] for fault in faults)
    print(json.dumps({"bench": "four_gpus", "good": good, "out": str(out)}))
    if not good:
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
