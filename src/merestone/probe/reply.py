"""One answer of a server, taken apart, and the comparison of two.

Knows the shapes of OpenAI's answers and the common extensions for token ids. Must not know how a
request is sent or what is expected of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Position = tuple[float, tuple[tuple[str, float], ...]]
"""One token's log probability, and the best alternatives as sorted (name, log probability)."""


class Unsupported(Exception):
    """The server lacks something that a row needs. Never a pass, and no failure either."""


class Broken(Exception):
    """The server did what no server may do; the row has failed."""


@dataclass(slots=True)
class Reply:
    """An answer. ``None`` means that the server did not say. Times in seconds since the request
    was sent; ``arrivals`` has one for every chunk of a stream that brought tokens."""

    message: dict[str, Any] = field(default_factory=dict)
    tokens: list[int] | None = None
    prompt: list[int] | None = None
    positions: list[Position] | None = None
    prompt_positions: list[Any] | None = None
    prompt_tokens: int | None = None
    hit: int | None = None
    account: dict[str, Any] = field(default_factory=dict)
    finish: str | None = None
    arrivals: list[float] = field(default_factory=list)
    total_s: float = 0.0

    @property
    def ids(self) -> list[int]:
        """The output's token ids.

        Raises:
            Unsupported: the server does not report them.
        """
        if self.tokens is None:
            raise Unsupported("the answer has no token_ids (return_token_ids)")
        return self.tokens

    @property
    def prompt_ids(self) -> list[int]:
        """The rendered prompt's token ids; the same exception."""
        if self.prompt is None:
            raise Unsupported("the answer has no prompt_token_ids (return_token_ids)")
        return self.prompt

    @property
    def cached(self) -> int:
        """C: prompt tokens that came from the cache; the same exception."""
        if self.hit is None:
            raise Unsupported("usage has no prompt_tokens_details.cached_tokens")
        return self.hit

    @property
    def logprobs(self) -> list[Position]:
        """A position for each output token; the same exception."""
        if self.positions is None:
            raise Unsupported("the answer has no log probabilities")
        return self.positions

    @property
    def first_s(self) -> float:
        """Time to the first token; to the whole answer, if it was not streamed."""
        return self.arrivals[0] if self.arrivals else self.total_s


def difference(reply: Reply, oracle: Reply) -> str | None:
    """Where two answers differ, ids first, then the bits of the log probabilities as sent.

    Raises:
        Unsupported: one of them lacks ids or log probabilities.
    """
    for at, (one, other) in enumerate(zip(reply.ids, oracle.ids, strict=False)):
        if one != other:
            return f"token {at} is {one}, not {other}"
    if len(reply.ids) != len(oracle.ids):
        return f"{len(reply.ids)} tokens, not {len(oracle.ids)}"
    for answer in (reply, oracle):
        if len(answer.logprobs) != len(answer.ids):
            what = f"{len(answer.logprobs)} log probabilities for {len(answer.ids)} tokens"
            raise Unsupported(what)
    for at, (mine, theirs) in enumerate(zip(reply.logprobs, oracle.logprobs, strict=True)):
        if mine != theirs:
            return f"logprobs of token {at} differ: {_first_difference(mine, theirs)}"
    return None


def _first_difference(mine: Position, theirs: Position) -> str:
    pairs = zip([mine[0], *mine[1]], [theirs[0], *theirs[1]], strict=False)
    different = next(((a, b) for a, b in pairs if a != b), (mine, theirs))
    return f"{different[0]!r}, not {different[1]!r}"


def shared_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading ids are equal."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while high - low > 1:  # the first ``low`` are equal, the first ``high`` are not
        middle = (low + high) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle)
    return low


def read_usage(reply: Reply, usage: Mapping[str, Any] | None) -> None:
    """Take the counts of a ``usage`` object."""
    if not usage:
        return
    reply.prompt_tokens = usage.get("prompt_tokens", reply.prompt_tokens)
    details = usage.get("prompt_tokens_details") or {}
    if isinstance(hit := details.get("cached_tokens"), int):
        reply.hit = hit
    reply.account = usage.get("merestone") or reply.account


def read_choice(reply: Reply, body: Mapping[str, Any], choice: Mapping[str, Any]) -> None:
    """Take a choice: the only one of an answer, or what one chunk of a stream adds to it."""
    prompt = choice.get("prompt_token_ids") or body.get("prompt_token_ids")
    if prompt is not None:
        reply.prompt = list(prompt)
    if (ids := choice.get("token_ids")) is not None:
        reply.tokens = [*(reply.tokens or []), *ids]
    if (positions := _positions(choice.get("logprobs"))) is not None:
        reply.positions = [*(reply.positions or []), *positions]
    scored = choice.get("prompt_logprobs") or body.get("prompt_logprobs")
    if scored is not None:
        reply.prompt_positions = list(scored)
    reply.finish = choice.get("finish_reason") or reply.finish
    said = choice.get("message") or choice.get("delta") or {"content": choice.get("text")}
    for key in ("content", "reasoning_content", "text"):
        if said.get(key):
            reply.message[key] = reply.message.get(key, "") + said[key]
    for call in said.get("tool_calls") or ():
        _add_call(reply.message.setdefault("tool_calls", []), call)


def _add_call(calls: list[dict[str, Any]], call: Mapping[str, Any]) -> None:
    """A whole call, or a stream's next piece of the arguments of the call of that index."""
    place = call.get("index", len(calls))
    if place < len(calls):
        function = calls[place]["function"]
        function["arguments"] += (call.get("function") or {}).get("arguments") or ""
    else:
        calls.append({"id": call.get("id"), "type": "function", "function": {**call["function"]}})


def brings_tokens(choice: Mapping[str, Any]) -> bool:
    """Whether a chunk's choice holds output."""
    said = choice.get("delta") or choice
    visible = any(said.get(key) for key in ("content", "reasoning_content", "text", "tool_calls"))
    return bool(choice.get("token_ids")) or visible


def _positions(table: Mapping[str, Any] | None) -> list[Position] | None:
    """Both dialects' log probabilities in one form. A number that is not finite is a failure."""
    if not table:
        return None
    if isinstance(content := table.get("content"), list):
        rows = [
            (row["logprob"], [(top["token"], top["logprob"]) for top in row["top_logprobs"]])
            for row in content
        ]
    elif table.get("token_logprobs") is not None:
        tops = table.get("top_logprobs") or [{}] * len(table["token_logprobs"])
        rows = [
            (value, list((top or {}).items()))
            for value, top in zip(table["token_logprobs"], tops, strict=True)
        ]
    else:
        return None
    found: list[Position] = []
    for value, top in rows:
        if value is None or not all(map(math.isfinite, [value, *(v for _, v in top)])):
            raise Broken(f"a log probability is no number: {value!r} among {top!r}")
        found.append((float(value), tuple(sorted((str(k), float(v)) for k, v in top))))
    return found
