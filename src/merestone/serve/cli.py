"""The command line: ``merestone serve``, ``merestone chat``, ``merestone inspect``,
``merestone tiny``, ``merestone probe``.

The only place that reads the environment. Every variable has an option that overrides it:

| variable              | option                | meaning                                   |
| --------------------- | --------------------- | ----------------------------------------- |
| MERESTONE_MODEL       | MODEL_DIR             | directory of the model                    |
| MERESTONE_HOST        | --host                | address to listen on                      |
| MERESTONE_PORT        | --port                | port to listen on                         |
| MERESTONE_API_KEY     | --api-key             | key that clients must send, or that we do |
| MERESTONE_URL         | --url                 | server to talk to                         |
| MERESTONE_LOG_LEVEL   | --log-level           | debug, info, warning or error             |
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.console import Console

from merestone import __version__
from merestone.engine.build import EngineOptions, build_engine, lend_ranks
from merestone.engine.device import DeviceLost
from merestone.engine.ranks.messages import LONGEST_S, RankOptions
from merestone.models.tiny import ARCHITECTURES
from merestone.probe.cli import probe
from merestone.serve.explain import explain_retention
from merestone.serve.inspect import inspect_cache
from merestone.serve.server import AddressRefused, bind, run
from merestone.serve.service import ServerOptions, Service
from merestone.serve.template import load_text
from merestone.serve.terminal import Conversation, ServerRefusal

app = typer.Typer(
    name="merestone",
    help="Serves hybrid recurrent models; its prefix cache is exact at request boundaries.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console()
log = logging.getLogger("merestone.serve")

Made = TypeVar("Made")
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
LEVELS = ("debug", "info", "warning", "error")

ApiKey = Annotated[
    str | None, typer.Option(help="Bearer key.", envvar="MERESTONE_API_KEY", show_envvar=True)
]
ModelDir = Annotated[
    Path | None,
    typer.Argument(
        help="Hugging Face directory. Default: merestone-tiny.", envvar="MERESTONE_MODEL"
    ),
]
CacheTokens = Annotated[
    bool, typer.Option("--cache-tokens", help="GET /cache lists token ids, which are users' texts.")
]
Verify = Annotated[
    bool,
    typer.Option("--verify", help="Sum every checkpoint's bytes when sealed and when restored."),
]
MarkShare = Annotated[
    float,
    typer.Option(min=0, max=1, help="Part of the pool that marks with a time to live may keep."),
]
Explain = Annotated[
    bool, typer.Option("--explain", help="Print what is kept here, and why; then end.")
]
Tp = Annotated[int, typer.Option(min=1, help="Ranks that share every layer.")]
Dcp = Annotated[int, typer.Option(min=1, help="Of these, how many share the cached tokens.")]
Nodes = Annotated[int, typer.Option(min=1, help="Machines that the ranks run on.")]
NodeRank = Annotated[int, typer.Option(min=0, help="Which of them this is; 0 serves.")]
Master = Annotated[str, typer.Option(help="HOST:PORT of node 0, for the ranks of the others.")]
OnRankLoss = Annotated[str, typer.Option(help="exit, or restart all ranks with an empty cache.")]
RankTimeout = Annotated[float, typer.Option(help="Seconds of silence: the rank is lost.")]
StepTimeout = Annotated[float, typer.Option(help="Seconds that a step of all ranks may take.")]
StartTimeout = Annotated[float, typer.Option(help="Seconds that all ranks may take to start.")]
CorsOrigin = Annotated[list[str] | None, typer.Option(help="Origin that browsers may call from.")]
Stores = Annotated[
    list[str] | None,
    typer.Option(help="memory:SIZE, disk:DIR:SIZE or redis://..., fastest first; repeatable."),
]
LOCAL = "http://127.0.0.1:8000"
BUNDLED = Path(__file__).parent.parent / "assets" / "merestone-tiny"
"""The model that is served when none is named."""


class Failure(Exception):
    """What ends a command with one line on stderr: 2 for usage and models, 1 for the rest."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def parse_size(text: str) -> int:
    """Bytes of "512MiB", "2GB" or "1048576".

    Raises:
        Failure: not a size.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]i?)?b?", text.strip().lower())
    if found is None:
        raise Failure(f"--memory: {text!r} is not a size such as 512MiB or 2GB", 2)
    return int(float(found[1]) * UNITS[found[2] or ""])


def start_logging(level: str) -> None:
    """Send the program's log to stderr.

    Raises:
        Failure: an unknown level.
    """
    if level not in LEVELS:
        raise Failure(f"--log-level: {level!r} is not one of {', '.join(LEVELS)}", 2)
    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("merestone").setLevel(level.upper())


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Serves hybrid recurrent models; its prefix cache is exact at request boundaries."""
    if version:
        console.print(f"merestone {__version__}", highlight=False)
        raise typer.Exit


@app.command()
def serve(
    model_dir: ModelDir = None,
    host: Annotated[str, typer.Option(envvar="MERESTONE_HOST")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, envvar="MERESTONE_PORT")] = 8000,
    device: Annotated[
        str, typer.Option(help="cpu, cuda, or auto: a GPU if there is one.")
    ] = "auto",
    graphs: Annotated[bool, typer.Option(help="Replay steps on a GPU as CUDA graphs.")] = True,
    overlap: Annotated[bool, typer.Option(help="Plan the next step while a GPU runs one.")] = True,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.")] = None,
    load_format: Annotated[
        str, typer.Option(help="auto: the directory's weights; random: weights made in memory.")
    ] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
    max_model_len: Annotated[int | None, typer.Option(min=1, help="Context limit.")] = None,
    max_running: Annotated[int, typer.Option(min=1, help="Requests in one step.")] = 8,
    memory: Annotated[
        str | None, typer.Option(help="Size of the pool. Default: 512MiB, on a GPU what is left.")
    ] = None,
    frames: Annotated[int | None, typer.Option(min=1, help="Instead of --memory.")] = None,
    page: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a rank's attention page. Default: chosen.")
    ] = None,
    token_budget: Annotated[int, typer.Option(min=1, help="Token rows in one step.")] = 512,
    retention: Annotated[str, typer.Option(help="auto, boundaries, aligned:N or none.")] = "auto",
    mark_share: MarkShare = 0.25,
    verify: Verify = False,
    speculate: Annotated[
        str, typer.Option(help="none, mtp:1 to mtp:7, mtp:auto or dflash.")
    ] = "none",
    draft: Annotated[
        str | None, typer.Option(help="Directory of a DFlash draft. Default: MODEL_DIR/draft.")
    ] = None,
    accept: Annotated[
        str, typer.Option(help="exact: no token changes; rejection: more drafts, other tokens.")
    ] = "exact",
    explain: Explain = False,
    store: Stores = None,
    store_wait: Annotated[
        float, typer.Option(min=0, max=LONGEST_S, help="Seconds to wait for stores.")
    ] = 2.0,
    tp: Tp = 1,
    dcp: Dcp = 1,
    nodes: Nodes = 1,
    node_rank: NodeRank = 0,
    master: Master = "",
    on_rank_loss: OnRankLoss = "exit",
    rank_timeout: RankTimeout = 15.0,
    step_timeout: StepTimeout = 300.0,
    start_timeout: StartTimeout = 900.0,
    api_key: ApiKey = None,
    served_model_name: Annotated[str | None, typer.Option(help="Name in the API.")] = None,
    cache_tokens: CacheTokens = False,
    cors_origin: CorsOrigin = None,
    grace: Annotated[
        float, typer.Option(min=0, max=LONGEST_S, help="Seconds to end requests in.")
    ] = 10.0,
    log_level: Annotated[str, typer.Option(envvar="MERESTONE_LOG_LEVEL")] = "info",
) -> None:
    """Serve a model over HTTP, compatible with OpenAI's API."""
    start_logging(log_level)
    ranks = _or_failure(
        lambda: RankOptions(
            tp=tp,
            dcp=dcp,
            nodes=nodes,
            node=node_rank,
            master=master,
            on_loss=on_rank_loss,
            silence_s=rank_timeout,
            step_s=step_timeout,
            start_s=start_timeout,
        )
    )
    options = EngineOptions(
        device=device,
        graphs=graphs,
        overlap=overlap,
        dtype=dtype,
        load_format=load_format,
        threads=threads,
        max_model_len=max_model_len,
        max_running=max_running,
        memory=None if memory is None else parse_size(memory),
        token_budget=token_budget,
        retention=retention,
        mark_share=mark_share,
        verify=verify,
        frames=frames,
        page=page,
        stores=tuple(store or ()),
        store_wait=store_wait,
        speculate=speculate,
        draft=draft,
        accept=accept,
        ranks=ranks,
    )
    if explain:
        _or_failure(lambda: explain_retention(console, options))
        return
    directory = model_dir or BUNDLED
    if not directory.is_dir():
        raise Failure(f"{directory} is no directory", 2)
    if ranks.node > 0:
        if reason := _or_failure(lambda: lend_ranks(directory, options)):
            raise Failure(reason, 1)
        return
    try:
        listener = bind(host, port)
    except AddressRefused as error:
        raise Failure(str(error), 1) from error
    with listener:
        name = served_model_name or directory.resolve().name
        shown = ServerOptions(name, api_key, cache_tokens, tuple(cors_origin or ()))
        service = _load(directory, options, shown)
        address = f"[{host}]" if ":" in host else host
        url = f"http://{address}:{listener.getsockname()[1]}"
        line = f"merestone {__version__}: {name} at {url}"
        lost = run(service, listener, grace, lambda: announce(line))
    if lost is not None:
        raise Failure(lost, 1)


def announce(line: str) -> None:
    """Say where the server is. That nobody can read it is no reason to end."""
    try:
        console.print(line, highlight=False, soft_wrap=True)
    except (OSError, SystemExit) as error:  # a full disk; rich, of a pipe that was closed
        log.warning("%s (standard output: %r)", line, error)


def _load(directory: Path, options: EngineOptions, shown: ServerOptions) -> Service:
    text = _or_failure(lambda: load_text(directory))
    if options.ranks.tp > 1:  # they load in processes of their own
        engine = _or_failure(lambda: build_engine(directory, options, shown.model))
        return Service(engine, text, shown)
    # Loading computes, and OpenMP keeps a pool for each thread that does: one left behind by the
    # main thread would compete with that of the engine's thread.
    with ThreadPoolExecutor(1) as loader:
        engine = _or_failure(loader.submit(build_engine, directory, options, shown.model).result)
    return Service(engine, text, shown)


def _or_failure(work: Callable[[], Made]) -> Made:
    """What can be wrong with a model directory, an option or a rank, as a failure."""
    try:
        return work()
    except DeviceLost as error:
        raise Failure(str(error), 1) from error
    except (ValueError, OSError) as error:
        raise Failure(str(error), 2) from error


@app.command()
def chat(
    url: Annotated[
        str, typer.Option(help="Any server with OpenAI's API.", envvar="MERESTONE_URL")
    ] = LOCAL,
    model: Annotated[str | None, typer.Option(help="Default: the server's first.")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Limit of a reply.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, max=2)] = None,
    thinking: Annotated[
        bool | None, typer.Option(help="Ask for thinking, or for none. Default: the template's.")
    ] = None,
    api_key: ApiKey = None,
) -> None:
    """Talk to a server, and see after each turn what its cache restored."""
    try:
        with Conversation(
            console,
            url,
            api_key,
            model=model,
            system=system,
            max_tokens=max_tokens,
            temperature=temperature,
            thinking=thinking,
        ) as conversation:
            conversation.run()
    except ServerRefusal as error:
        raise Failure(str(error), 1) from error


@app.command()
def tiny(
    directory: Annotated[Path, typer.Argument(help="Where to write the checkpoint.")],
    arch: Annotated[str, typer.Option(help="glm5_next or kimi_linear.")] = "glm5_next",
    seed: Annotated[int, typer.Option(help="Of the random weights.")] = 0,
) -> None:
    """Write a tiny random checkpoint, with tokenizer and chat template."""
    write = ARCHITECTURES.get(arch)
    if write is None:
        raise Failure(f"--arch: {arch!r} is not one of {', '.join(ARCHITECTURES)}", 2)
    _or_failure(lambda: write(directory, seed))
    console.print(f"wrote {directory}", highlight=False, soft_wrap=True)


@app.command()
def inspect(
    url: Annotated[str, typer.Option(help="A merestone.", envvar="MERESTONE_URL")] = LOCAL,
    kind: Annotated[str | None, typer.Option(help="Only boundaries of this kind.")] = None,
    salt: Annotated[str | None, typer.Option(help="Only those of this cache_salt.")] = None,
    min_tokens: Annotated[int, typer.Option(min=0, help="Only those at least so deep.")] = 0,
    limit: Annotated[int, typer.Option(min=1, help="Checkpoints to show.")] = 1000,
    watch: Annotated[
        float | None, typer.Option(min=0.1, help="Show it again every so many seconds.")
    ] = None,
    api_key: ApiKey = None,
) -> None:
    """Show a server's cache: the tree of its boundaries, with kinds, bytes and hits."""
    given = {"kind": kind, "salt": salt, "min_tokens": min_tokens or None}
    query = {name: value for name, value in given.items() if value is not None}
    try:
        inspect_cache(console, url, api_key, query=query, limit=limit, every_s=watch)
    except ServerRefusal as error:
        raise Failure(str(error), 1) from error


app.command()(probe)


def main() -> None:
    """The entry point: every error is one line."""
    try:
        code = app(standalone_mode=False)
    except Failure as failure:
        message, code = str(failure), failure.code
    except (KeyboardInterrupt, typer.Abort):
        message, code = "interrupted", 130
    except Exception as error:
        # a usage error is click's, which some versions of typer carry inside: ask for its method
        describe = getattr(error, "format_message", None)
        if describe is None:
            raise
        message, code = describe(), 2
    else:
        sys.exit(code or 0)
    if message:  # without a command there is the help, and no message
        print("merestone: error:", " ".join(message.split()), file=sys.stderr)
    sys.exit(code)
