"""Policy: what to seal, where a prefill pass ends, what to evict. Pure functions of integers.

Knows boundaries, costs and kinds. Must not know frames' numbers, the index or a clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from merestone.core.checkpoint import Checkpoint, Kind

_SPECIFIC = (
    Kind.INSTRUCTION,
    Kind.TURN,
    Kind.TOOL,
    Kind.MESSAGE,
    Kind.REASONING,
    Kind.RESPONSE,
    Kind.MARK,
    Kind.JUNCTION,
    Kind.PROMPT,
    Kind.ALIGNED,
)

EARLY = (Kind.ALIGNED, Kind.REASONING)
"""Kinds that are seldom met again: a cut off request's state, and the end of a thought, which most
templates leave out of later prompts."""


@dataclass(frozen=True, slots=True)
class Cost:
    """The work of computing n tokens, in tokens' worth: ``linear * n + quadratic * n * n``, and
    ``start`` for a pass however short: it reads all weights.

    The default says that attention doubles the work of a prompt of 100,000 tokens.
    """

    linear: float = 1.0
    quadratic: float = 1e-5
    start: float = 32.0

    def of(self, tokens: int) -> float:
        return self.linear * tokens + self.quadratic * tokens * tokens


DEFAULT_COST = Cost()

EvictionKey = tuple[bool, bool, float, int, int]


def eviction_key(
    checkpoint: Checkpoint,
    above: int,
    size: float,
    cost: Cost,
    odds: float = 1.0,
    spared: bool = False,
) -> EvictionKey:
    """Sorts what to evict first: the kinds of ``EARLY``, then by priority, recency and id; those
    that a time to live spares come after all others.

    The priority is GreedyDual-Size (Cao and Irani, 1997): what a hit saves a byte, times the
    ``odds`` that there will be one, on top of the inflation value when last used. ``above``: tokens
    of the next best ancestor, from which the checkpoint would have to be recomputed. ``size``:
    bytes that it holds alone, and its part of the anchor that it shares.
    """
    saved = cost.start + cost.of(checkpoint.at) - cost.of(above)
    priority = checkpoint.base + odds * saved / size
    return spared, checkpoint.kind not in EARLY, priority, checkpoint.used, checkpoint.id


def boundaries_to_seal(
    prompt: int, wanted: Sequence[tuple[int, Kind]], grid: int = 0
) -> tuple[tuple[int, Kind], ...]:
    """The boundaries of a prompt of ``prompt`` tokens, ascending, one a token count.

    The prompt's end is always among them, as ``prompt``; elsewhere the more specific kind wins.
    Those outside (0, prompt] are left out. With a ``grid``, its multiples are all there are.
    """
    if grid:
        return tuple((at, Kind.ALIGNED) for at in range(grid, prompt + 1, grid))
    chosen: dict[int, Kind] = {}
    for at, kind in sorted(wanted, key=lambda pair: _SPECIFIC.index(pair[1])):
        if 0 < at <= prompt:
            chosen.setdefault(at, kind)
    if prompt > 0:
        chosen[prompt] = Kind.PROMPT
    return tuple(sorted(chosen.items()))


def pass_end(start: int, limit: int, known: int, chunk: int, boundaries: Sequence[int]) -> int:
    """Where a prefill pass that may compute rows [start, limit) ends; ``known``: the prompt's end.

    A pass that ends at e leaves its anchor at the multiple of ``chunk`` below e, so it can seal the
    boundaries of e's chunk and must not run past an earlier one. Without boundaries on the way it
    ends at a multiple of ``chunk`` (no open rows to keep) or at the prompt's end. With greedy ends
    the number of passes is minimal: to stand further is never worse.
    """
    assert start < limit <= known
    first = min((b for b in boundaries if start < b <= limit), default=None)
    if first is None:
        aligned = limit // chunk * chunk
        return limit if limit == known or aligned <= start else aligned
    top = min(limit, (first // chunk + 1) * chunk - 1)
    if limit < known or top == limit:
        return top
    # The rest fits into one pass: what follows the last boundary here is cheaper done there.
    return max(b for b in boundaries if b <= top)
