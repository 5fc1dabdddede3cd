"""``POST /v1/chat/completions``: conversations, with thinking and tool calls taken apart."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from merestone.engine.api import Finished, GenerateRequest, TokenEvent
from merestone.serve import glm
from merestone.serve.boundaries import Mark, marks_of
from merestone.serve.chat import ChatPrompt, build_prompt, normalise
from merestone.serve.errors import ApiError
from merestone.serve.flight import ChoiceStep, Flight
from merestone.serve.protocol import ChatBody, TokenizeBody
from merestone.serve.replies import Usage, finite, prompt_logprobs, raise_failure, stop_reason
from merestone.serve.sampling import generate_request
from merestone.serve.service import Service
from merestone.serve.text import Vocabulary


@dataclass(frozen=True, slots=True)
class ChatCall:
    """A validated call: one request, and what its reply's parser must know."""

    body: ChatBody
    prompt: ChatPrompt
    request: GenerateRequest
    tools: Mapping[str, Mapping[str, Any]]


def render(
    service: Service,
    body: ChatBody | TokenizeBody,
    messages: Sequence[Mapping[str, Any]],
    choice: str | None = None,
) -> ChatPrompt:
    """The prompt of a conversation.

    A required or named tool call is begun in the prompt: the reply can only go on with it. It
    comes without thinking, which would have to precede it.

    Raises:
        ApiError: the messages are not valid, or the template refuses them.
    """
    template = service.text.template
    if template is None:
        raise ApiError("The model has no chat template", "messages", "no_chat_template")
    tools = [tool.model_dump(exclude_unset=True) for tool in body.tools or []]
    normal = normalise(messages)
    marks = marks_of(messages, tools)
    if isinstance(body, ChatBody) and (ttl_s := body.time_to_live()) is not None:
        marks.append(Mark(len(messages), ttl_s))
    for tool in tools:  # said to us, not to the model
        tool.pop("cache_control", None)
        tool["function"].pop("cache_control", None)
    variables = dict(body.chat_template_kwargs or {})
    forced = ""
    if choice not in (None, "none"):
        variables["enable_thinking"] = False
        forced = _forced(choice, tools)
    elif body.enable_thinking is not None:
        variables["enable_thinking"] = body.enable_thinking
    vocabulary = service.text.vocabulary
    return build_prompt(vocabulary, template, normal, tools, variables, forced, marks)


def _forced(choice: str | None, tools: Sequence[Mapping[str, Any]]) -> str:
    """How a forced call begins. A named one goes up to its first argument, so that the name
    cannot go on; without parameters it is complete."""
    if choice == "required":
        return glm.CALL
    functions = {tool["function"]["name"]: tool["function"] for tool in tools}
    name = (choice or "").removeprefix("=")
    properties = (functions[name].get("parameters") or {}).get("properties")
    return f"{glm.CALL}{name}" + (glm.ARG_KEY if properties else glm.END_CALL)


def prepare(service: Service, body: ChatBody) -> ChatCall:
    """Render, tokenise and check; may take long for long conversations.

    Raises:
        ApiError: something cannot be done.
    """
    body.check()
    choice = body.choice_of_tool()
    prompt = render(service, body, body.messages, choice)
    vocabulary = service.text.vocabulary
    marks = {mark: vocabulary.id_of(mark) for mark in glm.MARKS}
    bias = {}
    if choice == "none" and body.tools and (call := marks[glm.CALL]) is not None:
        bias[call] = -100.0  # the tools stay in the prompt, whose ids then do not change
    max_tokens = body.max_tokens
    if body.max_completion_tokens is not None:
        max_tokens = body.max_completion_tokens
    request = generate_request(
        body,
        prompt.tokens,
        service.engine.info,
        service.text,
        max_tokens=max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
        boundaries=prompt.boundaries,
        lives=prompt.lives,
        ends=() if (thought := marks[glm.END_THINK]) is None else ((thought, "reasoning"),),
        visible=[token for token in marks.values() if token is not None],
        bias=bias,
    )
    tools = {tool.function.name: tool.function.parameters or {} for tool in body.tools or []}
    return ChatCall(body, prompt, request, {} if choice == "none" else tools)


@dataclass(slots=True)
class Reply:
    """One choice, taken apart as it comes: all of it so far, and what the last step added."""

    parser: glm.ReplyParser
    thought: str | None = None
    content: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    tokens: list[TokenEvent] = field(default_factory=list)
    thinking_tokens: int = 0
    opened: bool = False
    """Whether a chunk has named the role."""
    end: Finished | None = None

    @classmethod
    def begin(cls, call: ChatCall) -> Reply:
        """A reply whose forced beginning has been read."""
        return cls(glm.ReplyParser(call.prompt.header, call.tools))

    def add(self, step: ChoiceStep, forced: str) -> dict[str, Any]:
        """Take a step and return its delta."""
        parts: list[glm.Part] = []
        if step.started and forced:
            parts += self.parser.push(forced)
        for event in step.tokens:
            was_thinking = self.parser.thinking
            parts += self.parser.push(event.text)
            self.thinking_tokens += was_thinking or self.parser.thinking
        self.tokens += step.tokens
        if step.finished:
            self.end = step.finished
            parts += self.parser.push(step.finished.text)
            parts += self.parser.flush()
        return self._delta(parts)

    def _delta(self, parts: Sequence[glm.Part]) -> dict[str, Any]:
        thought: str | None = None
        content = ""
        first = len(self.calls)
        for part in parts:
            match part:
                case glm.Thought(text):
                    thought = (thought or "") + text
                case glm.Content(text):
                    content += text
                case glm.Call(name, arguments):
                    function = {"name": name, "arguments": arguments}
                    identity = f"call_{uuid.uuid4().hex[:24]}"
                    self.calls.append({"id": identity, "type": "function", "function": function})
        if thought is not None:
            self.thought = (self.thought or "") + thought
        self.content += content
        delta: dict[str, Any] = {}
        if thought is not None:
            delta["reasoning_content"] = thought
        if content:
            delta["content"] = content
        if calls := self.calls[first:]:
            delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls, first)]
        return delta

    @property
    def finish_reason(self) -> str | None:
        """A reply that stops with calls in it asks for their results."""
        if self.end is None:
            return None
        return "tool_calls" if self.calls and self.end.reason == "stop" else self.end.reason


async def fold(service: Service, call: ChatCall, flight: Flight) -> dict[str, Any]:
    """The answer that is not a stream."""
    usage = Usage([call.request], frank=service.options.cache_tokens)
    replies = [Reply.begin(call) for _ in range(call.request.n)]
    async for steps in flight.steps():
        for step in steps:
            raise_failure(step)
            replies[step.choice].add(step, call.prompt.forced)
            usage.add(step)
    usage.reasoning = sum(reply.thinking_tokens for reply in replies)
    answer = service.envelope("chatcmpl", "chat.completion", call.request)
    vocabulary = service.text.vocabulary
    answer["choices"] = [_whole(service, call, i, reply) for i, reply in enumerate(replies)]
    answer["usage"] = usage.report()
    if call.body.return_token_ids:
        answer["prompt_token_ids"] = list(call.request.tokens)
    if call.body.prompt_logprobs is not None:
        end = replies[0].end
        scored = (end.prompt_logprobs if end else None) or ()
        answer["prompt_logprobs"] = prompt_logprobs(vocabulary, scored, call.body.prompt_logprobs)
    return answer


def _whole(service: Service, call: ChatCall, index: int, reply: Reply) -> dict[str, Any]:
    assert reply.end is not None
    vocabulary, info = service.text.vocabulary, service.engine.info
    message: dict[str, Any] = {"role": "assistant", "content": reply.content, "refusal": None}
    if reply.thought is not None:
        message["reasoning_content"] = reply.thought
    if reply.calls:
        message["tool_calls"] = reply.calls
        message["content"] = reply.content or None
    out = {
        "index": index,
        "message": message,
        "logprobs": _logprobs(vocabulary, call.body, reply.tokens),
        "finish_reason": reply.finish_reason,
        "stop_reason": stop_reason(info, reply.end),
    }
    if call.body.return_token_ids:
        out["token_ids"] = [event.token for event in reply.tokens]
    return out


async def chunks(service: Service, call: ChatCall, flight: Flight) -> AsyncIterator[dict[str, Any]]:
    """The chunks of a stream."""
    body, usage = call.body, Usage([call.request], frank=service.options.cache_tokens)
    envelope = service.envelope("chatcmpl", "chat.completion.chunk", call.request)
    replies = [Reply.begin(call) for _ in range(call.request.n)]
    async for steps in flight.steps():
        for step in steps:
            raise_failure(step)
            usage.add(step)
            choice = _piece(service, call, replies[step.choice], step)
            usage.reasoning = sum(reply.thinking_tokens for reply in replies)
            if choice is None:
                continue
            chunk = {**envelope, "choices": [choice]}
            if "role" in choice["delta"] and step.choice == 0 and body.return_token_ids:
                chunk["prompt_token_ids"] = list(call.request.tokens)
            if body.usage_at_end or body.usage_always:
                chunk["usage"] = usage.report() if body.usage_always else None
            yield chunk
    if body.usage_at_end:
        yield {**envelope, "choices": [], "usage": usage.report()}


def _piece(
    service: Service, call: ChatCall, reply: Reply, step: ChoiceStep
) -> dict[str, Any] | None:
    """What a step adds to its choice; None if nothing that a client can see."""
    vocabulary = service.text.vocabulary
    delta = reply.add(step, call.prompt.forced)
    # With the first token, not when the prompt begins: clients time the first chunk.
    if not reply.opened and (delta or step.tokens or step.finished):
        reply.opened = True
        delta = {"role": "assistant", "content": "", **delta}
    shown = bool(delta) or step.finished is not None
    out: dict[str, Any] = {
        "index": step.choice,
        "delta": delta,
        "logprobs": _logprobs(vocabulary, call.body, step.tokens) if step.tokens else None,
        "finish_reason": reply.finish_reason,
    }
    if step.finished:
        out["stop_reason"] = stop_reason(service.engine.info, step.finished)
    if call.body.return_token_ids:
        out["token_ids"] = [event.token for event in step.tokens]
    wants_tokens = call.body.return_token_ids or call.body.logprobs
    return out if shown or (wants_tokens and step.tokens) else None


def _logprobs(
    vocabulary: Vocabulary, body: ChatBody, events: Sequence[TokenEvent]
) -> dict[str, Any] | None:
    """The ``logprobs`` object of a choice or a chunk."""
    if not body.logprobs:
        return None

    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": vocabulary.label(token),
            "logprob": finite(logprob),
            "bytes": list(vocabulary.bytes_of(token)),
        }

    content = []
    for event in events:
        if event.logprob is not None:
            top = event.logprob.top[: body.top_logprobs or 0]
            row = entry(event.token, event.logprob.logprob)
            row["top_logprobs"] = [entry(token, logprob) for token, logprob in top]
            content.append(row)
    return {"content": content, "refusal": None}
