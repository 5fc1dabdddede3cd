"""The layout of four ranks, whole: equality suite, figures, and a rank killed in a seal.

    python -m bench.four_gpus MODEL --benchy "python3 -m llama_benchy" --out four-gpus.json

Needs no change between machines: with four GPUs each rank has one, with fewer they share (gloo then
carries their messages), and ``--device cpu`` runs the same on small sizes. ``--parts`` and the
options behind it cut the work into pieces of minutes: what is finished is written at once, a part
in work to a file of its own. What could not run is named, not skipped in silence. The
last line of the output is one JSON object.
"""

from __future__ import annotations

import json
import logging
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from bench.about import heading, keep
from bench.asking import ask
from bench.layouts import TALKS
from bench.multi_gpu import BITS
from bench.serving import merestone_process
from merestone.engine.build import EngineOptions, over_ranks
from merestone.engine.ranks.messages import RankOptions
from merestone.probe.streams import stream

LAYOUTS, FIGURED = "4x1,4x2,4x4", "1x1,2x1,2x2,4x1,4x2,4x4"
SUITE = (
    "power,replay-quiet,replay-between,replay-16-at-once,appended,open-case,C02,C04,C06,C10,C11,"
    f"chat-thinking-kept,C38,C48,C50,{TALKS}"
)
SMALL_SUITE = f"power,appended,C06,C33,C48,{TALKS}"
PAGES = (("4x1", 2048), ("4x4", 512))
"""Layouts, and the page of a rank with which a page of all covers 2,048 tokens."""
BENCHY = (("4x1", "dflash"), ("4x4", "dflash"), ("4x4", "mtp:3"))
CONTEXT = 65536
"""Tokens that a request may have: a replay of 32,768 and its answer are longer than 32,768."""
SHARED_MEMORY = 4 << 30
"""Bytes of a rank's pool where ranks share a GPU: none of them can measure what is left."""
BOUND_S = 60.0
"""The longest that requests may take to end after a rank was killed, at time-outs of 10 s."""
DOCS = Path(__file__).parents[1] / "docs"


@dataclass(frozen=True, slots=True)
class Work:
    """What is to be run, and on what. ``out``: where the JSON goes."""

    model: Path
    device: str
    layouts: str
    speculate: str
    rows: str
    benchy: str
    out: Path

    @property
    def large(self) -> bool:
        return self.device != "cpu"

    @property
    def memory(self) -> int | None:
        shared = self.large and torch.cuda.device_count() < 4
        return SHARED_MEMORY if shared else None

    @property
    def serving(self) -> list[str]:
        """Options of every server."""
        options = ["--token-budget", "4096" if self.large else "512"]
        return options + (["--memory", str(self.memory)] if self.memory else [])

    def place(self, name: str) -> Path:
        """The file of a part that is in work."""
        return self.out.with_name(f"{self.out.stem}-{name}.json")


def run(name: str, out: Path, *arguments: str) -> dict[str, Any]:
    """One of our own programs; the JSON that it writes, or why there is none."""
    print(f"-- {name} {' '.join(arguments)}", flush=True)
    command = [sys.executable, "-m", name, *arguments, "--out", str(out)]
    out.unlink(missing_ok=True)
    code = subprocess.run(command, check=False).returncode
    if not out.exists():
        return {"not run": f"{name} ended with {code}"}
    found: dict[str, Any] = json.loads(out.read_text())
    out.unlink()
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


def equality(work: Work) -> dict[str, Any]:
    return run(
        "bench.layouts",
        work.place("equality"),
        *(str(work.model), "--device", work.device, "--layouts", work.layouts),
        *("--speculate", work.speculate, "--rows", work.rows),
        *("--options", " ".join(work.serving), *(["--full"] if work.large else [])),
    )


def pages(work: Work) -> list[dict[str, Any]]:
    """Steps of 4,096 tokens over pages of 2,048."""
    return [
        run(
            "bench.layouts",
            work.place(f"pages-{layout}"),
            *(str(work.model), "--device", work.device, "--layouts", layout),
            *("--rows", "power,C10,C11", *(["--full"] if work.large else [])),
            # The last of two options counts.
            *("--options", " ".join([*work.serving, "--token-budget 4096", f"--page {page}"])),
        )
        for layout, page in PAGES
    ]


def figures(work: Work) -> dict[str, Any]:
    return run(
        "bench.multi_gpu",
        work.place("figures"),
        *(str(work.model), "--device", work.device, "--layouts", FIGURED),
        *("--lengths", "8192,32768" if work.large else "300"),
        *("--token-budget", "4096" if work.large else "512"),
        *(["--memory", str(work.memory)] if work.memory else []),
    )


def faults(work: Work) -> list[dict[str, Any]]:
    return [killed_in_a_seal(work.model, work.device, dcp) for dcp in (1, 4)]


@contextmanager
def book() -> Iterator[str]:
    """A URL of the text that llama-benchy cuts its prompts from: our own pages."""
    with tempfile.TemporaryDirectory(prefix="merestone-") as place:
        pages = [path.read_text() for path in sorted(DOCS.glob("*.md"))]
        (Path(place) / "book.txt").write_text("\n".join(pages))
        handler = partial(SimpleHTTPRequestHandler, directory=place)
        with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            yield f"http://127.0.0.1:{server.server_port}/book.txt"
            server.shutdown()


def benchy(work: Work) -> list[dict[str, Any]]:
    """llama-benchy with coherence and prefix caching at depth 8,192."""
    found = []
    for layout, drafts in BENCHY:
        tp, _, dcp = layout.partition("x")
        serve = [str(work.model), "--device", work.device, "--tp", tp, "--dcp", dcp]
        with (
            book() as url_of_book,
            merestone_process([*serve, *work.serving, "--speculate", drafts]) as url,
        ):
            done = subprocess.run(
                [
                    *(*shlex.split(work.benchy), "--base-url", f"{url}/v1"),
                    *("--model", work.model.name, "--tokenizer", str(work.model)),
                    *("--book-url", url_of_book, "--depth", "8192"),
                    *("--pp", "128", "--tg", "32", "--exact-tg", "--runs", "2"),
                    *("--enable-prefix-caching", "--exit-on-first-fail"),
                ],
                capture_output=True,
                text=True,
                check=False,
            )
        good = done.returncode == 0 and "Coherence test PASSED" in done.stdout
        said = (done.stdout if good else done.stdout + done.stderr)[-4000:]
        found.append({"layout": layout, "speculate": drafts, "good": good, "output": said})
    return found


PARTS: dict[str, Callable[[Work], Any]] = {
    "equality": equality,
    "pages": pages,
    "figures": figures,
    "faults": faults,
    "benchy": benchy,
}


def judge(part: Any) -> tuple[bool, list[str]]:
    """Whether a part shows what it should, and what of it did not run."""
    if isinstance(part, list):
        judged = [judge(entry) for entry in part]
        return all(good for good, _ in judged), [name for _, names in judged for name in names]
    if "not run" in part:
        return False, [part["not run"]]
    good = part["good"] if "good" in part else part["exit"] == 0
    return good, list(part.get("unsupported", ()))


def long_enough(model: Path) -> Path:
    """The model, or a copy that takes longer requests. It has no positions to learn: the same
    weights, the same bits."""
    config = json.loads((model / "config.json").read_text())
    text = config.get("text_config", config)
    if text.get("max_position_embeddings", CONTEXT) >= CONTEXT:
        return model
    copy = Path(tempfile.mkdtemp(prefix="merestone-")) / model.name
    shutil.copytree(model, copy)
    text["max_position_embeddings"] = CONTEXT
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def main(
    model: Annotated[Path, typer.Argument(help="Directory of the model.")],
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cuda",
    parts: Annotated[str, typer.Option(help="What to run, with commas.")] = ",".join(PARTS),
    layouts: Annotated[str, typer.Option(help="Of the equality suite: TPxDCP, commas.")] = LAYOUTS,
    speculate: Annotated[str, typer.Option(help="Of the equality suite; commas.")] = (
        "none,mtp:3,dflash"
    ),
    rows: Annotated[str, typer.Option(help="Of the equality suite. Default: all of it.")] = "",
    benchy: Annotated[str, typer.Option(help="The command that is llama-benchy.")] = "",
    out: Annotated[Path, typer.Option(help="Where the JSON goes.")] = Path("four-gpus.json"),
) -> None:
    """Run everything that four ranks must show."""
    logging.basicConfig(level="WARNING")
    if unknown := set(parts.split(",")) - set(PARTS):
        raise typer.BadParameter(f"no part named {', '.join(sorted(unknown))}")
    suite = rows or (SMALL_SUITE if device == "cpu" else SUITE)
    model = long_enough(model.resolve())
    work = Work(model, device, layouts, speculate, suite, benchy, out)
    report = heading("four_gpus", model, device)
    good, missing = True, []
    for name in parts.split(","):
        if name == "benchy" and not benchy:
            missing.append("benchy: --benchy names no command")
            continue
        report[name] = PARTS[name](work)
        shows, lacks = judge(report[name])
        good = good and shows
        missing += [f"{name}: {what}" for what in lacks]
        keep(report | {"good": good, "not_run": missing}, out)
    print(json.dumps({"bench": "four_gpus", "good": good, "not_run": missing, "out": str(out)}))
    if not good:
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
