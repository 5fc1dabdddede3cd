"""The replay ladder, appended responses and the open case: exact prompts, sent again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from merestone.probe import streams
from merestone.probe.context import Probe, gather
from merestone.probe.reply import Reply, Unsupported, difference
from merestone.probe.report import Check

SHORT = (1, 2, 63, 64, 65, 127, 128, 129, 1159)
LONG = (2048, 8191, 8192, 8193)
LONGEST = 32768

Row = Callable[[Probe, Check], Awaitable[None]]


async def power(probe: Probe, check: Check) -> None:
    """A wrong head before the right last 64 tokens must change the answer, 8 of 8 times; else no
    equality below means anything."""
    changed = by_ids = 0
    for number in range(8):
        right = probe.stream(192, number)
        wrong = probe.stream(128, number + 8) + right[128:]
        one, other = await probe.cold(right, 8), await probe.cold(wrong, 8)
        changed += difference(one, other) is not None
        by_ids += one.ids != other.ids
    check.note("changed", changed)
    check.note("changed in ids", by_ids)
    if changed < 8:
        raise Unsupported(f"a wrong head changed {changed} of 8 answers: equality has no power")
    check.that(True, "")


class _Rung:
    """One prompt of the ladder: a cold control and three sends under one salt."""

    def __init__(self, probe: Probe, check: Check, length: int, number: int, tokens: int) -> None:
        self.probe, self.check, self.tokens = probe, check, tokens
        self.prompt = probe.stream(length, number)
        self.name = f"{length} tokens"
        self.salt = probe.salt()
        self.oracle = Reply()

    async def first(self) -> None:
        self.oracle = await self.probe.cold(self.prompt, self.tokens)
        reply = await self.probe.send(self.prompt, self.tokens, self.salt)
        self.check.cached(reply, 0, f"{self.name}, first")
        self.check.equal(reply, self.oracle, f"{self.name}, first")

    async def again(self, leg: str, kept: bool = True) -> None:
        reply = await self.probe.send(self.prompt, self.tokens, self.salt)
        if kept:
            self.check.cached(reply, len(self.prompt), f"{self.name}, {leg}")
        else:
            self.check.note("C after", reply.cached)
        self.check.equal(reply, self.oracle, f"{self.name}, {leg}")


async def climb(
    probe: Probe, check: Check, lengths: Sequence[int], kind: str = "quiet", width: int = 1
) -> None:
    """Send every prompt three times, ``width`` prompts at a time, under a disturbance (C17)."""
    tokens = probe.pick(16, 256)
    fitting = [n for n in lengths if probe.fits(check, n + tokens)]
    repeats = -(-width // max(len(fitting), 1))
    rungs = [
        _Rung(probe, check, length, number, tokens)
        for number, length in enumerate(fitting * repeats)
    ]
    await gather(width, [rung.first for rung in rungs])
    for leg in ("second", "third"):
        if kind == "between":
            for rung in rungs:
                async with probe.disturbed(kind):
                    await rung.again(leg)
            continue
        # Turning the pool over may evict a prompt: its second send then computes it anew.
        kept = kind != "overturned" or leg == "third"
        async with probe.disturbed("quiet" if kept and kind == "overturned" else kind):
            if kept:
                # All at once beside prefills, which would else turn the pool over meanwhile.
                at_once = len(rungs) if kind == "inflight" else width
                await gather(at_once, [partial(rung.again, leg) for rung in rungs])
            else:
                for rung in rungs:
                    await rung.again(leg, kept=False)
                    await rung.again(f"{leg}, at once")


def replay(kind: str) -> Row:
    """A row of the ladder under one disturbance, one request at a time."""

    async def row(probe: Probe, check: Check) -> None:
        lengths = SHORT if not probe.full else (*SHORT, *LONG)
        if probe.full and kind == "quiet":
            lengths = (*lengths, LONGEST)
        await climb(probe, check, lengths, kind)

    return row


def replay_at(width: int) -> Row:
    """A row of the quiet ladder at a concurrency."""

    async def row(probe: Probe, check: Check) -> None:
        await climb(probe, check, probe.pick(SHORT, (*SHORT, *LONG)), width=width)

    return row


async def appended(probe: Probe, check: Check) -> None:
    """A response appended to its prompt, and more behind it: all but its last token is restored."""
    tokens = probe.pick(16, 256)
    for number, length in enumerate(probe.pick((1, 64, 129, 500), (*SHORT, *LONG))):
        if not probe.fits(check, length + 2 * tokens + 2):
            continue
        salt, prompt = probe.salt(), probe.stream(length, number)
        first = await probe.send(prompt, tokens, salt)
        longer = prompt + first.ids + probe.stream(2, number + 32)
        reply = await probe.send(longer, tokens, salt)
        check.cached(reply, length + tokens - 1, f"{length} tokens and their response")
        check.equal(reply, await probe.cold(longer, tokens), f"{length} tokens and their response")


async def open_case(probe: Probe, check: Check) -> None:
    """The periodic prompt whose cold runs differed elsewhere: all runs and continuations equal."""
    length, tokens, runs = probe.pick((1023, 16, 3), (8191, 256, 10))
    if not probe.fits(check, length + 2 * tokens + 5):
        return
    prompt = streams.periodic(length, vocab=probe.vocab)
    oracle = await probe.cold(prompt, tokens)
    for run in range(1, runs):
        check.equal(await probe.cold(prompt, tokens), oracle, f"cold run {run + 1}")
    salt = probe.salt()
    for leg in range(3):
        reply = await probe.send(prompt, tokens, salt)
        check.cached(reply, length if leg else 0, f"send {leg + 1}")
        check.equal(reply, oracle, f"send {leg + 1}")
    longer = [*prompt, *oracle.ids, *streams.periodic(5, vocab=probe.vocab)]
    reply = await probe.send(longer, tokens, salt)
    check.cached(reply, length + tokens - 1, "continuation")
    check.equal(reply, await probe.cold(longer, tokens), "continuation")


async def honest_counter(probe: Probe, check: Check) -> None:
    """The hit counter against the clock (rule 3): a prompt said to be restored must begin sooner.

    A ratio on one machine, not a limit: half the time of a cold one, where cold takes 0.2 s. The
    quickest of three stand for both: the others had to wait for something else.
    """
    length = 1000
    while True:
        if not probe.fits(check, length + 1):
            return
        prompt, salt = probe.stream(length, 1), probe.salt()
        colds = [await probe.cold(prompt, 1, stream=True) for _ in range(3)]
        cold_s = min(reply.first_s for reply in colds)
        if cold_s >= 0.2:
            break
        length *= 2
    await probe.send(prompt, 1, salt)
    warm = [await probe.send(prompt, 1, salt, stream=True) for _ in range(3)]
    warm_s = min(reply.first_s for reply in warm)
    check.note("tokens", length)
    check.note("cold s", cold_s)
    check.note("warm s", warm_s)
    restored = min(reply.cached for reply in warm)
    if restored == length:
        what = f"C says that all {length} tokens were restored, in {warm_s / cold_s:.2f} of cold"
        check.that(warm_s < cold_s / 2, what)
    else:
        check.that(False, f"C={restored} of {length} tokens sent again")
