"""The plan of one step and its result: all that crosses between deciding and doing.

Frozen, free of torch, plain integers only (no numpy scalars): msgspec sends a plan to the ranks,
and every one of them obeys it.
"""

from __future__ import annotations

from msgspec import Struct

from merestone.core.orders import CopyRows, LoadHidden, PageDelta, SaveHidden, StoreOrder


class SamplingParams(Struct, frozen=True, array_like=True):
    """How the tokens of a request are chosen. ``temperature == 0`` is greedy.

    ``seed`` keys the noise with the choice number and the position. ``logprobs`` is the number of
    top alternatives to report beside the chosen token (0: the chosen one alone), None for none.
    ``banned`` ids are never sampled while fewer than ``min_tokens`` outputs exist.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    banned: tuple[int, ...] = ()
    logprobs: int | None = None

    @property
    def unchanged(self) -> bool:
        """Whether logits are taken as they are: no token so far, bias or ban changes them."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return penalties == (1.0, 0.0, 0.0) and not (self.logit_bias or self.banned)


class Admit(Struct, frozen=True, array_like=True):
    """A request takes a slot. ``tokens`` are all ids known so far, the first ``prompt`` of them
    the prompt (penalties distinguish the two), as int32 in one piece: a long prompt as a tuple
    costs more than its replay. ``choice`` numbers the answers of one request. ``pages`` are the
    restored page tables."""

    slot: int
    tokens: bytes
    prompt: int
    choice: int
    params: SamplingParams
    pages: tuple[PageDelta, ...] = ()


class Work(Struct, frozen=True, array_like=True):
    """Rows [start, end) of one sequence; ``start == end`` with ``sample`` wants logits only.

    The recurrent layers start from the anchor at ``anchor`` tokens (no frames: the zero state) and
    the open rows [anchor, start). With ``advance > anchor`` the pass also writes the anchor at
    ``advance`` tokens, and open rows are kept from there only.

        0 ......... anchor ...... start ............ advance ...... end
                    |  open rows  |  computed by this work          |
                                                     |  open rows after it

    Of a plan made ahead (see :mod:`merestone.sched.ahead`) a work's one row may have no ``tokens``:
    it is that of the id that the plan before it draws for the slot.
    ``sample`` draws the token of position ``end`` from the last hidden row. The pass also computes
    rows [end, end + drafts) of the first ``drafts`` tokens that the slot has been proposed, and
    draws on for as long as they are what it draws. Then ``propose`` more tokens are proposed.
    ``prompt_logprobs`` asks for the log probabilities of the given ids at rows [start, end): the
    ids at positions start + 1 .. ; the number is that of top alternatives.
    """

    slot: int
    start: int
    end: int
    tokens: tuple[int, ...]
    pages: tuple[PageDelta, ...]
    anchor: int
    anchor_frames: tuple[int, ...]
    advance: int
    advance_frames: tuple[int, ...]
    sample: bool
    drafts: int = 0
    propose: int = 0
    prompt_logprobs: int | None = None
    targets: tuple[int, ...] = ()

    @property
    def fed(self) -> bool:
        """Whether the device takes the row's id from what it drew last."""
        return self.start < self.end and not self.tokens


class StepPlan(Struct, frozen=True, array_like=True):
    """One step. Launches run in this order: ``saves`` (of slots as they stand), ``frees``,
    ``admits``, ``before`` (restores, copy-on-write), works, ``after`` (boundary seals), ``stores``
    (copies of rows that no other order changes, and into frames that none reads). ``poll`` asks
    for nothing but what stores have to report."""

    step: int
    saves: tuple[SaveHidden, ...] = ()
    frees: tuple[int, ...] = ()
    admits: tuple[Admit, ...] = ()
    before: tuple[CopyRows | LoadHidden, ...] = ()
    works: tuple[Work, ...] = ()
    after: tuple[SaveHidden, ...] = ()
    stores: tuple[StoreOrder, ...] = ()
    poll: bool = False

    @property
    def empty(self) -> bool:
        return not (
            self.admits
            or self.saves
            or self.before
            or self.works
            or self.frees
            or self.stores
            or self.poll
        )


class TokenLogprob(Struct, frozen=True, array_like=True):
    """A token's log probability and the best alternatives, best first (ties: lowest id)."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0


class WorkResult(Struct, frozen=True, array_like=True):
    """What one work returned: the ``tokens`` drawn, none if nothing was sampled, all but the last
    of them accepted drafts. ``logprobs`` has an entry for each, or none at all."""

    slot: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


class StoreReport(Struct, frozen=True, array_like=True):
    """What became of one store order on one rank: ``error`` is a word, empty if it is done.

    ``sums`` and ``sizes`` are the checksums and bytes of an export's segments, in their order;
    ``broken`` are the addresses of those that an error is about, where it is about some.
    """

    ticket: int
    rank: int
    error: str = ""
    sums: tuple[bytes, ...] = ()
    sizes: tuple[int, ...] = ()
    broken: tuple[str, ...] = ()


class StepResult(Struct, frozen=True, array_like=True):
    """The result of a plan: one entry a work, in its order.

    ``bad_saves`` names the (frame, row) of saved hidden rows whose state was not finite, in
    ``saves`` or ``after``; ``bad_slots`` the slots whose logits or states were not finite.
    ``reports``: what every rank's stores finished since the last result.
    """

    step: int
    works: tuple[WorkResult, ...] = ()
    bad_saves: tuple[tuple[int, int], ...] = ()
    bad_slots: tuple[int, ...] = ()
    reports: tuple[StoreReport, ...] = ()
