"""Cases of lost reuse and of wrong accounts, on plain token ids. Names are those of the cases."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from merestone.probe.context import Probe, total
from merestone.probe.conversation import Conversation
from merestone.probe.reply import Unsupported
from merestone.probe.report import Check

LOOKUPS = "merestone_lookups_total"
FRAMES = "merestone_frames_used"
PREEMPTIONS = "merestone_preemptions_total"


async def _twice(probe: Probe, check: Check, lengths: Sequence[int], tokens: int = 8) -> None:
    """Each prompt cold and twice more: the whole prompt is restored, with the oracle's answer."""
    for number, length in enumerate(lengths):
        if not probe.fits(check, length + tokens):
            continue
        prompt, salt = probe.stream(length, number), probe.salt()
        oracle = await probe.cold(prompt, tokens)
        await probe.send(prompt, tokens, salt)
        reply = await probe.send(prompt, tokens, salt)
        check.cached(reply, length, f"{length} tokens again")
        check.equal(reply, oracle, f"{length} tokens again")


async def below_a_page(probe: Probe, check: Check) -> None:
    """C01, C43: prompts around an inflated page, sent again whole."""
    await _twice(probe, check, (1, 2, 63, 480, 527, 528, 529))


async def longer_than_the_limit(probe: Probe, check: Check) -> None:
    """C03: a prompt of 2,000 tokens is reusable, whatever page the context limit leads to."""
    await _twice(probe, check, (2000,))


async def around_the_grid(probe: Probe, check: Check) -> None:
    """C10 on one rank: lengths around states and pages; a divergent last token takes neither."""
    lengths = probe.pick((255, 256, 257), (255, 256, 257, 2047, 2048, 2049, 8191, 8192, 8193))
    await _twice(probe, check, lengths, 4)
    for number, length in enumerate(lengths):
        if not probe.fits(check, length + 4):
            continue
        talk = Conversation(probe, check)
        prompt = probe.stream(length, number)
        other = [*prompt[:-1], (prompt[-1] + 1) % probe.vocab]
        await talk.ask(prompt, 4, f"{length} tokens")
        reply = await talk.ask(other, 4, f"{length} tokens, another last one")
        check.cached(reply, 0, f"{length} tokens, another last one")


async def chunk_budget(probe: Probe, check: Check) -> None:
    """C11, what one server can show: a prompt of many prefill chunks is kept whole."""
    await _twice(probe, check, probe.pick((2048,), (8192, 16384)))


async def fine_boundaries(probe: Probe, check: Check) -> None:
    """C06: a marked beginning of 560 tokens serves every prompt that shares it."""
    shared = probe.stream(560, 1)
    talk = Conversation(probe, check)
    for number in (2, 3, 4):
        prompt = shared + probe.stream(probe.pick(500, 1386), number)
        reply = await talk.ask(prompt, 8, f"suffix {number}", marks=[560])
        check.cached(reply, 560 if number > 2 else 0, f"suffix {number}")


async def last_page(probe: Probe, check: Check) -> None:
    """C08: a prompt's end is a boundary wherever it falls; two more tokens keep all of it."""
    for number, length in enumerate(probe.pick((950, 1159), (950, 970, 1159, 1440))):
        talk = Conversation(probe, check)
        prompt = probe.stream(length, number)
        await talk.ask(prompt, 8, f"{length} tokens")
        reply = await talk.ask(prompt + probe.stream(3, 40), 8, f"{length} + 3 tokens")
        check.cached(reply, length, f"{length} + 3 tokens")


async def accounts(probe: Probe, check: Check) -> None:
    """C14 and C02's last line: metrics separate looked up, hit, not eligible and eligible without
    a state, and name the smallest reusable length."""
    before = await probe.server.metrics()
    if not any(name.startswith(LOOKUPS) for name in before) and total(before, LOOKUPS) is None:
        raise Unsupported(f"/metrics has no {LOOKUPS}")
    salt = probe.salt()
    for _ in range(2):
        for number in range(10):
            await probe.send(probe.stream(100, number), 1, salt)
    after = await probe.server.metrics()

    def grown(outcome: str) -> float:
        name = f'{LOOKUPS}{{outcome="{outcome}"}}'
        return after.get(name, 0.0) - before.get(name, 0.0)

    check.that(grown("exact") == 10, f"10 exact hits are counted as {grown('exact'):.0f}")
    check.that(grown("miss") == 10, f"10 first sightings are counted as {grown('miss'):.0f}")
    if "scored" in probe.have:
        await probe.server.complete(probe.stream(9, 11), 1, salt=salt, prompt_logprobs=1)
        after = await probe.server.metrics()
        seen = grown("not_eligible")
        check.that(seen == 1, f"one request that cannot hit is counted as {seen:.0f}")
    smallest = [value for name, value in after.items() if "smallest_reusable" in name]
    check.that(bool(smallest), "/metrics does not name the smallest reusable length")
    check.note("smallest reusable", smallest)


async def short_turns(probe: Probe, check: Check) -> None:
    """C33: 30 tokens and a reply of 20, then 15 more: all but the last returned token."""
    talk = Conversation(probe, check)
    first = await talk.ask(probe.stream(30, 1), 20, "turn 1")
    longer = probe.stream(30, 1) + first.ids + probe.stream(15, 2)
    check.cached(await talk.ask(longer, 20, "turn 2"), 49, "turn 2")


async def no_alternation(probe: Probe, check: Check) -> None:
    """C44: an append-only chat of eight turns hits on every one of them."""
    talk = Conversation(probe, check)
    size, tokens = probe.pick((90, 8), (450, 32))
    prompt = probe.stream(size, 0)
    last = 0
    for turn in range(8):
        reply = await talk.ask(prompt, tokens, f"turn {turn + 1}")
        check.cached(reply, last, f"turn {turn + 1}")
        last = len(prompt) + tokens - 1
        prompt = prompt + reply.ids + probe.stream(size, turn + 1)


async def dropped_messages(probe: Probe, check: Check) -> None:
    """C37: marks at every message's end; a client that drops the last 1, 2 or 5 goes back."""
    talk = Conversation(probe, check)
    size = probe.pick(40, 150)
    prompt: list[int] = []
    ends: list[int] = []
    for number in range(12):
        prompt = prompt + probe.stream(size, number)
        ends.append(len(prompt))
        await talk.ask(prompt, 4, f"message {number + 1}", marks=ends[:-1])
    for dropped in (1, 2, 5):
        kept = ends[-1 - dropped]
        question = prompt[:kept] + probe.stream(20, 20 + dropped)
        reply = await talk.ask(question, 4, f"{dropped} dropped")
        check.at_least(reply, kept, f"{dropped} dropped")


async def shared_memory(probe: Probe, check: Check) -> None:
    """C46: near-identical requests each add what only they hold, not a copy of all."""
    size, sends = probe.pick((500, 10), (2000, 50))
    prompt, salt = probe.stream(size, 1), probe.salt()

    async def used() -> float:
        value = total(await probe.server.metrics(), FRAMES)
        if value is None:
            raise Unsupported(f"/metrics has no {FRAMES}")
        return value

    start = await used()
    await probe.send(prompt, 1, salt)
    alone = await used() - start
    before = await used()
    for number in range(sends):
        longer = prompt + probe.stream(10, number + 2)
        reply = await probe.send(longer, 1, salt)
        check.cached(reply, size, f"send {number + 1}")
    added = (await used() - before) / sends
    check.equal(reply, await probe.cold(longer, 1), "the last send")
    check.note("frames of a cold prompt", alone)
    check.note("frames added a send", added)
    if alone <= 0:
        check.skipped.append("the pool is full: nothing can be seen of its growth")
        return
    check.that(added <= alone, f"a send adds {added:.1f} frames, a cold prompt took {alone:.0f}")


async def restores_together(probe: Probe, check: Check) -> None:
    """C50: continuations that arrive together do not take each other's states."""
    salt = probe.salt()
    prompts = [probe.stream(probe.pick(300, 800), number) for number in range(6)]
    for prompt in prompts:
        await probe.send(prompt, 1, salt)
    before = await _preemptions(probe)
    longer = [prompt + probe.stream(8, 30 + at) for at, prompt in enumerate(prompts[:4])]
    replies = await asyncio.gather(*(probe.send(prompt, 8, salt) for prompt in longer))
    for at, (prompt, reply) in enumerate(zip(longer, replies, strict=True)):
        check.cached(reply, len(prompts[at]), f"continuation {at + 1}")
        check.equal(reply, await probe.cold(prompt, 8), f"continuation {at + 1}")
    after = await _preemptions(probe)
    if before is not None and after is not None:
        check.that(after == before, f"{after - before:.0f} preemptions")


async def _preemptions(probe: Probe) -> float | None:
    if "metrics" not in probe.have:
        return None
    return total(await probe.server.metrics(), PREEMPTIONS)
