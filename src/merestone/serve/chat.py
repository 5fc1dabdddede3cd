"""Conversations to prompts, with the boundaries at which a prompt may be resumed.

Knows every form of message that the API allows. Must not know HTTP or the engine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from merestone.serve.errors import ApiError, unsupported
from merestone.serve.template import ChatTemplate, TemplateRefusal
from merestone.serve.text import Vocabulary

TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A rendered conversation.

    ``boundaries`` are (token count, kind), ascending, each verified to be an exact prefix.
    ``header`` is the end of the prompt's text, which says how a reply begins; ``forced`` the
    beginning of the reply that the prompt already holds.
    """

    text: str
    tokens: tuple[int, ...]
    boundaries: tuple[tuple[int, str], ...]
    header: str
    forced: str = ""


def build_prompt(
    vocabulary: Vocabulary,
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
    forced: str = "",
) -> ChatPrompt:
    """Render a conversation and find its boundaries.

        [gMASK]<sop> tools, system messages | user, assistant, tool .. | <|assistant|> forced
                                 instruction                     turn

    The parts are rendered and tokenised separately and count only if their ids begin the whole
    prompt's: a template may look ahead, and a tokenizer may merge over a seam.

    Raises:
        ApiError: the template refuses the messages.
    """
    try:
        text = template.render(messages, tools, True, variables)
    except TemplateRefusal as error:
        raise ApiError(f"chat template: {error}", "messages", "template_error") from error
    tokens = vocabulary.encode(text)
    leading = 0
    while leading < len(messages) and messages[leading]["role"] == "system":
        leading += 1
    parts = [("turn", messages)]
    if leading or tools:
        parts.insert(0, ("instruction", messages[:leading]))
    found: dict[int, str] = {}
    for kind, part in parts:
        count = _shared_prefix(vocabulary, template, part, tools, variables, tokens)
        if count and (forced or count < len(tokens)):
            found.setdefault(count, kind)
    return ChatPrompt(
        text=text + forced,
        tokens=tokens + (vocabulary.encode(forced) if forced else ()),
        boundaries=tuple(sorted(found.items())),
        header=text[-64:],
        forced=forced,
    )


def _shared_prefix(
    vocabulary: Vocabulary,
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
    tokens: tuple[int, ...],
) -> int:
    """Tokens of these messages alone, if they begin ``tokens``; else 0."""
    try:
        part = vocabulary.encode(template.render(messages, tools, False, variables))
    except TemplateRefusal:  # a template need not take a conversation without a user
        return 0
    return len(part) if tokens[: len(part)] == part else 0


def normalise(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages in the one form that templates see: content is a text, arguments are objects.

    Raises:
        ApiError: something that no conversation may hold, by its path.
    """
    if not messages:
        raise ApiError("messages is empty", "messages", "invalid_value")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: Mapping[str, Any], path: str) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise ApiError(f"{path}.role must be one of {', '.join(ROLES)}", f"{path}.role")
    out: dict[str, Any] = {"role": ROLES[role]}
    calls = message.get("tool_calls")
    if calls is not None and role != "assistant":
        raise ApiError(f"{path}.tool_calls belongs to assistant messages", f"{path}.tool_calls")
    refusal = _optional_text(message, "refusal", path)
    content = message.get("content")
    if content is None:
        if role != "assistant":
            raise ApiError(f"{path}.content is missing", f"{path}.content")
        content = refusal or ""
    out["content"] = _content(content, f"{path}.content")
    if role == "assistant":
        thought = _optional_text(message, "reasoning_content", path)
        if thought is None:
            thought = _optional_text(message, "reasoning", path)
        if thought is not None:
            out["reasoning_content"] = thought
        if calls:
            out["tool_calls"] = _calls(calls, f"{path}.tool_calls")
    for key in ("name", "tool_call_id"):
        if (value := _optional_text(message, key, path)) is not None:
            out[key] = value
    return out


def _optional_text(message: Mapping[str, Any], key: str, path: str) -> str | None:
    value = message.get(key)
    if value is not None and not isinstance(value, str):
        raise ApiError(f"{path}.{key} must be a string", f"{path}.{key}")
    return value


def _content(content: object, path: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(f"{path} must be a string or a list of parts", path)
    texts = []
    for i, part in enumerate(content):
        where = f"{path}[{i}]"
        if not isinstance(part, dict) or not isinstance(kind := part.get("type"), str):
            raise ApiError(f"{where} must be an object with a type", where)
        if kind not in TEXT_PARTS:
            raise unsupported(where, f"{where}: a content part of type {kind!r}")
        text = part.get(TEXT_PARTS[kind])
        if not isinstance(text, str):
            where = f"{where}.{TEXT_PARTS[kind]}"
            raise ApiError(f"{where} must be a string", where)
        texts.append(text)
    return "".join(texts)


def _calls(calls: object, path: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise ApiError(f"{path} must be a list", path)
    out = []
    for i, call in enumerate(calls):
        where = f"{path}[{i}].function"
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ApiError(f"{where} must be an object with a name", where)
        entry: dict[str, Any] = {
            "type": "function",
            "function": {
                "name": function["name"],
                "arguments": _arguments(function.get("arguments"), f"{where}.arguments"),
            },
        }
        if isinstance(call.get("id"), str):
            entry["id"] = call["id"]
        out.append(entry)
    return out


def _arguments(arguments: object, path: str) -> dict[str, Any]:
    if isinstance(arguments, str):
        if not arguments.strip():
            return {}
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise ApiError(f"{path} is not valid JSON: {error}", path) from error
    if arguments is None:
        return {}
    if not isinstance(arguments, dict):
        raise ApiError(f"{path} must be a JSON object", path)
    return arguments
