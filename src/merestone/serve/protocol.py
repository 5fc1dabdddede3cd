"""The bodies of requests, validated strictly.

Ranges are checked here, whatever needs the model (lengths, ids) in ``sampling.py``. Fields that
the API has and merestone does not know are accepted and listed; those that would change the
answer are refused by name (``UNSUPPORTED``).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from merestone.serve.boundaries import LONGEST_TTL_S, MOST_MARKS, time_to_live
from merestone.serve.errors import ApiError, unsupported
from merestone.serve.template import RANGES

Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Count = Annotated[int, Field(ge=0, lt=2**31)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
StopString = Annotated[str, Field(min_length=1, max_length=1024)]

UNSUPPORTED = (
    "suffix",
    "functions",
    "function_call",
    "audio",
    "web_search_options",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "structured_outputs",
    "prompt_embeds",
    "use_beam_search",
    "continue_final_message",
    "logits_processors",
    "documents",
    "chat_template",
)
"""Options that would change the answer. Refused when set to anything but null, false or empty."""

ACCEPTED = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
)
"""Fields of the API that say nothing about the answer."""


class Body(BaseModel):
    """A JSON body. No coercion: "1" is no number, true is no integer."""

    model_config = ConfigDict(strict=True, extra="allow")

    def unknown(self) -> list[str]:
        """Fields that nobody reads.

        Raises:
            ApiError: one of them is an option that is not supported.
        """
        extra = self.model_extra or {}
        for name in UNSUPPORTED:
            if extra.get(name):
                raise unsupported(name, name)
        return sorted(set(extra) - ACCEPTED)


def _within(name: str) -> Any:
    least, most = RANGES[name]
    return Field(ge=least, le=most)


Bias = Annotated[Finite, Field(ge=-100, le=100)]
MOST_BIASES = 1024
"""They are added for every token anew, and every stream waits for it."""


class StreamOptions(Body):
    """Usage in a stream: once at the end, or with every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Sampled(Body):
    """What both dialects say about sampling and the cache. None is the default of each."""

    model: str | None = None
    temperature: Annotated[Finite, _within("temperature")] | None = None
    top_p: Annotated[Finite, _within("top_p"), Field(gt=0)] | None = None
    top_k: Annotated[int, _within("top_k")] | None = None
    min_p: Annotated[Finite, _within("min_p")] | None = None
    repetition_penalty: Annotated[Finite, _within("repetition_penalty")] | None = None
    presence_penalty: Annotated[Finite, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Finite, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[dict[str, Bias], Field(max_length=MOST_BIASES)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=32)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=128)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    max_tokens: Count | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    return_token_ids: bool | None = None
    cache_salt: Annotated[str, Field(max_length=4096)] | None = None
    cache_prompt: bool | None = None
    cache_control: dict[str, Any] | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    priority: Int32 | None = None

    def check(self) -> None:
        """Rules between fields.

        Raises:
            ApiError: two fields contradict each other.
        """
        if self.stream_options is not None and not self.stream:
            raise ApiError("stream_options needs stream", "stream_options", "invalid_value")
        if self.stream and self.prompt_logprobs is not None:
            raise unsupported("prompt_logprobs", "prompt_logprobs in a stream")

    def time_to_live(self) -> float | None:
        """Seconds for which the prompt as a whole shall be spared from eviction, in Anthropic's
        spelling or in OpenAI's; None if nothing is said.

        Raises:
            ApiError: a ``cache_control`` that is none.
        """
        if self.cache_control is not None:
            return time_to_live(self.cache_control, "cache_control")
        return LONGEST_TTL_S if self.prompt_cache_retention == "24h" else None

    @property
    def stop_strings(self) -> list[str]:
        """``stop`` as a list."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def usage_at_end(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def usage_always(self) -> bool:
        """Whether every chunk of a stream has usage."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)


class CompletionBody(Sampled):
    """``POST /v1/completions``."""

    prompt: str | list[Any]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: int | None = None
    cache_boundaries: (
        Annotated[list[Annotated[int, Field(ge=1, lt=2**31)]], Field(max_length=MOST_MARKS)] | None
    ) = None
    add_special_tokens: bool | None = None

    def check(self) -> None:
        """See ``Sampled.check``."""
        super().check()
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise unsupported("best_of", "best_of different from n")
        if self.max_tokens == 0 and not self.echo:
            raise ApiError("max_tokens must be at least 1 without echo", "max_tokens")
        if self.stream and self.echo and self.logprobs is not None:
            raise unsupported("echo", "echo with logprobs in a stream")

    def prompts(self) -> list[str | tuple[int, ...]]:
        """The prompts in order: texts, or lists of ids.

        Raises:
            ApiError: a prompt of another form.
        """
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise ApiError("prompt is empty", "prompt", "invalid_value")
        if _are_ids(self.prompt):
            return [tuple(self.prompt)]
        found: list[str | tuple[int, ...]] = []
        for i, entry in enumerate(self.prompt):
            if isinstance(entry, str):
                found.append(entry)
            elif isinstance(entry, list) and _are_ids(entry):
                found.append(tuple(entry))
            else:
                raise ApiError(
                    "prompt must be a string, a list of token ids, or a list of either",
                    f"prompt[{i}]",
                    "invalid_value",
                )
        if len(found) * (self.n or 1) > 1024:
            raise ApiError("more than 1024 choices in one request", "prompt", "invalid_value")
        return found


def _are_ids(entries: list[Any]) -> bool:
    return set(map(type, entries)) <= {int}


class Function(Body):
    """A function that the model may call; ``parameters`` is a JSON schema."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Body):
    """An entry of ``tools``."""

    type: Literal["function"]
    function: Function


class ChatBody(Sampled):
    """``POST /v1/chat/completions``."""

    messages: list[dict[str, Any]]
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    response_format: dict[str, Any] | None = None
    modalities: list[str] | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check(self) -> None:
        """See ``Sampled.check``."""
        super().check()
        if self.max_tokens == 0:
            raise ApiError("max_tokens must be at least 1", "max_tokens", "invalid_value")
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError("top_logprobs needs logprobs", "top_logprobs", "invalid_value")
        kind = (self.response_format or {"type": "text"}).get("type")
        if kind != "text":
            raise unsupported("response_format", f"response_format of type {kind!r}")
        if any(mode != "text" for mode in self.modalities or []):
            raise unsupported("modalities", "a modality other than text")
        for name in ("messages", "tools", "add_generation_prompt"):
            if name in (self.chat_template_kwargs or {}):
                raise ApiError(f"{name} is set by the server", f"chat_template_kwargs.{name}")

    def choice_of_tool(self) -> str | None:
        """None for "auto"; else "none", "required", or "=NAME" for a named function.

        Raises:
            ApiError: an unknown choice, or one that the tools do not allow.
        """
        choice = self.tool_choice
        if choice is None or choice == "auto":
            return None
        names = [tool.function.name for tool in self.tools or []]
        if isinstance(choice, dict):
            function = choice.get("function")
            if choice.get("type") != "function" or not isinstance(function, dict):
                raise unsupported("tool_choice", f"tool_choice of type {choice.get('type')!r}")
            if function.get("name") not in names:
                raise ApiError("tool_choice names no tool of tools", "tool_choice", "invalid_value")
            return f"={function['name']}"
        if choice not in ("none", "required"):
            raise ApiError("tool_choice must be none, auto, required or a function", "tool_choice")
        if choice == "required" and not names:
            raise ApiError("tool_choice needs tools", "tool_choice", "invalid_value")
        return choice


class TokenizeBody(Body):
    """``POST /tokenize``: a prompt, or messages as the chat endpoint would render them."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[Tool] | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(Body):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: list[TokenId]
