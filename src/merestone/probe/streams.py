"""Prompts: token ids and texts from fixed pseudo-random streams."""

from __future__ import annotations

import random

OPEN_CASE = (785, 3974, 13867, 38627, 34041, 916, 279, 15666, 5562, 13)
"""The periodic prompt of the case that was left open."""

_WORDS = ("amber", "birch", "cairn", "delta", "ember", "fjord", "grove", "haven", "inlet", "larch")


def stream(length: int, number: int, *, vocab: int, seed: int = 0) -> list[int]:
    """``T(length, number)``: a longer one of the same number begins with the shorter one, and
    those of different numbers below ``vocab`` share no first token."""
    assert 0 <= number < vocab, f"stream {number} of a vocabulary of {vocab}"
    draw = random.Random(f"{seed}/{number}")
    rest = [draw.randrange(vocab) for _ in range(length - 1)]
    return [(number + seed) % vocab, *rest][:length]


def periodic(length: int, *, vocab: int, offset: int = 0) -> list[int]:
    """``length`` tokens of the open case's pattern, from its place ``offset`` on."""
    return [OPEN_CASE[(offset + at) % len(OPEN_CASE)] % vocab for at in range(length)]


def text(length: int, number: int, *, seed: int = 0) -> str:
    """``length`` ASCII characters of words; different numbers differ in the first few."""
    draw = random.Random(f"{seed}/text/{number}")
    words = [f"{number}"]
    while sum(map(len, words)) + len(words) < length + 1:
        words.append(draw.choice(_WORDS))
    return " ".join(words)[:length]
