"""A conversation under construction, as token ids in the GLM format.

Knows the format's control tokens and which tokens a model should learn. Must not know what is
talked about (`scenes`). Control tokens cut a text before it is tokenised, so messages may be
tokenised one by one: the ids are those of the whole text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

Tool = Mapping[str, object]

THINKING = ("plain", "none", "kept", "cleared")
"""How replies think: not at all; not at all, after an empty block that the prompt already holds;
always; always, but only the last thought is still in the prompt."""


@dataclass(frozen=True, slots=True)
class Span:
    """A reply: tokens [start, end) after its header, and what it shows. ``depth`` is the place of
    the fact that it needs, as a share of the tokens before the reply; -1 without such a fact."""

    kind: str
    start: int
    end: int
    depth: float = -1.0


@lru_cache(maxsize=1)
def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of ``path``, read once a process."""
    return Tokenizer.from_file(str(path))


@dataclass(slots=True)
class Dialogue:
    """Appends messages until ``limit`` tokens are reached; the row is cut there.

    ``thinking`` is one of `THINKING`.
    """

    tokenizer: Tokenizer
    limit: int
    thinking: str = "plain"
    ids: list[int] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._control("[gMASK]")
        self._control("<sop>")

    @property
    def full(self) -> bool:
        return len(self.ids) >= self.limit

    @property
    def left(self) -> int:
        """Tokens until the row is full."""
        return self.limit - len(self.ids)

    def tools(self, tools: Sequence[Tool]) -> None:
        """The listing of functions that opens a conversation."""
        self._control("<|system|>")
        self._text(tool_listing(tools))

    def system(self, text: str) -> None:
        self._control("<|system|>")
        self._text(text)

    def user(self, text: str) -> int:
        """Returns the index of the text's first token."""
        self._control("<|user|>")
        start = len(self.ids)
        self._text(text)
        return start

    def result(self, *texts: str) -> None:
        """Results of tools, all in one message."""
        self._control("<|observation|>")
        for text in texts:
            self._text(f"<tool_response>{text}</tool_response>")

    def reply(
        self, text: str, kind: str, *, thought: str = "", fact: int = -1, last: bool = True
    ) -> None:
        """``fact``: index of the token where the needed fact stands. ``last``: whether no user
        message follows that would clear this thought from the prompt."""
        self._control("<|assistant|>")
        if self.thinking == "none" or (self.thinking == "cleared" and not last):
            self._text("<think></think>")
        elif self.thinking != "plain":
            self._text(f"<think>{thought}</think>")
        start = len(self.ids)
        self._text(text)
        depth = fact / start if fact >= 0 else -1.0
        self.spans.append(Span(kind, start, len(self.ids), depth))

    def close(self) -> None:
        self._control("<|endoftext|>")

    def _control(self, name: str) -> None:
        number = self.tokenizer.token_to_id(name)
        assert number is not None, name
        self.ids.append(number)

    def _text(self, text: str) -> None:
        self.ids += self.tokenizer.encode(text, add_special_tokens=False).ids


def tool_listing(tools: Sequence[Tool]) -> str:
    """The system text that the chat template writes for ``tools``."""
    lines = "".join(json.dumps(tool, ensure_ascii=False) + "\n" for tool in tools)
    return (
        f"# Tools\n\nThe functions that you may call, one a line:\n<tools>\n{lines}</tools>\n\n"
        "Write a call as <tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value>"
        "</tool_call>, with one key and value for each argument."
    )


def call_text(name: str, arguments: Mapping[str, object]) -> str:
    """A tool call as a reply writes it."""
    written = "".join(
        f"<arg_key>{key}</arg_key><arg_value>"
        f"{value if isinstance(value, str) else json.dumps(value)}</arg_value>"
        for key, value in arguments.items()
    )
    return f"<tool_call>{name}{written}</tool_call>"


@dataclass(frozen=True, slots=True)
class Weights:
    """What each token counts as a prediction, from the ids alone.

    Replies and the control token that ends them count 1; anything else ``outside``. An empty
    thinking block counts nothing: the prompt holds it.
    """

    assistant: int
    enders: tuple[int, ...]
    think: int
    end_think: int
    outside: float = 0.03

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Weights:
        def number(name: str) -> int:
            found = tokenizer.token_to_id(name)
            assert found is not None, name
            return found

        return cls(
            assistant=number("<|assistant|>"),
            enders=tuple(map(number, ("<|user|>", "<|observation|>", "<|endoftext|>"))),
            think=number("<think>"),
            end_think=number("</think>"),
        )

    def __call__(self, ids: NDArray[np.uint16]) -> NDArray[np.float32]:
        """[B, L + 1] -> [B, L]: the weight of predicting ``ids[:, 1:]``."""
        opens = ids == self.assistant
        ends = np.isin(ids, self.enders)
        # +1 after a reply's header, 0 again after its end: the end itself still counts.
        place = np.arange(ids.shape[1])
        opened = np.maximum.accumulate(np.where(opens, place, -1), axis=1)
        ended = np.maximum.accumulate(np.where(ends, place, -1), axis=1)
        inside = (opened > ended)[:, :-1]
        weights = np.where(inside, 1.0, self.outside).astype(np.float32)
        empty = (ids[:, :-1] == self.think) & (ids[:, 1:] == self.end_think)
        weights[empty] = 0.0
        before = np.zeros_like(empty)
        before[:, :-1] = empty[:, 1:]  # the <think> that opens an empty block
        weights[before] = 0.0
        return weights
