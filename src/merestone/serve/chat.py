"""Conversations to prompts, with the boundaries at which a prompt may be resumed.

Knows every form of message that the API allows. Must not know HTTP or the engine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from merestone.serve.boundaries import TEXT_PARTS, Conversation, Cuts, Mark
from merestone.serve.errors import ApiError, unsupported
from merestone.serve.template import ChatTemplate, TemplateRefusal
from merestone.serve.text import Vocabulary

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

    ``boundaries`` are (token count, kind), ascending; ``lives`` (token count, seconds) of those
    that the caller wants spared from eviction.
    ``header`` is the end of the prompt's text, which says how a reply begins; ``forced`` the
    beginning of the reply that the prompt already holds.
    """

    text: str
    tokens: tuple[int, ...]
    boundaries: tuple[tuple[int, str], ...]
    lives: tuple[tuple[int, float], ...]
    header: str
    forced: str = ""


def build_prompt(
    vocabulary: Vocabulary,
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
    forced: str = "",
    marks: Sequence[Mark] = (),
) -> ChatPrompt:
    """Render a conversation and find its boundaries.

        [gMASK]<sop> tools, system messages | user, assistant, tool .. | <|assistant|> forced
                                 instruction   message   tool    turn

    The parts are rendered separately and count only if they begin the whole prompt and a token
    ends with them: a template may look ahead, and a tokenizer may merge over a seam.

    Raises:
        ApiError: the template refuses the messages.
    """
    try:
        text = template.render(messages, tools, True, variables)
    except TemplateRefusal as error:
        raise ApiError(f"chat template: {error}", "messages", "template_error") from error
    tokens = vocabulary.encode(text)
    parts = Conversation(template, messages, tools, variables, Cuts(vocabulary, text, tokens))
    found = parts.boundaries()
    lives: dict[int, float] = {}
    for mark in marks:
        count = parts.place(mark)
        found.setdefault(count, "mark")
        lives[count] = max(mark.ttl_s, lives.get(count, 0.0))
    # The prompt's own end is a boundary of another kind.
    inside = [c for c in sorted(found) if c and (forced or c < len(tokens))]
    return ChatPrompt(
        text=text + forced,
        tokens=tokens + (vocabulary.encode(forced) if forced else ()),
        boundaries=tuple((count, found[count]) for count in inside),
        lives=tuple((count, lives[count]) for count in inside if count in lives),
        header=text[-64:],
        forced=forced,
    )


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
