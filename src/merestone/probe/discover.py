"""What a server can do, found by asking it. Nothing here is a verdict."""

from __future__ import annotations

from merestone.probe.client import Refused, Server
from merestone.probe.context import Probe
from merestone.probe.reply import Reply, Unsupported

COMPLETIONS = "/v1/completions"
_TOP_VOCAB = 1 << 20
_SAFE_VOCAB = 256  # ids below this exist in every tokenizer that we know of


async def discover(
    server: Server,
    *,
    full: bool,
    seed: int,
    vocab: int | None = None,
    context: int | None = None,
    pool_tokens: int | None = None,
    fill_limit: int = 4000,
) -> Probe:
    """Find the model, its limits and the server's abilities. Options given are not asked for.

    Abilities: ``ids`` (prompts of token ids), ``tokens`` (return_token_ids), ``logprobs``,
    ``cached`` (cached_tokens), ``salt``, ``marks`` (cache_boundaries), ``scored``
    (prompt_logprobs), ``chat``, ``render`` (/tokenize of messages), ``metrics``.

    Raises:
        Broken: no server there, or one that fails at the simplest request.
        Refused: it does not list its models, and no model was named.
    """
    await _name(server)
    card = await _card(server)
    context = context or card.get("max_model_len")
    have = set(await _completions(server))
    if "ids" in have:
        vocab = vocab or await _vocabulary(server)
        have |= await _fields(server)
    have |= await _chat(server)
    have |= await _others(server)
    return Probe(
        server,
        full,
        seed,
        vocab or _SAFE_VOCAB,
        have=frozenset(have),
        context=context,
        pool_tokens=pool_tokens,
        fill_limit=fill_limit,
    )


async def _name(server: Server) -> None:
    if server.model is None:
        models = (await server.get("/v1/models")).get("data") or []
        if not models:
            raise Refused(404, "/v1/models lists no model; name one with --model")
        server.model = models[0]["id"]


async def _card(server: Server) -> dict[str, int]:
    try:
        models = (await server.get("/v1/models")).get("data") or []
    except Refused:
        return {}
    for entry in models:
        if entry.get("id") == server.model and isinstance(entry.get("max_model_len"), int):
            return {"max_model_len": entry["max_model_len"]}
    return {}


async def _completions(server: Server) -> set[str]:
    try:
        reply = await server.complete([1, 2, 3], 2, salt="probe-discovery")
    except Refused:
        return set()
    return {"ids"} | _said(reply)


def _said(reply: Reply) -> set[str]:
    said = {"tokens": reply.tokens, "logprobs": reply.positions, "cached": reply.hit}
    return {name for name, value in said.items() if value is not None}


async def _vocabulary(server: Server) -> int:
    """The number of ids that the server accepts, by bisection."""

    async def accepts(token: int) -> bool:
        try:
            await server.complete([token], 1, salt="probe-discovery")
        except Refused:
            return False
        return True

    if await accepts(_TOP_VOCAB):
        return _SAFE_VOCAB  # ids are not checked there; what lies above may be anything
    low, high = 1, _TOP_VOCAB
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if await accepts(middle) else (low, middle)
    return high


async def _fields(server: Server) -> set[str]:
    """Optional fields. A server that knows one accepts a good value and refuses a bad one; one
    that ignores it accepts both."""
    found = set()
    for name, field, good, bad in (
        ("salt", "cache_salt", "probe-discovery", 7),
        ("marks", "cache_boundaries", [1], "no"),
    ):
        if await _takes(server, field, good) and not await _takes(server, field, bad):
            found.add(name)
    try:
        reply = await server.complete([1, 2, 3], 1, salt="probe-discovery", prompt_logprobs=1)
    except Refused:
        return found
    return found | ({"scored"} if reply.prompt_positions else set())


async def _takes(server: Server, field: str, value: object) -> bool:
    try:
        await server.generate(
            COMPLETIONS, {"prompt": [1, 2, 3], field: value}, 1, "probe-discovery", False
        )
    except Refused:
        return False
    return True


async def _chat(server: Server) -> set[str]:
    message = {"role": "user", "content": "hello"}
    try:
        reply = await server.chat([message], 2, salt="probe-discovery")
    except Refused:
        return set()
    said = _said(reply)
    whole = {"tokens", "logprobs", "cached"} <= said and reply.prompt is not None
    return {"chat"} if whole else set()


async def _others(server: Server) -> set[str]:
    found = set()
    try:
        await server.render([{"role": "user", "content": "hello"}])
        found.add("render")
    except Unsupported:
        pass
    try:
        if await server.metrics():
            found.add("metrics")
    except Unsupported:
        pass
    return found
