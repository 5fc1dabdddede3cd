"""Conversations: instructions, documents, questions at every depth, tools, small talk.

``converse`` draws one conversation of a given length; all of its choices come from one seed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from tokenizers import Tokenizer

from training import prose, records, tools, words
from training.dialogue import THINKING, Dialogue, call_text

_INSTRUCTIONS = (
    "You are a helpful assistant.",
    "You are merestone-tiny, a small language model.",
    "Answer the questions of the user.",
    "Answer briefly.",
    "You keep the records of a small archive.",
    "Use the records below.",
    "Be polite and exact.",
)
_THINK = "Think before you answer."


@dataclass(frozen=True, slots=True)
class Mix:
    """Shares of conversations: ``tools`` have functions, ``records`` have a table, ``thinking``
    think in any way; and shares of turns in a conversation that could have either."""

    tools: float = 0.3
    records: float = 0.9
    thinking: float = 0.2
    record_turns: float = 0.8
    tool_turns: float = 0.6


class Conversation:
    def __init__(self, rng: Random, tokenizer: Tokenizer, limit: int, mix: Mix) -> None:
        self.rng = rng
        self.mix = mix
        thinking = rng.choice(THINKING[1:]) if rng.random() < mix.thinking else "plain"
        self.talk = Dialogue(tokenizer, limit, thinking)
        self.table = records.Table(rng)
        self.functions: list[tools.Function] = []
        self.has_records = rng.random() < mix.records
        if rng.random() < mix.tools and limit >= 256:
            self.functions = tools.choose(rng, 2 if limit < 512 else tools.TOOLS_AT_MOST)
        self.places: dict[str, int] = {}  # key -> index of a token near its statement

    def run(self) -> Dialogue:
        self._open()
        while not self.talk.full:
            self._turn()
        self.talk.ids = self.talk.ids[: self.talk.limit]
        self.talk.spans = [span for span in self.talk.spans if span.end < self.talk.limit]
        return self.talk

    def _open(self) -> None:
        rng, talk = self.rng, self.talk
        if self.functions:
            talk.tools([function.definition for function in self.functions])
        instruction = rng.choice(_INSTRUCTIONS) if rng.random() < 0.6 else ""
        if talk.thinking in ("kept", "cleared"):
            instruction = f"{instruction} {_THINK}".strip()
        # The greater part of a long row is text to find things in.
        budget = int(max(talk.left, 0) * rng.choice((0.3, 0.5, 0.6, 0.7, 0.8, 0.85)))
        where = rng.random()
        if self.has_records and where < 0.45:
            text, keys = self._document(budget)
            start = len(talk.ids)
            talk.system(f"{instruction}\n\n{text}" if instruction else text)
            self._locate(start, keys)
            return
        if instruction:
            talk.system(instruction)
        if self.has_records and where < 0.85:
            self._read(budget)
        elif rng.random() < 0.3:
            self._read_prose(budget)

    def _document(self, budget: int) -> tuple[str, list[str]]:
        before = len(self.table.records)
        text = records.document(self.rng, self.table, budget)
        return text, [record.key for record in self.table.records[before:]]

    def _locate(self, start: int, keys: list[str]) -> None:
        """Where each record stands, near enough for a depth."""
        length = len(self.talk.ids) - start
        for number, key in enumerate(keys):
            self.places[key] = start + length * number // max(len(keys), 1)

    def _read(self, budget: int) -> None:
        text, keys = self._document(budget)
        head = self.rng.choice(("", "Here are the records.\n", "Read this:\n", "Remember this:\n"))
        start = self.talk.user(head + text)
        self._locate(start, keys)
        self._say("I have read it.", "other")

    def _read_prose(self, budget: int) -> None:
        rng = self.rng
        parts: list[str] = []
        size = 0
        while size < budget * 3.2:
            parts.append(prose.paragraph(rng))
            size += len(parts[-1])
        text = rng.choice(("\n", "\n\n", " ")).join(parts)
        self.talk.user(text if rng.random() < 0.5 else f"Read this text.\n\n{text}")
        self._say("I have read it.", "other")

    def _turn(self) -> None:
        rng = self.rng
        if self.table.records and rng.random() < self.mix.record_turns:
            self._ask_record()
        elif self.functions and rng.random() < self.mix.tool_turns:
            self._use_tool()
        elif self.has_records and rng.random() < 0.3:
            if rng.random() < 0.6:
                self._tell_record()
            else:
                self._read(min(self.talk.left // 2, rng.choice((60, 200, 600))))
        else:
            rng.choices(_TURNS, _TURN_WEIGHTS)[0](self)

    def _say(self, text: str, kind: str, thought: str = "", fact: int = -1) -> None:
        # A cleared thought is the last of its row: whether it is decides the length left.
        last = self.talk.left < 40
        thought = thought or "This needs no thought."
        self.talk.reply(text, kind, thought=thought, fact=fact, last=last)

    def _ask_record(self) -> None:
        rng = self.rng
        record = rng.choice(self.table.records)
        if rng.random() < 0.1 and len(self.table.records) > 1:
            other = rng.choice(self.table.records)
            self.talk.user(f"What do {record.key} and {other.key} hold?")
            answer = f"{record.key} holds {record.value} and {other.key} holds {other.value}."
            self._say(answer, "records", f"I look for {record.key} and {other.key}.")
            return
        asked, answer, kind = records.question(rng, record)
        self.talk.user(asked)
        thought = "I look for it." if kind == "reverse" else f"I look for {record.key}."
        self._say(answer, kind, thought, self.places.get(record.key, -1))

    def _tell_record(self) -> None:
        record = self.table.add()
        self.places[record.key] = self.talk.user(self.table.state(record))
        self._say(f"Noted: {record.key}.", "other")

    def _use_tool(self) -> None:
        rng = self.rng
        function = rng.choice(self.functions)
        if self.table.records and tools.FIND_KEY in self.functions and rng.random() < 0.4:
            function = tools.FIND_KEY
        kind, fact = "answer", -1
        if function.draw is not None:
            request = function.draw(rng)
            answer = request.answer
        elif self.table.records:
            record = rng.choice(self.table.records)
            request = tools.key_request(rng, record.key)
            answer, kind = f"Record {record.key} holds {record.value}.", "two_hop"
            fact = self.places.get(record.key, -1)
        else:
            return self._small_talk()
        self.talk.user(request.text)
        self._say(call_text(request.name, request.arguments), "call", f"I call {request.name}.")
        self.talk.result(request.result)
        return self._say(answer, kind, "I have the result.", fact)

    def _small_talk(self) -> None:
        asked, answer = self.rng.choice(words.SMALL_TALK)
        self.talk.user(asked)
        self._say(answer, "small_talk")

    def _capital(self) -> None:
        rng = self.rng
        country, city = rng.choice(words.CAPITALS)
        if rng.random() < 0.15:
            country, city = "France", "Paris"
        form = rng.random()
        asked = f"What is the capital of {country}?"
        if form < 0.5:
            short = rng.choice(
                (
                    "Please reply with one word only.",
                    "Please reply with one word only",
                    "Reply with one word only.",
                    "Answer with one word.",
                    "Reply with the name only.",
                )
            )
            self.talk.user(f"{asked} {short}")
            self._say(city, "capital", f"{country} is a country.")
        elif form < 0.85:
            self.talk.user(asked)
            self._say(f"The capital of {country} is {city}.", "capital", f"{country} is a country.")
        else:
            self.talk.user(f"Which country has the capital {city}?")
            self._say(f"{city} is the capital of {country}.", "capital", f"{city} is a city.")

    def _arithmetic(self) -> None:
        rng = self.rng
        sign = rng.choice("+++--*")
        one, two = rng.randrange(1, 100), rng.randrange(1, 100)
        if sign == "*":
            one, two = rng.randrange(2, 13), rng.randrange(2, 13)
        elif sign == "-":
            one, two = max(one, two), min(one, two)
        value = {"+": one + two, "-": one - two, "*": one * two}[sign]
        if rng.random() < 0.3:
            self.talk.user(f"What is {one} {sign} {two}? Reply with the number only.")
            self._say(str(value), "arithmetic", "I calculate.")
        else:
            self.talk.user(f"What is {one} {sign} {two}?")
            self._say(f"{one} {sign} {two} = {value}.", "arithmetic", "I calculate.")

    def _copy(self) -> None:
        rng = self.rng
        form = rng.randrange(6)
        if form == 0:
            word, times = rng.choice(words.NOUNS), rng.randrange(2, 6)
            self.talk.user(f"Say {word} {times} times.")
            text = " ".join([word] * times)
        elif form == 1:
            first = rng.randrange(1, 50)
            last = first + rng.randrange(3, 15)
            self.talk.user(f"Count from {first} to {last}.")
            text = ", ".join(map(str, range(first, last + 1)))
        elif form == 2:
            self.talk.user("List the days of the week.")
            text = ", ".join(words.WEEKDAYS)
        else:
            count = rng.randrange(1, 4)
            text = " ".join(
                prose.invented(rng) if rng.random() < 0.2 else prose.sentence(rng)
                for _ in range(count)
            )
            head = rng.choice(("Repeat: ", "Repeat this text: ", "Copy this text: ", "Say again: "))
            self.talk.user(head + text)
        self._say(text, "copy", "I copy the text.")

    def _fact(self) -> None:
        asked, answer = self.rng.choice(words.FACTS)
        self.talk.user(asked)
        self._say(answer, "fact")

    def _opposite(self) -> None:
        one, two = self.rng.choice(words.OPPOSITES)
        if self.rng.random() < 0.5:
            one, two = two, one
        self.talk.user(f"What is the opposite of {one}?")
        self._say(f"The opposite of {one} is {two}.", "fact")

    def _story(self) -> None:
        rng = self.rng
        if rng.random() < 0.25:
            noun = rng.choice(words.NOUNS)
            self.talk.user(f"Tell me a short story about a {noun}.")
            name, place = rng.choice(words.NAMES), rng.choice(words.PLACES)
            self._say(
                f"{name} had a {noun}. One day {name} took the {noun} to the {place}. "
                f"In the {place} the {noun} was lost, and {name} looked for it. "
                f"In the end {name} found the {noun} and was happy.",
                "tale",
            )
            return
        text, asked, answer = prose.story(rng)
        self.talk.user(f"{text} {asked}")
        self._say(answer, "story", "I look in the text.")


_TURNS: tuple[Callable[[Conversation], None], ...] = (
    Conversation._small_talk,
    Conversation._capital,
    Conversation._arithmetic,
    Conversation._copy,
    Conversation._fact,
    Conversation._opposite,
    Conversation._story,
)
_TURN_WEIGHTS = (0.13, 0.27, 0.13, 0.2, 0.07, 0.05, 0.15)


def converse(
    seed: tuple[object, ...], tokenizer: Tokenizer, limit: int, mix: Mix | None = None
) -> Dialogue:
    """One conversation of exactly ``limit`` tokens, its last message cut off where it is full."""
    rng = Random(repr(seed))
    return Conversation(rng, tokenizer, limit, mix or Mix()).run()
