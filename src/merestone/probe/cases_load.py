"""Cases of stalls: aborts, queues, limits of the pool. Seconds are reported, not judged."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise
from statistics import median

from merestone.probe.client import Refused
from merestone.probe.context import Probe, total
from merestone.probe.reply import Reply
from merestone.probe.report import Check

SHORTEST_PATIENCE_S = 0.1
MOST_ATTEMPTS = 40
"""That a timed-out prefill may take, if each goes on where the last ended: some find the machine
busy with something else."""
AT_ONCE_S, LONGEST_LOOK_S = 5.0, 0.5
"""A server is idle at once within the former; of a look that took longer than the latter, only so
much is held against the server: it, or we, had to wait for a core."""
RUNNING = "merestone_requests_running"


async def abort_frees(probe: Probe, check: Check) -> None:
    """C35: a closed stream ends the prefill, too; the next request runs as on an idle server."""
    length = probe.pick(3000, 20000)
    if not probe.fits(check, length + 8):
        return
    short, salt = probe.stream(50, 2), probe.salt()
    oracle = await probe.cold(short, 8, stream=True)
    whole = await probe.cold(probe.stream(length, 1), 1, stream=True)
    check.note("whole prefill s", whole.first_s)
    left = await probe.server.abandon(probe.stream(length, 1), salt, min(0.5, 0.3 * whole.first_s))
    reply = await probe.send(short, 8, salt, stream=True)
    check.note("first s, idle", oracle.first_s)
    check.note("first s, after the abort", reply.first_s)
    check.equal(reply, oracle, "after the abort")
    if left and "metrics" in probe.have:
        most_s = max(0.7 * whole.first_s, AT_ONCE_S)
        idle_s = await _until_idle(probe, reply.first_s, 2 * most_s)
        check.note("idle s after the abort", idle_s)
        check.that(idle_s < most_s, f"still busy {idle_s:.1f} s after the abort")


async def _until_idle(probe: Probe, since_s: float, most_s: float) -> float:
    """Seconds until nothing runs, ``since_s`` of which have passed; gives up after ``most_s``."""
    looked = time.perf_counter()
    while total(await probe.server.metrics(), RUNNING) and since_s < most_s:
        await asyncio.sleep(0.02)
        before, looked = looked, time.perf_counter()
        since_s += min(looked - before, LONGEST_LOOK_S)
    return since_s


async def timeout_and_retry(probe: Probe, check: Check) -> None:
    """C36: a client that times out and retries goes on where the last attempt ended."""
    length = probe.pick(3000, 16000)
    if not probe.fits(check, length + 8):
        return
    prompt = probe.stream(length, 1)
    oracle = await probe.timed(prompt, 8)
    for share in (0.6, 0.3, 0.15):
        salt, patience = probe.salt(), share * oracle.first_s
        if patience < SHORTEST_PATIENCE_S:
            continue
        if await probe.server.abandon(prompt, salt, patience):
            break
    else:
        check.skipped.append("the prefill was too quick to time out")
        return
    check.note("patience s", patience)
    attempts = 1
    while attempts < MOST_ATTEMPTS and await probe.server.abandon(prompt, salt, patience):
        attempts += 1
    check.note("attempts", attempts + 1)
    reply = await probe.send(prompt, 8, salt)
    check.equal(reply, oracle, "the attempt that succeeds")
    check.that(reply.cached > 0, "every attempt began at zero")
    most = f"{MOST_ATTEMPTS} attempts did not finish what one takes a few times the patience for"
    check.that(attempts < MOST_ATTEMPTS, most)


async def cancelled_in_queue(probe: Probe, check: Check) -> None:
    """C42: requests cancelled while they wait do nothing to the one that decodes."""
    tokens = probe.pick(48, 200)
    prompt = probe.stream(60, 1)
    oracle = await probe.cold(prompt, tokens, stream=True)
    watched = asyncio.create_task(probe.cold(prompt, tokens, stream=True))
    await asyncio.sleep(0.05)
    gone = await asyncio.gather(
        *(probe.server.abandon(probe.stream(400, 2), probe.salt(), 0.1) for _ in range(16))
    )
    reply = await watched
    check.equal(reply, oracle, "the decode beside cancelled requests")
    check.note("cancelled", sum(gone))
    check.note("gap s alone", _gap(oracle))
    check.note("gap s beside", _gap(reply))


async def near_the_ceiling(probe: Probe, check: Check) -> None:
    """C49: prompts near what the pool holds are answered or refused, never turned in circles."""
    limit = probe.context
    most = probe.pick(4096, 40000)
    if limit is None or limit > most:
        check.skipped.append(f"a context of {limit} is too long to fill: at most {most} here")
        return
    oracle = await probe.cold(probe.stream(limit // 2, 1), 1, stream=True)
    patience = 8 * oracle.first_s + 60.0
    for share in (0.95, 0.98, 0.99, 1.0):
        prompt = probe.stream(int(share * limit), 2)
        try:
            async with asyncio.timeout(patience):
                reply = await probe.send(prompt, 1, probe.salt(), stream=True)
        except TimeoutError:
            check.that(False, f"{share:.0%}: neither an answer nor a refusal in {patience:.1f} s")
        except Refused as refusal:
            check.note(f"{share:.0%}", str(refusal)[:80])
            check.that(share == 1.0, f"{share:.0%} refused: {refusal}")
        else:
            check.note(f"{share:.0%} s", reply.first_s)
            check.that(len(reply.ids) == 1, f"{share:.0%}: {len(reply.ids)} tokens")


async def decodes_beside_prefill(probe: Probe, check: Check) -> None:
    """C51, reported: eight decodes while a long cold prompt comes in."""
    length, tokens = probe.pick((3000, 48), (32000, 200))
    if not probe.fits(check, length + 1):
        return
    prompts = [probe.stream(50, 2 + number) for number in range(8)]
    before = [await probe.cold(prompts[0], tokens, stream=True)]
    before += await asyncio.gather(*(probe.cold(p, tokens, stream=True) for p in prompts))
    decodes = [asyncio.create_task(probe.cold(p, tokens, stream=True)) for p in prompts]
    await asyncio.sleep(0.1)
    long = await probe.cold(probe.stream(length, 1), 1, stream=True)
    beside = await asyncio.gather(*decodes)
    for number, reply in enumerate(beside):
        check.equal(reply, before[number + 1], f"decode {number + 1}")
    check.note("gap s of eight", median(_gap(reply) for reply in before[1:]))
    check.note("gap s beside the prefill", median(_gap(reply) for reply in beside))
    check.note("longest gap s", max(_gap(reply, longest=True) for reply in beside))
    check.note("prefill s", long.first_s)


def _gap(reply: Reply, *, longest: bool = False) -> float:
    """Seconds between two streamed tokens: the median, or the longest."""
    arrivals = reply.arrivals
    gaps = [after - before for before, after in pairwise(arrivals)]
    if not gaps:
        return 0.0
    return max(gaps) if longest else median(gaps)
