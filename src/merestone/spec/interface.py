"""The one seam between a drafter and the device that runs it.

Knows rows, pages and ids. Must not know who owns pages, which drafts will be verified, or how.

A step of the target computes rows; some of them are *committed* (their tokens are final). The
drafter observes the committed rows, then proposes tokens for the sequences that sampled one:

    committed rows      0 ........ first ........ position - 1 | position | + 1 ... + depth
    of one sequence     | earlier passes | observed now        |  newest  |  drafts
                                                                  token, no target row yet

Nothing that a drafter does changes a token of the answer: drafts are only ever compared with the
target's own. But what it keeps of committed rows is part of a checkpoint, so that a restored
request is drafted for as well as a cold one: the same bits, whatever the splits of observation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from merestone.layers.state import Batch, Field, StateViews
from merestone.sched.plan import SamplingParams


@dataclass(frozen=True, slots=True)
class DraftGroup:
    """A cache group that a drafter brings along: the home of some of its fields.

    ``window``: only so many of the last rows are ever read (None: all). There are pages for the
    rows that a pass observes, and none to write proposals to. ``multiple``: a page must hold a
    multiple of so many tokens. ``dealt``: ranks that share the target's tokens share these, too, in
    runs of ``multiple``; else each rank has all rows.
    """

    name: str
    window: int | None = None
    multiple: int = 1
    dealt: bool = False


@dataclass(frozen=True, slots=True)
class Continuation:
    """A sequence that wants drafts for ``position + 1`` and after.

    ``token`` is its newest id, at ``position``, of which the target has no row yet. ``row`` is the
    batch row of ``position - 1`` in this step's :class:`DraftRows`, -1 if that was observed before
    (never so with a lag). ``pages`` as in a Segment. ``params`` and ``choice`` key the noise that
    the target will add at a position: a drafter that adds the same agrees with it more often.
    ``depth``: drafts wanted, at least one.
    """

    position: int
    token: int
    depth: int
    row: int
    pages: dict[str, Tensor]
    params: SamplingParams
    choice: int


@dataclass(slots=True)
class DraftRows:
    """What a step committed, sequence after sequence, and who wants drafts.

    ``batch`` has one segment for each sequence with rows to observe; of a windowed group there are
    pages from the row ``window + lag`` below the segment's ``advance`` on only. ``batch.tokens``
    [N] are the *next* ids (row p has that of p + 1; -1 where it is not known, only without a lag),
    its scratch is the drafter's, from ``observe`` to ``propose``. ``hidden`` [N, D] are the
    target's rows after its final norm, ``features`` [N, taps * D] what the tapped layers gave, None
    without taps.
    """

    batch: Batch
    hidden: Tensor
    features: Tensor | None
    continuations: tuple[Continuation, ...]


@dataclass(frozen=True, slots=True)
class Drafts:
    """Proposed ids [S, K] int64, a row for each continuation, K at least the largest depth wanted;
    a row's ids past its own depth are ignored.

    ``candidates`` and ``probabilities`` [S, K, M]: the distribution that each id was drawn
    from, given the ids before it (0 outside). None: there was no chance in it.
    """

    ids: Tensor
    candidates: Tensor | None = None
    probabilities: Tensor | None = None


class Drafter(Protocol):
    """Proposes tokens. All its state lives in fields of its own groups.

    ``depth``: tokens that it proposes at most. ``lag``: 1 if row p needs the id at p + 1, else 0;
    a pass over target rows [start, end) then has it observe [start - 1, end - 1), and row end - 1
    too if drafts are wanted: row start - 1 may be observed twice, with the same content.
    ``features``: target layers whose outputs it wants (lag 0 only).
    """

    depth: int
    lag: int
    features: tuple[int, ...]
    groups: tuple[DraftGroup, ...]

    def fields(self) -> tuple[Field, ...]:
        """Its state. Layer numbers must not be the target's; homes are ``groups``."""
        ...

    def observe(self, rows: DraftRows, state: StateViews) -> None:
        """Keep what later proposals need of the committed rows. Called once a step."""
        ...

    def propose(self, rows: DraftRows, state: StateViews) -> Drafts:
        """The next tokens of every continuation (there is one), after ``observe`` of the same
        rows."""
        ...
