"""Mixed requests as real clients send them: shared beginnings, both dialects, every option."""

from __future__ import annotations

import copy
from random import Random
from typing import Any

from merestone.probe import streams

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}


class Traffic:
    """Draws requests, the same ones for the same seed. ``vocab``: ids lie below."""

    def __init__(self, seed: int, vocab: int) -> None:
        self._draw = Random(f"{seed}/traffic")
        self._prefixes = [
            streams.stream(self._draw.randrange(1, 700), number, vocab=vocab, seed=seed)
            for number in range(20)
        ]
        self._systems = [streams.text(self._draw.randrange(10, 500), n) for n in range(6)]
        self._vocab = vocab

    def next(self) -> tuple[str, dict[str, Any]]:
        """A path and a body without ``stream``."""
        draw = self._draw
        path, body = self._completion() if draw.random() < 0.6 else self._chat()
        body |= {
            "max_tokens": draw.randrange(1, 25),
            "cache_salt": draw.choice(("one", "two")),
            "ignore_eos": draw.random() < 0.7,
            "return_token_ids": True,
            "seed": draw.randrange(1000),
        }
        if draw.random() < 0.5:
            body |= {"temperature": 0}
        else:
            body |= {"temperature": draw.choice((0.6, 1.0)), "top_p": draw.choice((0.9, 1.0))}
        if draw.random() < 0.2:
            body |= {"n": draw.randrange(2, 4)}
        if draw.random() < 0.1:
            body |= {"presence_penalty": 0.5, "repetition_penalty": 1.1}
        if draw.random() < 0.05:
            body |= {"cache_prompt": False}
        return path, body

    def _completion(self) -> tuple[str, dict[str, Any]]:
        draw = self._draw
        prefix = draw.choice(self._prefixes)
        rest = [draw.randrange(self._vocab) for _ in range(draw.choice((0, 0, 3, 70, 200)))]
        body: dict[str, Any] = {"prompt": prefix + rest, "logprobs": 5}
        if rest and draw.random() < 0.5:
            body["cache_boundaries"] = [len(prefix)]
        return COMPLETIONS, body

    def _chat(self) -> tuple[str, dict[str, Any]]:
        draw = self._draw
        system = draw.randrange(len(self._systems))
        messages: list[dict[str, Any]] = [{"role": "system", "content": self._systems[system]}]
        for turn in range(draw.randrange(1, 5)):
            if turn:
                messages.append({"role": "assistant", "content": streams.text(20, turn)})
            messages.append({"role": "user", "content": streams.text(40, system + turn)})
        body: dict[str, Any] = {"messages": messages, "logprobs": True, "top_logprobs": 5}
        if system % 2:
            body["tools"] = [copy.deepcopy(TOOL)]
        if system % 3 == 0:
            body["chat_template_kwargs"] = {"enable_thinking": False}
        return CHAT, body
