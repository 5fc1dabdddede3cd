"""One answer in the making, as counters: computed, known, prompt.

Knows token ids and counts. Must not know frames' contents, text, clocks or devices.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from merestone.core.cache import Cache, Lease, Match
from merestone.core.checkpoint import Checkpoint, Kind, Root
from merestone.core.explain import explain
from merestone.sched.plan import SamplingParams, TokenLogprob
from merestone.sched.tally import Tally

Tokens = NDArray[np.int32]


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of a request. A step moves ``computed`` toward ``known``.

        0 ........ restored ........ computed ........ prompt ........ known
        |  from a checkpoint  |  by passes  |  still to do  |  outputs  |

    ``computed`` rows exist; ``known`` ids are final (prompt and accepted outputs). Decoding is the
    case ``known == computed + 1``; an exact hit starts at ``computed == known`` and needs logits
    only. ``boundaries`` are where it is sealed, ascending: those of its prompt, and behind each
    accepted output that is a key of ``ends``. With a ``grid`` they are its multiples instead.
    ``lives``: seconds for which eviction spares the checkpoint at a token count.
    ``drafts`` ids past ``known`` are proposed, and lie on the device.
    """

    id: str
    choice: int
    root: Root
    prompt: int
    buffer: Tokens
    known: int
    params: SamplingParams
    max_tokens: int
    stop_ids: frozenset[int]
    boundaries: tuple[tuple[int, Kind], ...]
    seals: bool
    """Whether checkpoints are made of it."""
    matches: bool
    """Whether it may start from a checkpoint."""
    priority: int
    arrival: int
    prompt_logprobs: int | None = None
    grid: int = 0
    ends: Mapping[int, Kind] = field(default_factory=dict)
    lives: Mapping[int, float] = field(default_factory=dict)

    computed: int = 0
    passed: int = 0
    """Rows that passes ended at; accepted drafts lie above."""
    slot: int = -1
    lease: Lease | None = None
    protects: Checkpoint | None = None
    looked_up: bool = False
    overtaken: int = 0
    waits_for: tuple[Sequence, int] | None = None
    inherited: int | None = None
    matched: int = 0
    restored: int = 0
    kind: str | None = None
    lost: str = ""
    written: int = 0
    """The deepest boundary of its prompt that it has published."""
    admitted: bool = False
    preemptions: int = 0
    drafts: int = 0
    tally: Tally = field(default_factory=Tally)
    acceptance: float | None = None
    """Drafts accepted a step, lately."""
    scored: list[TokenLogprob] = field(default_factory=list)
    """Log probabilities of prompt ids, as they come."""

    @property
    def tokens(self) -> Tokens:
        return self.buffer[: self.known]

    @property
    def outputs(self) -> int:
        return self.known - self.prompt

    @property
    def left(self) -> int:
        """Tokens that it may still be given."""
        return self.max_tokens - self.outputs

    @property
    def rank(self) -> tuple[int, int, int]:
        """Lower runs first. A leader runs at the priority of whoever waits for it."""
        priority = self.priority if self.inherited is None else self.inherited
        return priority, self.arrival, self.choice

    @property
    def decoding(self) -> bool:
        return self.outputs > 0 and self.known - self.computed <= 1

    def append(self, token: int) -> None:
        if self.known == len(self.buffer):
            self.buffer = np.resize(self.buffer, max(2 * len(self.buffer), 64))
        self.buffer[self.known] = token
        self.known += 1
        kind = self.ends.get(token)
        if self.grid:
            kind = None if self.known % self.grid else Kind.ALIGNED
        if kind is not None:
            self.boundaries = (*self.boundaries, (self.known, kind))

    def truncate(self, known: int) -> None:
        """The answer ends at ``known`` ids, in the middle of what a step drew."""
        assert self.prompt < known <= self.known
        self.known, self.computed = known, min(self.computed, known - 1)
        self.boundaries = self.boundaries[: bisect_right(self.boundaries, known, key=_at)]

    def stop_reason(self, known: int) -> tuple[str, int | None] | None:
        """("stop", id) or ("length", None) if the last of ``known`` ids, an output, ends it."""
        outputs = known - self.prompt
        if outputs >= self.params.min_tokens:
            last = int(self.buffer[known - 1])
            if last in self.stop_ids:
                return "stop", last
        if outputs >= self.max_tokens:
            return "length", None
        return None

    def promised(self, cache: Cache) -> int:
        """Frames that its prompt (and a page) may still take."""
        assert self.lease is not None
        need = cache.frames_needed(self.known + 1)
        return max(0, need - self.lease.held)

    def requeue(self) -> None:
        """Back to before admission; accepted outputs stay, as part of what is known."""
        self.slot, self.computed, self.drafts = -1, 0, 0
        self.inherited = None
        self.preemptions += 1
        self.scored.clear()

    def distrust(self, reason: str) -> None:
        """What it started from was not right: back to the queue, to match nothing."""
        self.requeue()
        self.matches = False
        self.restored, self.kind, self.lost = 0, None, reason

    def targets(self, start: int, end: int) -> tuple[int, ...]:
        """Ids whose log probabilities rows [start, end) of the prompt are asked for."""
        if self.prompt_logprobs is None:
            return ()
        return tuple(self.buffer[start + 1 : min(end + 1, self.prompt)].tolist())

    @property
    def resumable(self) -> bool:
        """Whether it can be sealed where it stands: there is a row beyond what it started from, and
        no plan ahead has moved the anchor past it."""
        assert self.lease is not None
        origin = self.lease.origin
        return self.computed > (origin.at if origin else 0) and self.lease.anchor <= self.computed

    def admit(self, found: Match, cache: Cache) -> None:
        """Start from what was found. The first time, remember it for the report.

        Where the tokens part from known ones, at least a chunk above any boundary, a junction is
        planned: whoever parts there next finds it. Closer, it would save less than it costs.
        """
        origin = found.checkpoint
        self.computed = self.passed = origin.at if origin else 0
        if not self.admitted:
            self.admitted = True
            self.matched, self.lost = explain(cache, self.root, self.tokens, found)
            self.restored = self.computed
            self.kind = str(origin.kind) if origin else None
        for at, ttl_s in self.lives.items():
            if at <= self.computed:
                cache.mark(self.root, self.tokens[:at], ttl_s)
        if self.grid or found.known >= self.known:
            return
        place = bisect_right(self.boundaries, found.known, key=_at)
        above = max(self.computed, self.boundaries[place - 1][0] if place else 0)
        if found.known - above >= cache.spec.chunk:
            junction = ((found.known, Kind.JUNCTION),)
            self.boundaries = self.boundaries[:place] + junction + self.boundaries[place:]

    def above(self, rows: int) -> tuple[tuple[int, Kind], ...]:
        """Boundaries above ``rows`` tokens that it is to seal."""
        if not self.seals or not self.boundaries or self.boundaries[-1][0] <= rows:
            return ()
        return self.boundaries[bisect_right(self.boundaries, rows, key=_at) :]

    def planned(self) -> tuple[int, ...]:
        """Token counts of those yet to be reached: a prefill pass must not overrun them."""
        return tuple(at for at, _ in self.above(self.computed))


def promises(running: Iterable[Sequence], cache: Cache) -> int:
    """Frames that the running ones may still take for their prompts."""
    return sum(seq.promised(cache) for seq in running)


def _at(boundary: tuple[int, Kind]) -> int:
    return boundary[0]
