"""Tokens to text and back.

Knows byte-level tokenizers (`tokenizer.json`), incremental decoding and stop strings. Must not
know HTTP or chat formats.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, pre_tokenizers


class TextError(ValueError):
    """A tokenizer or a template that cannot be read or used."""


def _byte_of_letter() -> dict[str, int]:
    """The byte that each letter of the byte-level alphabet stands for (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + place): byte for place, byte in enumerate(others)})
    assert set(table) == set(pre_tokenizers.ByteLevel.alphabet())
    return table


def _is_byte_level(decoder: object) -> bool:
    if isinstance(decoder, decoders.ByteLevel):
        return True
    if not isinstance(decoder, decoders.Sequence):
        return False
    steps = json.loads(decoder.__getstate__())["decoders"]
    return [step["type"] for step in steps] == ["ByteLevel"]


class Vocabulary:
    """A byte-level tokenizer: every id has fixed bytes, whatever stands around it.

    ``special`` are the ids that are left out of text; ``size`` is one more than the highest id.
    Safe to share between threads.

    Raises:
        TextError: the tokenizer is not byte-level.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        if not _is_byte_level(tokenizer.decoder):
            name = type(tokenizer.decoder).__name__
            raise TextError(f"tokenizer: decoder {name} is not supported, only ByteLevel is")
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        ids = tokenizer.get_vocab(with_added_tokens=True)
        self.size = max(ids.values(), default=-1) + 1
        self.special = frozenset(token for token, entry in added.items() if entry.special)
        self._bytes: list[bytes | None] = [None] * self.size
        letters = _byte_of_letter()
        for word, token in ids.items():
            if token in added or any(letter not in letters for letter in word):
                self._bytes[token] = word.encode()
            else:
                self._bytes[token] = bytes(letters[letter] for letter in word)

    @classmethod
    def load(cls, directory: Path) -> Vocabulary:
        """Read ``tokenizer.json``.

        Raises:
            TextError: no such file, or not a tokenizer that can be used.
        """
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise TextError(f"{path}: no such file")
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise TextError(f"{path}: {error}") from error
        return cls(tokenizer)

    def encode(self, text: str, add_special: bool = False) -> tuple[int, ...]:
        """Ids of a text; names of special tokens in it become these tokens. ``add_special`` lets
        the tokenizer put its own tokens around the text."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=add_special).ids)

    def id_of(self, word: str) -> int | None:
        """The id of one added or ordinary token by its name."""
        found: int | None = self._tokenizer.token_to_id(word)
        return found

    def bytes_of(self, token: int) -> bytes:
        """The bytes of a token; none for an id without a name (a padded vocabulary)."""
        return (self._bytes[token] or b"") if token < self.size else b""

    def decode(self, tokens: Iterable[int], skip_special: bool = False) -> str:
        """The text of some ids; bytes that are no UTF-8 become U+FFFD."""
        kept = (t for t in tokens if not (skip_special and t in self.special))
        return b"".join(map(self.bytes_of, kept)).decode("utf-8", "replace")

    def label(self, token: int) -> str:
        """A name that no two ids share: the text, or the bytes of a part of a character."""
        if token >= self.size or self._bytes[token] is None:
            return f"token_id:{token}"
        data = self.bytes_of(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class StopStrings:
    """Finds the first stop string to be completed, however the text is cut into pieces.

    One Knuth-Morris-Pratt automaton a string, so a character costs O(1) amortised and the longest
    part-way match says exactly how much text has to be held back.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        assert all(strings), "an empty stop string"
        self._strings = tuple(strings)
        self._fallback = [_fallbacks(string) for string in strings]
        self._state = [0] * len(strings)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Take more text and return what is certainly before any stop string. After a match
        (``matched``) the rest of the text is dropped."""
        assert self.matched is None
        pending = self._held + text
        for place, letter in enumerate(text, start=len(self._held) + 1):
            done = [i for i in range(len(self._strings)) if self._step(i, letter)]
            if done:
                self.matched = max((self._strings[i] for i in done), key=len)
                self._held = ""
                return pending[: place - len(self.matched)]
        cut = len(pending) - max(self._state, default=0)
        self._held = pending[cut:]
        return pending[:cut]

    def flush(self) -> str:
        """The text that was held back."""
        held, self._held = self._held, ""
        return held

    def _step(self, which: int, letter: str) -> bool:
        string, fallback, state = self._strings[which], self._fallback[which], self._state[which]
        while state and string[state] != letter:
            state = fallback[state - 1]
        if string[state] == letter:
            state += 1
        self._state[which] = state
        return state == len(string)


def _fallbacks(string: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(string)
    length = 0
    for place in range(1, len(string)):
        while length and string[place] != string[length]:
            length = table[length - 1]
        if string[place] == string[length]:
            length += 1
        table[place] = length
    return table


class ChoiceText:
    """The text of one choice, a ``TextStream``: whole characters only, stop strings cut off.

    ``hidden`` ids have no text (special tokens, stop tokens). Stop strings count from the token
    after ``min_tokens``. Bytes of an unfinished last character are dropped: they are no text, and
    the ids still hold them.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        stops: Sequence[str] = (),
        hidden: Collection[int] = frozenset(),
        min_tokens: int = 0,
    ) -> None:
        self._vocabulary = vocabulary
        self._stops = StopStrings(stops) if stops else None
        self._hidden = hidden
        self._unchecked = min_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def matched(self) -> str | None:
        """The stop string that was met."""
        return self._stops.matched if self._stops else None

    def push(self, token: int) -> tuple[str, bool]:
        """See ``TextStream.push``."""
        text = ""
        if token not in self._hidden:
            text = self._decoder.decode(self._vocabulary.bytes_of(token))
        if self._unchecked > 0:
            self._unchecked -= 1
            return text, False
        if self._stops is None:
            return text, False
        text = self._stops.push(text)
        return text, self._stops.matched is not None

    def flush(self) -> str:
        """See ``TextStream.flush``."""
        return self._stops.flush() if self._stops else ""
