"""From a validated body to the engine's request: defaults, lengths and ids.

Knows the model's limits. Must not know HTTP.
"""

from __future__ import annotations

import re
import secrets
import uuid
from collections.abc import Collection, Mapping
from functools import partial

from merestone.engine.api import EngineInfo, GenerateRequest
from merestone.sched.plan import SamplingParams
from merestone.serve.errors import ApiError
from merestone.serve.protocol import Sampled
from merestone.serve.template import ModelText, SamplingDefaults
from merestone.serve.text import ChoiceText


def generate_request(
    body: Sampled,
    tokens: tuple[int, ...],
    info: EngineInfo,
    text: ModelText,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    boundaries: tuple[tuple[int, str], ...],
    lives: tuple[tuple[int, float], ...] = (),
    ends: tuple[tuple[int, str], ...] = (),
    visible: Collection[int] = frozenset(),
    bias: Mapping[int, float] | None = None,
) -> GenerateRequest:
    """One prompt as the engine takes it.

    ``visible`` are special ids that have text nevertheless (marks that a parser needs); ``bias``
    is added to the request's own.

    Raises:
        ApiError: the prompt does not fit, or an id is outside the vocabulary.
    """
    _check_length(len(tokens), max_tokens, info.context_limit)
    _check_ids("prompt", tokens, info.vocab_size)
    stop_ids = tuple(dict.fromkeys(body.stop_token_ids or []))
    _check_ids("stop_token_ids", stop_ids, info.vocab_size)
    if not body.ignore_eos:
        stop_ids = tuple(dict.fromkeys((*info.eos_ids, *stop_ids)))
    vocabulary = text.vocabulary
    min_tokens = body.min_tokens or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise ApiError("min_tokens is greater than max_tokens", "min_tokens", "invalid_value")
    stream = partial(
        ChoiceText,
        vocabulary,
        tuple(body.stop_strings),
        (vocabulary.special - frozenset(visible)) | frozenset(stop_ids),
        min_tokens,
    )
    return GenerateRequest(
        id=uuid.uuid4().hex,
        tokens=tokens,
        params=_params(body, text.defaults, info, stop_ids, logprobs, dict(bias or {})),
        max_tokens=max_tokens,
        n=body.n or 1,
        boundaries=boundaries,
        ends=ends,
        lives=lives,
        salt=body.cache_salt or "",
        cache=body.cache_prompt is not False,
        priority=body.priority or 0,
        stop_ids=stop_ids,
        prompt_logprobs=prompt_logprobs,
        text=stream,
    )


def _params(
    body: Sampled,
    defaults: SamplingDefaults,
    info: EngineInfo,
    stop_ids: tuple[int, ...],
    logprobs: int | None,
    bias: dict[int, float],
) -> SamplingParams:
    def pick(asked: float | None, default: float) -> float:
        return float(default if asked is None else asked)

    for name, value in (body.logit_bias or {}).items():
        # One spelling an id: "007" would be added to "7". (And int refuses thousands of digits.)
        if not re.fullmatch("0|[1-9][0-9]{0,9}", name) or int(name) >= info.vocab_size:
            raise ApiError(
                f"logit_bias: {name[:32]!r} is no id below {info.vocab_size}",
                "logit_bias",
                "invalid_value",
            )
        bias[int(name)] = bias.get(int(name), 0.0) + value
    top_k = defaults.top_k if body.top_k is None else body.top_k
    # unseeded requests differ from each other; a seed of any sign keys the noise by 63 bits
    seed = secrets.randbits(63) if body.seed is None else body.seed % 2**63
    return SamplingParams(
        temperature=pick(body.temperature, defaults.temperature),
        top_p=pick(body.top_p, defaults.top_p),
        top_k=max(top_k, 0),
        min_p=pick(body.min_p, defaults.min_p),
        seed=seed,
        repetition_penalty=pick(body.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=pick(body.presence_penalty, 0.0),
        frequency_penalty=pick(body.frequency_penalty, 0.0),
        logit_bias=tuple(sorted(bias.items())),
        min_tokens=body.min_tokens or 0,
        banned=stop_ids if body.min_tokens else (),
        logprobs=logprobs,
    )


def _check_length(prompt: int, output: int | None, limit: int) -> None:
    if prompt == 0:
        raise ApiError("the prompt has no tokens", "prompt", "invalid_value")
    if prompt >= limit:
        raise ApiError(
            f"The context limit is {limit} tokens, and the prompt has {prompt}: "
            "no room for an output",
            "prompt",
            "context_length_exceeded",
        )
    if output is not None and prompt + output > limit:
        raise ApiError(
            f"The context limit is {limit} tokens, and {prompt + output} were asked for: "
            f"{prompt} in the prompt, {output} in the output",
            "max_tokens",
            "context_length_exceeded",
        )


def _check_ids(param: str, tokens: tuple[int, ...], vocab_size: int) -> None:
    # The extremes first: most prompts are right, and some have a million ids.
    if not tokens or (min(tokens) >= 0 and max(tokens) < vocab_size):
        return
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise ApiError(
                f"{param}: token id {token} is outside the vocabulary of {vocab_size}",
                param,
                "invalid_value",
            )
