"""The seam between the server and the engine: requests in, events out.

Knows what a request asks for and what is reported back, in plain integers and text. Must not know
HTTP, templates or tensors. The server is written and tested against this file alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from msgspec import Struct

from merestone.sched.plan import SamplingParams, TokenLogprob

Stats = Mapping[str, float | Mapping[str, float]]
"""Counters and gauges by name; a counter by kind or reason is a mapping from label to count.
``serve/metrics.py`` lists the names that have a documented metric."""


class TextStream(Protocol):
    """The text of one choice. The server supplies it; the engine calls it, in token order."""

    def push(self, token: int) -> tuple[str, bool]:
        """Take the next token of the choice, the last one included.

        Returns the text that this token releases, and whether a stop string was met: the text
        released then ends before it, and no further token may be pushed.
        """
        ...

    def flush(self) -> str:
        """The text still held back. Called once, after the last token."""
        ...

    @property
    def matched(self) -> str | None:
        """The stop string that was met."""
        ...


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One prompt and how to continue it, ``n`` times.

    ``max_tokens`` 0 computes (or restores) the prompt alone and finishes with "length"; None means
    up to the context limit. ``boundaries`` are (token count, kind) with kind "instruction",
    "message", "tool", "turn" or "mark", ascending, each inside the prompt; ``ends`` are (token id,
    kind): a boundary lies behind each such token of an answer. ``lives`` are (token count,
    seconds): after its last use, eviction spares the boundary there for that long.
    ``salt`` separates caches. Without ``cache`` nothing is looked up and nothing is kept.
    ``stop_ids`` end a choice and are its last token. ``prompt_logprobs`` asks for the log
    probabilities of the prompt's tokens with that many alternatives. ``text`` makes one stream a
    choice. A lower ``priority`` runs first.
    """

    id: str
    tokens: tuple[int, ...]
    params: SamplingParams
    max_tokens: int | None
    n: int = 1
    boundaries: tuple[tuple[int, str], ...] = ()
    ends: tuple[tuple[int, str], ...] = ()
    lives: tuple[tuple[int, float], ...] = ()
    salt: str = ""
    cache: bool = True
    priority: int = 0
    stop_ids: tuple[int, ...] = ()
    prompt_logprobs: int | None = None
    text: Callable[[], TextStream] | None = None


@dataclass(frozen=True, slots=True)
class CacheReport:
    """What the cache did for a choice, in tokens of its prompt.

    ``matched`` is the longest prefix that the cache knows or remembers, ``restored`` what was
    resumed from, at a boundary of ``kind`` (None: nothing). ``lost`` says why restored < matched,
    or why nothing matched; it is empty when nothing was lost. ``written``: how many tokens beyond
    the restored ones the next request can resume from, at a boundary of this prompt. None of these
    depends on what others asked; ``elsewhere`` says that another salt knows more of the prompt.
    """

    matched: int = 0
    restored: int = 0
    kind: str | None = None
    lost: str = ""
    written: int = 0
    elsewhere: bool = False


@dataclass(frozen=True, slots=True)
class DraftReport:
    """What became of a choice's drafts: ``steps`` verified some; ``drafted`` and ``accepted``
    count them by their place behind the newest token."""

    steps: int = 0
    drafted: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds since the request was submitted. A choice without a token has no first one."""

    queued_s: float
    first_token_s: float | None
    total_s: float


@dataclass(frozen=True, slots=True)
class Started:
    """The first event of a choice: its prompt is being restored or computed."""

    choice: int
    cache: CacheReport


class TokenEvent(Struct, frozen=True):
    """One token, the text that it released, and its log probability if asked for."""

    choice: int
    token: int
    text: str
    logprob: TokenLogprob | None


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of a choice.

    ``reason`` is "stop", "length", "abort" or "error"; ``stop`` the token id or the string that
    stopped it (None for other reasons). ``text`` is the rest of its text. ``prompt_logprobs`` of
    choice 0 has an entry for every prompt token, None for the first; other choices have none.
    ``drafts`` is None where no draft was verified.
    """

    choice: int
    reason: str
    stop: int | str | None
    text: str
    cache: CacheReport
    prompt_tokens: int
    completion_tokens: int
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None
    timing: Timing
    error: str | None = None
    drafts: DraftReport | None = None


Event = Started | TokenEvent | Finished
Sink = Callable[[list[Event]], None]


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a server tells its users of the engine. Lengths in tokens.

    ``pages`` are the (group, tokens) of the page sizes. ``retention`` names what is kept, and
    ``retention_reason`` says why when that is not what was asked for. ``speculation`` is what
    ``--speculate`` said, and with which acceptance if not the exact one.
    """

    model: str
    context_limit: int
    vocab_size: int
    eos_ids: tuple[int, ...]
    retention: str
    retention_reason: str = ""
    speculation: str = "none"
    smallest_reusable: int = 1
    pages: tuple[tuple[str, int], ...] = ()
    dtype: str = ""
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class CacheQuery:
    """Which checkpoints to list: of one kind, of one salt, of at least some tokens, with an id
    above ``after``; at most ``limit``. ``token_ids`` lists those too."""

    kind: str | None = None
    salt: str | None = None
    min_tokens: int = 0
    after: int = 0
    limit: int = 1000
    token_ids: bool = False


@dataclass(frozen=True, slots=True)
class CachePage:
    """The first ``entries``, by id, of published checkpoints that a query asks for; ``more`` says
    whether there are others behind them."""

    entries: list[dict[str, object]]
    more: bool


STOPPED = "engine_stopped"
"""The code of a refusal that is no fault of the request's: the engine takes none any more."""


class EngineRefusal(ValueError):
    """The request can never run, whatever else runs: it is too long for the context or the pool.

    ``code`` is a stable word for programs, the message carries the numbers.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class CacheBusy(RuntimeError):
    """The cache cannot be emptied now: running requests hold parts of it."""


class Engine(Protocol):
    """An engine, seen from the server."""

    info: EngineInfo

    def submit(self, request: GenerateRequest, sink: Sink) -> None:
        """Queue a request. Any thread may call. ``sink`` receives the events of a step, in order,
        on the engine's thread, and must not block.

        Raises:
            EngineRefusal: the request can never run.
        """
        ...

    def abort(self, request_id: str) -> None:
        """End a request at once; its open choices finish with "abort". Any thread may call; an
        unknown or finished id is nothing."""
        ...

    def cache_view(self, query: CacheQuery) -> CachePage:
        """The checkpoints: id, parent, root, kind, tokens, bytes, age_steps, age_s, spared_s, hits,
        leases, token_ids."""
        ...

    def reset_cache(self) -> int:
        """Drop every checkpoint and return how many there were.

        Raises:
            CacheBusy: nothing was dropped, or not everything could be.
        """
        ...

    def health(self) -> dict[str, object]:
        """``status`` is "ok" while requests are served; anything else is a failure, and the other
        entries say why."""
        ...

    def stats(self) -> Stats:
        """Counters and gauges, consistent at one step."""
        ...

    def start(self) -> None:
        """Begin to serve: starts the engine's thread."""
        ...

    def stop(self) -> None:
        """End every request with "abort" and join the engine's thread."""
        ...
