"""Strict reading of a checkpoint's JSON files: type, path and default of every key.

Knows JSON and error messages. Must not know what any key means.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import cast


class ConfigError(ValueError):
    """A file of a model directory says something that cannot be served. One line, names the key."""


def read_object(path: Path) -> dict[str, object]:
    """The JSON object in ``path``.

    Raises:
        ConfigError: no such file, not UTF-8, not JSON, or no object at the top.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path}: not JSON ({error})") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: expected an object, found {_kind(value)}")
    return value


class Section:
    """One JSON object, read key by key; ``unread`` tells what nobody asked for.

    A reader without ``default`` insists on the key. JSON's null counts as absent, except in
    ``number_or_none``, where it is an answer. All readers raise ConfigError, naming the key.
    """

    def __init__(self, values: Mapping[str, object], where: str) -> None:
        self._values = values
        self._where = where
        self._read: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def unread(self) -> list[str]:
        return [name for name in self._values if name not in self._read]

    def ignore(self, names: frozenset[str]) -> None:
        """Count ``names`` as read: they change nothing that we compute."""
        self._read |= names

    def error(self, name: str, problem: str) -> ConfigError:
        return ConfigError(f"{self._where}: {name} {problem}")

    def integer(self, name: str, default: int | None = None, least: int = 1) -> int:
        value = self._take(name, default)
        # bool is an int in Python, not in JSON.
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(name, f"must be an integer, found {_kind(value)}")
        if value < least:
            raise self.error(name, f"must be at least {least}, found {value}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._take(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(name, f"must be a number, found {_kind(value)}")
        if not math.isfinite(value):
            raise self.error(name, f"must be finite, found {value}")
        return float(value)

    def number_or_none(self, name: str, default: float | None) -> float | None:
        if name in self._values and self._values[name] is None:
            self._read.add(name)
            return None
        if name not in self._values and default is None:
            return None
        return self.number(name, default)

    def flag(self, name: str, default: bool | None = None) -> bool:
        value = self._take(name, default)
        if not isinstance(value, bool):
            raise self.error(name, f"must be true or false, found {_kind(value)}")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self._take(name, default)
        if not isinstance(value, str):
            raise self.error(name, f"must be a string, found {_kind(value)}")
        return value

    def texts(self, name: str, count: int) -> tuple[str, ...]:
        """A list of exactly ``count`` strings."""
        value = self._take(name, None)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(name, f"must be a list of strings, found {_kind(value)}")
        if len(value) != count:
            raise self.error(name, f"must have {count} entries, found {len(value)}")
        return tuple(value)

    def ids(self, name: str) -> tuple[int, ...]:
        """Token ids, written as one integer or as a list; none if absent."""
        if name not in self:
            self._read.add(name)
            return ()
        value = self._take(name, None)
        items: list[object] = value if isinstance(value, list) else [value]
        for item in items:
            if isinstance(item, bool) or not isinstance(item, int) or item < 0:
                raise self.error(name, f"must be token ids, found {item!r}")
        return tuple(cast("list[int]", items))

    def section(self, name: str) -> Section:
        value = self._take(name, None)
        if not isinstance(value, dict):
            raise self.error(name, f"must be an object, found {_kind(value)}")
        return Section(value, f"{self._where}: {name}")

    def only(self, name: str, supported: object, default: object) -> None:
        """Refuse every value of ``name`` but the supported one (``default`` where it is absent)."""
        value = self._take(name, default)
        if type(value) is not type(supported) or value != supported:
            raise self.error(name, f"= {value!r} is not supported, only {supported!r}")

    def refuse(self, name: str, unsupported: object) -> None:
        """Refuse one value of ``name``, take any other and its absence."""
        self._read.add(name)
        if self._values.get(name) is unsupported:
            raise self.error(name, f"= {unsupported!r} is not supported")

    def _take(self, name: str, default: object) -> object:
        self._read.add(name)
        value = self._values.get(name)
        if value is None:
            if default is None:
                raise self.error(name, "is missing")
            return default
        return value


def _kind(value: object) -> str:
    match value:
        case None:
            return "null"
        case dict():
            return "an object"
        case list():
            return "a list"
        case _:
            return repr(value)
