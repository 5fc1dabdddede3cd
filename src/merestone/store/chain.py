"""Chains: digests of a sequence's prefixes, from which everything stored takes its address.

Knows token ids, roots and one configuration's identity. Must not know frames, files or bytes.
Within one configuration the bits of every row follow from the tokens up to it, so an address made
of those tokens names the content before it exists: what is stored already is never written again.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import NamedTuple

import msgspec
import numpy as np

from merestone.core.cache import CacheSpec
from merestone.core.checkpoint import Checkpoint, Root
from merestone.core.index import Tokens
from merestone.core.orders import Segment

DIGEST = 16
"""Bytes of an address. Salts are part of what is hashed, so nobody meets another's addresses."""
ANCHOR, HIDDEN = "anchor", "hidden"


class Chain:
    """Digests of the prefixes of ``tokens`` [n], int32, under ``root`` and ``identity``.

    Built at once (every ``chunk`` tokens a hash state is kept), so any thread may then ask.
    """

    def __init__(self, identity: str, root: Root, tokens: Tokens, chunk: int) -> None:
        self.size = tokens.size
        self.chunk = chunk
        # A copy: the buffer of a running request moves on.
        self._tokens = np.array(tokens, "<i4")
        seed = msgspec.msgpack.encode((identity, root))
        self._states = [blake2b(seed, digest_size=DIGEST)]
        for start in range(0, self.size // chunk * chunk, chunk):
            state = self._states[-1].copy()
            state.update(self._tokens[start : start + chunk].data)
            self._states.append(state)

    def at(self, count: int) -> str:
        """The address of the first ``count`` tokens."""
        whole, rest = divmod(count, self.chunk)
        state = self._states[whole]
        if rest:
            state = state.copy()
            state.update(self._tokens[count - rest : count].data)
        return state.hexdigest()


class Part(NamedTuple):
    """One part of a checkpoint: ``name`` is a group, "anchor" or "hidden"; ``number`` that of the
    page or of the anchor's frame; tokens [first, last) of a page; its content follows from the
    first ``tokens`` tokens."""

    name: str
    number: int
    first: int
    last: int
    tokens: int

    def address(self, chain: Chain) -> str:
        text = f"{self.name} {self.number} {self.first} {self.last} {chain.at(self.tokens)}"
        return blake2b(text.encode(), digest_size=DIGEST).hexdigest()


def parts_of(spec: CacheSpec, at: int, anchor: int) -> list[Part]:
    """What a checkpoint at ``at`` tokens with its anchor at ``anchor`` consists of, in the order
    of every manifest.

    A window's first page counts from the window's first row on: what lies below was perhaps
    never written, and would give one address two contents.
    """
    parts = []
    for group in spec.groups:
        low, high = group.rows(at, anchor)
        for number in range(*group.pages(low, high)):
            begin = number * group.span
            first, last = max(low - begin, 0), min(high - begin, group.span)
            parts.append(Part(group.name, number, first, last, begin + last + group.lag))
    if anchor:
        parts += [Part(ANCHOR, number, 0, 0, anchor) for number in range(spec.anchor_frames)]
    return [*parts, Part(HIDDEN, 0, 0, 0, at)]


def place(part: Part, address: str, checkpoint: Checkpoint) -> Segment:
    """Where ``part`` of ``checkpoint`` lies."""
    if part.name == HIDDEN:
        frame, row = checkpoint.hidden
        return Segment(address, HIDDEN, frame, row, 0)
    if part.name == ANCHOR:
        frame = checkpoint.anchor_frames[part.number]
        return Segment(address, ANCHOR, frame, part.number, 0)
    first, frames = checkpoint.pages[part.name]
    return Segment(address, part.name, int(frames[part.number - first]), part.first, part.last)
