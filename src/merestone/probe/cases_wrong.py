"""Cases of silent wrong output, crashes and leaks, on plain token ids."""

from __future__ import annotations

import asyncio

from merestone.probe.context import Probe
from merestone.probe.conversation import Conversation
from merestone.probe.reply import Unsupported, difference
from merestone.probe.report import Check


async def retry_after_abort(probe: Probe, check: Check) -> None:
    """C18: a long prefill is given up and sent again at once: the answer is the cold one."""
    length, trials = probe.pick((2500, 1), (20000, 20))
    if not probe.fits(check, length + 8):
        return
    number = 0
    oracles = {}
    for share in (0.25, 0.5, 0.9):
        for trial in range(trials):
            number = (number + 1) % 4
            prompt = probe.stream(length, number)
            if number not in oracles:
                oracles[number] = await probe.timed(prompt, 8)
            oracle, salt = oracles[number], probe.salt()
            left = await probe.server.abandon(prompt, salt, share * oracle.first_s)
            name = f"{share:.0%}, trial {trial + 1}"
            reply = await probe.send(prompt, 8, salt)
            check.note("abandoned", left)
            check.note("C", reply.cached)
            check.equal(reply, oracle, name)


async def own_prefix(probe: Probe, check: Check) -> None:
    """C20, C27: two warm prefixes with many used slots between: each answer comes from its own."""
    length, rounds = probe.pick((600, 3), (3000, 20))
    salt = probe.salt()
    prefixes = [probe.stream(length, 1), probe.stream(length, 2)]
    for prefix in prefixes:
        await probe.send(prefix, 4, salt)
    for turn in range(rounds):
        await asyncio.gather(
            *(probe.send(probe.stream(70, 10 + at), 2, probe.salt()) for at in range(9))
        )
        question = probe.stream(9, 30 + turn)
        prompts = [prefix + question for prefix in prefixes]
        replies = await asyncio.gather(*(probe.send(prompt, 8, salt) for prompt in prompts))
        oracles = [await probe.cold(prompt, 8) for prompt in prompts]
        check.that(difference(*oracles) is not None, "two prefixes give one answer: no power")
        for which, reply in enumerate(replies):
            name = f"round {turn + 1}, prefix {which + 1}"
            check.cached(reply, length, name)
            check.equal(reply, oracles[which], name)


async def no_leak(probe: Probe, check: Check) -> None:
    """C28: others' requests see nothing of a chat, and the chat loses nothing by them."""
    talk, others = Conversation(probe, check), Conversation(probe, check)
    secret = probe.stream(200, 1)
    first = await talk.ask(secret, 8, "the chat")
    for turn in range(probe.pick(6, 50)):
        await others.ask(probe.stream(150 + turn, 2), 8, f"other {turn + 1}")
    reply = await talk.ask(secret + first.ids + probe.stream(20, 3), 8, "the chat's next turn")
    check.at_least(reply, len(secret), "the chat's next turn")
    # Another salt must not even be quicker.
    other = await probe.send(secret, 8, probe.salt())
    check.cached(other, 0, "the chat's prompt under another salt")


async def one_past_a_chunk(probe: Probe, check: Check) -> None:
    """C22: lengths that leave one row after a chunk: the first token of a hit, and no NaN."""
    for number, length in enumerate((65, 129, 193, 257)):
        prompt, salt = probe.stream(length, number), probe.salt()
        oracle = await probe.cold(prompt, 2)
        for leg in ("first", "second"):
            reply = await probe.send(prompt, 2, salt)
            check.equal(reply, oracle, f"{length} tokens, {leg}")
        check.cached(reply, length, f"{length} tokens, second")


async def empty_insertions(probe: Probe, check: Check) -> None:
    """C23: an aborted first chunk and a prompt of one token are no source for others."""
    salt = probe.salt()
    await probe.server.abandon(probe.stream(3000, 1), salt, 0.01)
    await probe.send(probe.stream(1, 2), 1, salt)
    for number in range(3, probe.pick(7, 13)):
        prompt = probe.stream(500, number)
        reply = await probe.send(prompt, 4, salt)
        check.cached(reply, 0, f"first sighting {number}")
        check.equal(reply, await probe.cold(prompt, 4), f"first sighting {number}")


async def scored_prompts(probe: Probe, check: Check) -> None:
    """C29: log probabilities of a warm prompt's tokens are a cold one's, or absent."""
    prompt, salt = probe.stream(300, 1), probe.salt()
    await probe.send(prompt, 4, salt)
    warm = await probe.server.complete(prompt, 4, salt=salt, prompt_logprobs=2)
    cold = await probe.server.complete(prompt, 4, salt=probe.salt(), prompt_logprobs=2)
    if warm.prompt_positions is None or cold.prompt_positions is None:
        raise Unsupported("no prompt_logprobs in the answer")
    check.that(len(cold.prompt_positions) == 300, "not one entry a prompt token")
    pairs = zip(warm.prompt_positions, cold.prompt_positions, strict=False)
    wrong = [at for at, (one, other) in enumerate(pairs) if one is not None and one != other]
    check.that(not wrong, f"prompt logprobs differ from cold at {wrong[:5]}")
    check.equal(warm, cold, "the answer after the scored prompt")
    again = await probe.send(prompt, 4, salt)
    check.cached(again, 300, "the prompt after it was scored")


async def one_past_pages(probe: Probe, check: Check) -> None:
    """C32 without speculation: exactly n pages warm, then one token more, alone and beside a
    decode."""
    prompt = probe.stream(640, 1)
    for beside in (False, True):
        salt = probe.salt()
        await probe.send(prompt, 4, salt)
        longer = [*prompt, 7]
        oracle = await probe.cold(longer, 8)
        busy = None
        if beside:
            busy = asyncio.create_task(probe.send(probe.stream(40, 2), 48, probe.salt()))
            await asyncio.sleep(0.05)
        reply = await probe.send(longer, 8, salt)
        name = "beside a decode" if beside else "alone"
        check.cached(reply, 640, name)
        check.equal(reply, oracle, name)
        if busy is not None:
            check.equal(await busy, await probe.cold(probe.stream(40, 2), 48), "the decode")


async def padded_batches(probe: Probe, check: Check) -> None:
    """C21 without graphs: batches of every awkward size answer as one request alone."""
    prompts = [probe.stream(40 + 23 * number, number) for number in range(7)]
    oracles = [await probe.cold(prompt, 12) for prompt in prompts]
    for width in (2, 3, 5, 6, 7):
        replies = await asyncio.gather(*(probe.cold(prompt, 12) for prompt in prompts[:width]))
        for at, reply in enumerate(replies):
            check.equal(reply, oracles[at], f"{width} at once, request {at + 1}")
