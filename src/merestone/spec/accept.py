"""Which drafts are accepted: one pure function.

Knows ids. Must not know how they were drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


def accept(drafts: Sequence[int], draw: Callable[[int], int]) -> tuple[int, ...]:
    """The target's own tokens: the accepted drafts, and one more.

    ``drafts`` are for positions n, n + 1, ...; ``draw(i)`` is what the target draws for n + i,
    given that it drew the drafts before. It is called in order, up to the first token that is not
    the draft: that one was still drawn from the right prefix, those behind it would not be. So
    the tokens are those of a run without drafts, whatever the drafts are.
    """
    tokens: list[int] = []
    for place in range(len(drafts) + 1):
        tokens.append(draw(place))
        if place == len(drafts) or tokens[place] != drafts[place]:
            break
    return tuple(tokens)
