"""Which drafts are accepted: one pure function.

Knows ids. Must not know how they were drawn.
"""

from __future__ import annotations

from collections.abc import Sequence


def accepted(drafts: Sequence[int], tokens: Sequence[int]) -> int:
    """How many drafts equal the target's own tokens, counted up to the first that does not.

    ``drafts`` are for positions n, n + 1, ...; ``tokens`` what the target drew for the same ones
    and one more. The token after the accepted ones is the target's, drawn from the right prefix;
    those behind it were drawn from a wrong one and mean nothing.
    """
    assert len(tokens) == len(drafts) + 1, (len(tokens), len(drafts))
    count = 0
    while count < len(drafts) and drafts[count] == tokens[count]:
        count += 1
    return count
