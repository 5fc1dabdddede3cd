"""Functions to call: their definitions, requests that need them, results and answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from training import prose, words
from training.dialogue import Tool

TOOLS_AT_MOST = 4


@dataclass(frozen=True, slots=True)
class Request:
    """What a user says, the call that it needs, the tool's result and the answer."""

    text: str
    name: str
    arguments: dict[str, object]
    result: str
    answer: str


@dataclass(frozen=True, slots=True)
class Function:
    """``draw`` makes a request; None for the function whose result is a record's key."""

    definition: Tool
    draw: Callable[[Random], Request] | None


def _definition(name: str, description: str, /, **parameters: str) -> Tool:
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {key: {"type": kind} for key, kind in parameters.items()},
                "required": list(parameters),
            },
        },
    }


def _city(rng: Random) -> str:
    return rng.choice(words.CAPITALS)[1]


def _weather(rng: Random) -> Request:
    city, degrees = _city(rng), rng.randrange(-9, 40)
    sky = rng.choice(("clear", "cloudy", "rainy", "windy"))
    asked = rng.choice(
        (
            "What is the weather in {c}?",
            "How is the weather in {c}?",
            "Tell me the weather in {c}.",
            "What's the weather like in {c}?",
            "What is the weather in {c} today?",
        )
    )
    result = json.dumps({"temperature": degrees, "sky": sky})
    answer = f"It is {degrees} degrees and {sky} in {city}."
    return Request(asked.format(c=city), "get_weather", {"city": city}, result, answer)


def _time(rng: Random) -> Request:
    city = _city(rng)
    clock = f"{rng.randrange(24):02}:{rng.randrange(60):02}"
    asked = rng.choice(("What time is it in {c}?", "Tell me the time in {c}."))
    return Request(
        asked.format(c=city), "get_time", {"city": city}, clock, f"It is {clock} in {city}."
    )


def _price(rng: Random) -> Request:
    item, price = rng.choice(words.NOUNS), rng.randrange(1, 1000)
    asked = rng.choice(("How much is the {i}?", "What does the {i} cost?", "Price of the {i}?"))
    result = rng.choice((str(price), json.dumps({"price": price})))
    return Request(
        asked.format(i=item), "get_price", {"item": item}, result, f"The {item} costs {price}."
    )


def _message(rng: Random) -> Request:
    name, text = rng.choice(words.NAMES), prose.sentence(rng)
    asked = rng.choice(("Tell {n}: {t}", "Send a message to {n}: {t}"))
    return Request(
        asked.format(n=name, t=text),
        "send_message",
        {"to": name, "text": text},
        "sent",
        f"I have sent the message to {name}.",
    )


def _sum(rng: Random) -> Request:
    one, two = rng.randrange(10, 10000), rng.randrange(10, 10000)
    asked = rng.choice(("Use the tool to add {a} and {b}.", "Add {a} and {b} with the tool."))
    return Request(
        asked.format(a=one, b=two),
        "add",
        {"a": one, "b": two},
        str(one + two),
        f"The sum is {one + two}.",
    )


def _timer(rng: Random) -> Request:
    minutes = rng.randrange(1, 100)
    asked = rng.choice(("Set a timer for {m} minutes.", "Start a timer of {m} minutes."))
    return Request(
        asked.format(m=minutes),
        "set_timer",
        {"minutes": minutes},
        "ok",
        f"The timer is set for {minutes} minutes.",
    )


def _person(rng: Random) -> Request:
    place, name = rng.choice(words.PLACES), rng.choice(words.NAMES)
    return Request(
        f"Who is in the {place}?",
        "find_person",
        {"place": place},
        name,
        f"{name} is in the {place}.",
    )


def _read(rng: Random) -> Request:
    key, value = f"{rng.choice('ABCDEFGHKLMNPQRST')}{rng.randrange(1, 1000)}", rng.randrange(10**5)
    return Request(
        f"Use the tool to read record {key}.",
        "read_record",
        {"key": key},
        rng.choice((str(value), json.dumps({"key": key, "value": value}))),
        f"Record {key} holds {value}.",
    )


FIND_KEY = Function(
    _definition("find_key", "Find the key of a person's record.", name="string"), None
)
KNOWN = (
    Function(_definition("get_weather", "Get the weather of a city.", city="string"), _weather),
    Function(_definition("get_time", "Get the time in a city.", city="string"), _time),
    Function(_definition("get_price", "Get the price of an item.", item="string"), _price),
    Function(_definition("send_message", "Send a message.", to="string", text="string"), _message),
    Function(_definition("add", "Add two numbers.", a="integer", b="integer"), _sum),
    Function(_definition("set_timer", "Set a timer.", minutes="integer"), _timer),
    Function(_definition("find_person", "Find who is in a place.", place="string"), _person),
    Function(_definition("read_record", "Read a record.", key="string"), _read),
)
_ACTIONS = (
    "book", "check", "clean", "close", "copy", "count", "delete", "fetch", "fill", "find", "list",
    "lock", "move", "open", "order", "paint", "print", "rename", "save", "sell", "sort", "start",
    "stop", "store", "update", "wash",
)  # fmt: skip
_PARAMETERS: dict[str, tuple[str, Callable[[Random], object]]] = {
    "name": ("string", lambda rng: rng.choice(words.NAMES)),
    "city": ("string", _city),
    "place": ("string", lambda rng: rng.choice(words.PLACES)),
    "color": ("string", lambda rng: rng.choice(words.SYMBOLS)),
    "day": ("string", lambda rng: rng.choice(words.WEEKDAYS)),
    "count": ("integer", lambda rng: rng.randrange(1, 1000)),
    "number": ("integer", lambda rng: rng.randrange(1, 100000)),
    "code": ("string", lambda rng: f"{rng.choice(words.SYMBOLS)}-{rng.randrange(1, 1000)}"),
}


def made_up(rng: Random) -> Function:
    """A function of any name, so that none has to be known beforehand."""
    action, noun = rng.choice(_ACTIONS), rng.choice(words.NOUNS)
    name = f"{action}_{noun}"
    chosen = rng.sample(list(_PARAMETERS), rng.choice((1, 1, 2, 2, 3)))
    kinds = {key: _PARAMETERS[key][0] for key in chosen}

    def draw(rng: Random) -> Request:
        values = {key: _PARAMETERS[key][1](rng) for key in chosen}
        listed = ", ".join(f"{key} {value}" for key, value in values.items())
        result = rng.choice(("done", "ok", str(rng.randrange(1000)), rng.choice(words.SYMBOLS)))
        asked = rng.choice(
            (
                f"Please {action} the {noun}: {listed}.",
                f"{action.capitalize()} the {noun}, {listed}.",
                f"Call {name} with {listed}.",
            )
        )
        return Request(asked, name, values, result, f"{name} returned {result}.")

    return Function(_definition(name, f"{action.capitalize()} the {noun}.", **kinds), draw)


def choose(rng: Random, most: int = TOOLS_AT_MOST) -> list[Function]:
    """A conversation's functions, each name once."""
    found: dict[str, Function] = {}
    for _ in range(rng.randrange(1, most + 1)):
        kind = rng.random()
        function = FIND_KEY if kind < 0.3 else rng.choice(KNOWN) if kind < 0.75 else made_up(rng)
        found[function.definition["function"]["name"]] = function  # type: ignore[index]
    return list(found.values())


def key_request(rng: Random, key: str) -> Request:
    """Two hops: the tool names a record, and the record was stated before."""
    name = rng.choice(words.NAMES)
    asked = rng.choice(
        (
            "What does the record of {n} hold? Find its key first.",
            "Find the key of {n} and tell me what the record holds.",
            "Which value does {n}'s record hold?",
        )
    )
    return Request(
        asked.format(n=name),
        "find_key",
        {"name": name},
        rng.choice((key, json.dumps({"key": key}))),
        "",  # the caller knows what the record holds
    )
