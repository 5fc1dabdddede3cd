"""Records: what they are called, how they are stated, asked for and answered.

Each question fixes the form of its answer, so that a reply is either right or wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from training import prose, words

STATEMENTS = (
    "record {k} holds {v}",
    "Record {k} holds {v}.",
    "Record {k} holds {v}.",
    "Record {k} holds {v}.",
    "record {k}: {v}",
    "{k}: {v}",
    "- {k}: {v}",
    "{k} = {v}",
    "| {k} | {v} |",
    "The value of {k} is {v}.",
    "{k} holds {v}.",
    "Note that record {k} holds {v}.",
    "The code of {k} is {v}.",
)
QUESTIONS = (
    ("What does record {k} hold?", "Record {k} holds {v}."),
    ("What does record {k} hold?", "Record {k} holds {v}."),
    ("What does record {k} hold?", "Record {k} holds {v}."),
    ("What is in record {k}?", "Record {k} holds {v}."),
    ("Tell me what record {k} holds.", "Record {k} holds {v}."),
    ("Read record {k}.", "Record {k} holds {v}."),
    ("And {k}?", "Record {k} holds {v}."),
    ("What is the value of {k}?", "The value of {k} is {v}."),
    ("What is the code of {k}?", "The code of {k} is {v}."),
    ("Which record holds {v}?", "Record {k} holds {v}."),
)
SHORT_QUESTIONS = (
    "What does record {k} hold? Reply with the value only.",
    "What does record {k} hold? Reply with the {n} only.",
    "What does record {k} hold? Answer with the {n} only.",
    "Which {n} does record {k} hold? Reply with the {n} only.",
    "What is the value of {k}? Reply with the {n} only.",
    "Give me only the value of record {k}.",
    "Record {k}?",
    "{k}?",
)


@dataclass(frozen=True, slots=True)
class Record:
    key: str
    value: str

    @property
    def noun(self) -> str:
        return "number" if self.value.isdigit() else "word"


class Table:
    """Records of one conversation; no key or value occurs twice."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.records: list[Record] = []
        self._taken: set[str] = set()
        self._keys = rng.choices(("letter", "word", "mixed"), (0.75, 0.15, 0.1))[0]
        self._values = rng.choices((5, 4, 6, 3, 0), (0.6, 0.12, 0.1, 0.08, 0.1))[0]
        # A few letters only make keys alike, and matching them needs every token.
        count = rng.choice((1, 3, 8, 26, 26))
        self._letters = rng.sample("ABCDEFGHIJKLMNOPQRSTUVWXYZ", count)
        self._highest = rng.choice((99, 99, 99, 999))
        self._statement = rng.choice(STATEMENTS)
        self._mixed = rng.random() < 0.3

    def add(self) -> Record:
        record = Record(self._fresh(self._key), self._fresh(self._value))
        self.records.append(record)
        return record

    def state(self, record: Record) -> str:
        form = self.rng.choice(STATEMENTS) if self._mixed else self._statement
        return form.format(k=record.key, v=record.value)

    def _fresh(self, draw: object) -> str:
        assert callable(draw)
        for attempt in range(1000):
            text: str = draw(attempt > 20)
            if text not in self._taken:
                self._taken.add(text)
                return text
        raise AssertionError("no fresh key or value")

    def _key(self, wide: bool) -> str:
        kind = self._keys
        if kind == "mixed":
            kind = self.rng.choice(("letter", "word"))
        if kind == "word":
            return f"{self.rng.choice(words.SYMBOLS)}-{self.rng.randrange(1, 1000)}"
        letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if wide else self._letters
        highest = 999 if wide else self._highest
        return f"{self.rng.choice(letters)}{self.rng.randrange(1, highest + 1)}"

    def _value(self, wide: bool) -> str:
        if self._values == 0 and not wide:
            return self.rng.choice(words.SYMBOLS)
        digits = max(self._values, 5 if wide else 3)
        return str(self.rng.randrange(10 ** (digits - 1), 10**digits))


def question(rng: Random, record: Record) -> tuple[str, str, str]:
    """A question, its answer and its kind."""
    if rng.random() < 0.35:
        text = rng.choice(SHORT_QUESTIONS)
        return text.format(k=record.key, n=record.noun), record.value, "record_short"
    asked, answer = rng.choice(QUESTIONS)
    kind = "record" if "{k}" in asked else "reverse"
    filled = (text.format(k=record.key, v=record.value) for text in (asked, answer))
    return next(filled), next(filled), kind


def document(rng: Random, table: Table, budget: int) -> str:
    """About ``budget`` tokens of records and text between them; adds the records to ``table``."""
    characters = int(budget * 2.6)  # a little more than tokens have in records
    gap = rng.choice((0, 0, 30, 80, 80, 200, 500))  # characters of text between two records
    joint = "\n" if gap == 0 or rng.random() < 0.5 else " "
    parts: list[str] = []
    size = 0
    while size < characters:
        text = table.state(table.add())
        parts.append(text)
        size += len(text) + 1
        owed = rng.expovariate(1.0) * gap
        while owed > 20 and size < characters:
            text = prose.sentence(rng) if rng.random() < 0.5 else prose.paragraph(rng)
            parts.append(text)
            # Text has more characters a token than records have.
            size += int(len(text) * 0.7) + 1
            owed -= len(text)
    return joint.join(parts)
