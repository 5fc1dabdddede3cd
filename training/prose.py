"""Text to read over: simple English by grammar, documentation of Python, invented words.

The grammar's sentences carry no facts that a question asks for, unless they come from ``story``.
"""

from __future__ import annotations

import ast
import sysconfig
from functools import cache
from pathlib import Path
from random import Random

from training import words

# Modules whose docstrings are prose rather than tables. Python's documentation strings are under
# the PSF licence.
_MODULES = (
    "abc", "argparse", "ast", "asyncio/base_events", "asyncio/queues", "asyncio/tasks", "bisect",
    "calendar", "cmd", "codecs", "collections/__init__", "concurrent/futures/_base", "configparser",
    "contextlib", "copy", "csv", "dataclasses", "datetime", "decimal", "difflib", "doctest",
    "email/message", "enum", "fileinput", "fractions", "functools", "gettext", "glob", "gzip",
    "heapq", "http/client", "http/server", "inspect", "ipaddress", "json/__init__", "locale",
    "logging/__init__", "logging/handlers", "mailbox", "multiprocessing/pool", "numbers",
    "optparse", "os", "pathlib", "pdb", "pickle", "platform", "pprint", "queue", "random", "sched",
    "selectors", "shelve", "shutil", "smtplib", "socket", "socketserver", "statistics", "string",
    "subprocess", "tarfile", "tempfile", "textwrap", "threading", "timeit", "tokenize", "trace",
    "traceback", "turtle", "typing", "unittest/case", "unittest/mock", "urllib/parse",
    "urllib/request", "uuid",
    "warnings", "weakref", "xml/etree/ElementTree", "zipfile", "zipfile/__init__",
)  # fmt: skip


@cache
def documentation() -> tuple[str, ...]:
    """Paragraphs of the running Python's docstrings, 60 to 800 characters each."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found: dict[str, None] = {}
    for module in _MODULES:
        path = root / f"{module}.py"
        if not path.exists():
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                for paragraph in (ast.get_docstring(node) or "").split("\n\n"):
                    if 60 <= len(paragraph) <= 800 and paragraph.isascii():
                        found[paragraph.strip()] = None
    return tuple(found)


def sentence(rng: Random) -> str:
    """One sentence of simple English."""
    pick = rng.choice
    form = rng.randrange(10)
    adjective, noun, other = pick(words.ADJECTIVES), pick(words.NOUNS), pick(words.NOUNS)
    name, place, verb = pick(words.NAMES), pick(words.PLACES), pick(words.VERBS)
    if form == 0:
        return f"The {adjective} {noun} was near the {place}."
    if form == 1:
        return f"{name} {verb} the {adjective} {noun} and the {other}."
    if form == 2:
        return f"On {pick(words.WEEKDAYS)} {name} {verb} a {noun} in the {place}."
    if form == 3:
        return f"There is a {adjective} {noun} in the {place}, next to the {other}."
    if form == 4:
        return f"Nobody in the {place} {verb} the {noun}."
    if form == 5:
        return f"It was a {adjective} day, and {name} {verb} the {noun}."
    if form == 6:
        return f"{name} and {pick(words.NAMES)} walked to the {place}."
    if form == 7:
        return f"Why is the {noun} so {adjective}?"
    if form == 8:
        return f"In the {place} the {noun} is {adjective}, but the {other} is not."
    return f'"The {noun} is {adjective}," said {name}.'


def invented(rng: Random) -> str:
    """A sentence of words that do not exist, so that unknown text is nothing new."""
    count = rng.randrange(5, 14)
    text = " ".join(
        "".join(rng.choice("bcdfghklmnprstvwz") + rng.choice("aeiou") for _ in range(size))
        + rng.choice(("", "n", "s", "r", "th", "nd"))
        for size in (rng.randrange(1, 4) for _ in range(count))
    )
    return text.capitalize() + rng.choice((".", ".", ".", "!", "?", ";", ","))


def paragraph(rng: Random) -> str:
    """A short piece of one of the kinds of text."""
    kind = rng.random()
    if kind < 0.65:
        return " ".join(sentence(rng) for _ in range(rng.randrange(1, 6)))
    if kind < 0.85:
        return rng.choice(documentation())
    return " ".join(invented(rng) for _ in range(rng.randrange(1, 4)))


def story(rng: Random) -> tuple[str, str, str]:
    """A short story, a question about it and the answer."""
    people = rng.sample(words.NAMES, 3)
    things = rng.sample(words.NOUNS, 3)
    places = rng.sample(words.PLACES, 3)
    lines = [
        f"{person} put the {thing} in the {place}."
        for person, thing, place in zip(people, things, places, strict=True)
    ]
    for _ in range(rng.randrange(3)):
        lines.insert(rng.randrange(len(lines) + 1), sentence(rng))
    which = rng.randrange(3)
    person, thing, place = people[which], things[which], places[which]
    question, answer = rng.choice(
        (
            (f"Where is the {thing}?", f"The {thing} is in the {place}."),
            (f"Who put the {thing} in the {place}?", f"{person} put the {thing} in the {place}."),
            (f"What did {person} put in the {place}?", f"{person} put the {thing} in the {place}."),
        )
    )
    return " ".join(lines), question, answer
