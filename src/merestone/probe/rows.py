"""Every row, in order, and how they are run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from merestone.probe import (
    cases_load,
    cases_places,
    cases_reuse,
    cases_wrong,
    chat,
    ladder,
    records,
)
from merestone.probe.client import Refused
from merestone.probe.context import DISTURBANCES, Probe
from merestone.probe.reply import Broken, Unsupported
from merestone.probe.report import PASS, Check, RowResult, conclude

COLD = "ids tokens logprobs cached salt"
IDS = f"{COLD} power"
MARKS = f"{IDS} marks"
CHAT = f"{IDS} chat"
RENDER = f"{CHAT} render"

ROWS: list[tuple[str, str, ladder.Row]] = [
    ("power", COLD, ladder.power),
    ("counter", IDS, ladder.honest_counter),
    ("C46", f"{IDS} metrics", cases_reuse.shared_memory),  # while the pool has room to grow
    *((f"replay-{kind}", IDS, ladder.replay(kind)) for kind in DISTURBANCES[:3]),
    *((f"replay-{width}-at-once", IDS, ladder.replay_at(width)) for width in (4, 16)),
    ("appended", IDS, ladder.appended),
    ("open-case", IDS, ladder.open_case),
    ("chat-thinking-stripped", CHAT, chat.eight_turns({})),
    ("chat-thinking-kept", CHAT, chat.eight_turns({"clear_thinking": False})),
    ("C01", IDS, cases_reuse.below_a_page),
    ("C02", RENDER, chat.exact_instruction),
    ("C03", IDS, cases_reuse.longer_than_the_limit),
    ("C04", RENDER, chat.shared_instructions),
    ("C05", RENDER, chat.shared_instructions_at_once),
    ("C06", MARKS, cases_reuse.fine_boundaries),
    ("C08", IDS, cases_reuse.last_page),
    ("C10", IDS, cases_reuse.around_the_grid),
    ("C11", IDS, cases_reuse.chunk_budget),
    ("C14", f"{IDS} metrics", cases_reuse.accounts),
    ("C18", IDS, cases_wrong.retry_after_abort),
    ("C20", IDS, cases_wrong.own_prefix),
    ("C21", IDS, cases_wrong.padded_batches),
    ("C22", IDS, cases_wrong.one_past_a_chunk),
    ("C23", IDS, cases_wrong.empty_insertions),
    ("C24", CHAT, chat.dropped_thinking),
    ("C28", IDS, cases_wrong.no_leak),
    ("C29", f"{IDS} scored", cases_wrong.scored_prompts),
    ("C32", IDS, cases_wrong.one_past_pages),
    ("C33", IDS, cases_reuse.short_turns),
    ("C35", IDS, cases_load.abort_frees),
    ("C36", IDS, cases_load.timeout_and_retry),
    ("C37", MARKS, cases_reuse.dropped_messages),
    ("earlier-messages", RENDER, cases_places.earlier_messages),
    ("C38", CHAT, chat.tool_rounds),
    ("C39", RENDER, chat.trailing_time),
    ("C40", f"{RENDER} marks", chat.both_dialects),
    ("C42", IDS, cases_load.cancelled_in_queue),
    ("C44", IDS, cases_reuse.no_alternation),
    ("C47", CHAT, chat.thinking_off),
    ("C48", CHAT, chat.tool_loop),
    ("junction", IDS, cases_places.junction),
    ("cache-control", RENDER, cases_places.marked_part),
    ("C49", COLD, cases_load.near_the_ceiling),
    ("C50", IDS, cases_reuse.restores_together),
    ("C51", IDS, cases_load.decodes_beside_prefill),
    ("C52", CHAT, chat.long_runs),
    # Last: in a full pool whatever is worth least is evicted at once, as it should be.
    ("replay-overturned", IDS, ladder.replay("overturned")),
]
"""(name, what the server must be able to do, the row). Case numbers are the names of rows; C17 is
the ladder's disturbances, C43 is in C01, C27 in C20. Any model shows these; ``records.ROWS`` need
one that answers."""

_WHAT = {
    "ids": "prompts of token ids",
    "tokens": "return_token_ids",
    "logprobs": "log probabilities",
    "cached": "cached_tokens in usage",
    "salt": "cache_salt",
    "power": "answers that depend on a prompt's beginning",
    "marks": "cache_boundaries",
    "scored": "prompt_logprobs",
    "chat": "a chat endpoint with token ids, log probabilities and cached_tokens",
    "render": "/tokenize of messages",
    "metrics": "/metrics",
}


def select(names: Sequence[str]) -> list[tuple[str, str, ladder.Row]]:
    """The rows of these names; all of them, if there are none. ``power`` is always the first.

    Raises:
        ValueError: there is no row of a name.
    """
    rows = [*ROWS[:-1], *records.ROWS, ROWS[-1]]
    known = {name for name, _, _ in rows}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"no row named {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    return [row for row in rows if not names or row[0] in {*names, "power"}]


async def run(
    probe: Probe,
    rows: Sequence[tuple[str, str, ladder.Row]],
    finished: Callable[[RowResult], None] = lambda result: None,
) -> list[RowResult]:
    """Run rows one after another; ``finished`` hears of each."""
    results = []
    for name, needs, row in rows:
        result = await run_row(probe, name, needs, row)
        if name == "power" and result.verdict == PASS:
            probe = replace(probe, have=probe.have | {"power"})
        results.append(result)
        finished(result)
    return results


async def run_row(probe: Probe, name: str, needs: str, row: ladder.Row) -> RowResult:
    """Run one row and conclude. What a server lacks is no failure; what it refuses is one only
    after it has begun to answer."""
    check, began = Check(), time.perf_counter()
    missing: str | None = None
    lacks = [_WHAT[need] for need in needs.split() if need not in probe.have]
    if lacks:
        return conclude(name, check, 0.0, "the server lacks " + ", ".join(lacks))
    try:
        await row(probe, check)
    except* Unsupported as group:
        missing = str(_first(group))
    except* Broken as group:
        check.that(False, str(_first(group)))
    except* Refused as group:
        if check.done:
            check.that(False, str(_first(group)))
        else:
            missing = str(_first(group))
    return conclude(name, check, time.perf_counter() - began, missing)


def _first(group: BaseException) -> BaseException:
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    return group
