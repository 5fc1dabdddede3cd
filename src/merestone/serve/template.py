"""What a model directory says about text: the chat template and the sampling defaults.

Templates are foreign code; they run in jinja2's immutable sandbox. Must not know HTTP.
"""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from merestone.serve.text import TextError, Vocabulary


class TemplateRefusal(ValueError):
    """The template does not take these messages."""


class ChatTemplate:
    """A compiled chat template, with the functions that Hugging Face templates expect.

    ``names`` are the texts of special tokens that it may use (``bos_token``, ``eos_token``, ..).

    Raises:
        TextError: a syntax error.
    """

    def __init__(self, source: str, names: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._names = dict(names)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise TextError(f"chat template: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        generate: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """The text of a conversation; ``generate`` adds the header of a reply.

        Raises:
            TemplateRefusal: the template raised an error.
        """
        given = {
            **self._names,
            **variables,
            "messages": messages,
            "tools": tools or None,
            "add_generation_prompt": generate,
        }
        try:
            text = self._template.render(given)
            text.encode()  # half surrogates, from JSON inside JSON, are no text
        except Exception as error:  # foreign code, on the user's data: anything may come
            raise TemplateRefusal(str(error) or type(error).__name__) from error
        return text


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes for HTML, which models were not trained on
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> str:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Sampling of a request that says nothing, from ``generation_config.json``."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


RANGES = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 100),
    "top_k": (-1, 2**31 - 1),
}
"""Least and most that a request or a model directory may say. (A request's top_p is above 0.)"""


@dataclass(frozen=True, slots=True)
class ModelText:
    """The text side of a model. Without a template, chat requests are refused."""

    vocabulary: Vocabulary
    template: ChatTemplate | None
    defaults: SamplingDefaults = SamplingDefaults()


def load_text(directory: Path) -> ModelText:
    """Read tokenizer, chat template and sampling defaults of a Hugging Face directory.

    Raises:
        TextError: a file is missing or cannot be used.
    """
    config = _read_json(directory / "tokenizer_config.json")
    source = _template_source(directory, config)
    names = {
        key: entry if isinstance(entry, str) else str(entry.get("content", ""))
        for key, entry in config.items()
        if key.endswith("_token") and isinstance(entry, str | dict)
    }
    template = None if source is None else ChatTemplate(source, names)
    defaults = _defaults(directory / "generation_config.json")
    return ModelText(Vocabulary.load(directory), template, defaults)


def _template_source(directory: Path, config: Mapping[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except ValueError as error:
            raise TextError(f"{path}: {error}") from error
    source = config.get("chat_template")
    if isinstance(source, list):  # named templates
        named = [entry for entry in source if isinstance(entry, dict)]
        found = [entry.get("template") for entry in named if entry.get("name") == "default"]
        source = found[-1] if found else None
    if source is not None and not isinstance(source, str):
        raise TextError(f"{directory}: chat_template is not a text")
    return source


def _defaults(path: Path) -> SamplingDefaults:
    config = _read_json(path)
    found: dict[str, float] = {}
    for key, (least, most) in RANGES.items():
        value = config.get(key)
        if value is None:
            continue
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
        ):
            raise TextError(f"{path}: {key} is not a number")
        if not least <= value <= most:  # a request may not ask for it, either
            raise TextError(f"{path}: {key} {value} is outside {least} to {most}")
        found[key] = value
    top_k = int(found.pop("top_k", 0))
    return SamplingDefaults(top_k=top_k, **found)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TextError(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise TextError(f"{path}: not a JSON object")
    return content
