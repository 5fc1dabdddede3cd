"""What is refused at the door, and one choice on its way out, verb by verb."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from merestone.core.checkpoint import Kind
from merestone.engine.api import (
    DraftReport,
    EngineInfo,
    EngineRefusal,
    Finished,
    GenerateRequest,
    Started,
    TokenEvent,
)
from merestone.engine.choice import Choice, check, sequence_of
from merestone.sched.plan import SamplingParams, TokenLogprob, WorkResult

INFO = EngineInfo("fake", context_limit=12, vocab_size=50, eos_ids=(), retention="boundaries")
PLAIN = GenerateRequest("r", tuple(range(9)), SamplingParams(), 3)


class Letters:
    """A letter a token; a ``stop`` is a letter. What is held back at the end is an ellipsis."""

    def __init__(self, stop: str = "") -> None:
        self.stop, self.matched = stop, None

    def push(self, token: int) -> tuple[str, bool]:
        assert self.matched is None, "pushed past the stop"
        letter = chr(97 + token)
        self.matched = letter if letter == self.stop else None
        return letter, letter == self.stop

    def flush(self) -> str:
        return "..."


def choice(
    number: int = 0, *, shared: bool = True, grid: int = 0, stop: str | None = None, **changes: Any
) -> Choice:
    """A choice whose prompt is computed, submitted at 1.0 s."""
    request = replace(PLAIN, **changes)
    ids, root = check(request, INFO), ("", "")
    seq = sequence_of(request, ids, number, root, 1, 77, shared=shared, grid=grid)
    seq.admitted, seq.computed = True, seq.known
    text = None if stop is None else Letters(stop)
    return Choice(request, seq, print, text, 1.0, cached=shared, off_grid="gate")


def take(one: Choice, *tokens: int, now: float = 2.0, **entries: Any) -> tuple[list[Any], bool]:
    """One step's result, as the scheduler leaves the sequence before it is reported."""
    for token in tokens:
        one.sequence.append(token)
    one.sequence.computed += max(0, len(tokens) - 1)
    return one.take(WorkResult(0, tokens, **entries), now)


# -- the door -----------------------------------------------------------------------------------


@pytest.mark.parametrize("allowed", [3, 0, None])
def test_what_just_fits_the_context_is_let_in(allowed: int | None) -> None:
    """An answer without a limit needs room for one token, and one of none needs none."""
    room = 12 - (1 if allowed is None else allowed)
    fits = replace(PLAIN, tokens=(0,) * (room - 1) + (49,), max_tokens=allowed)
    ids = check(fits, INFO)
    assert (ids.dtype, tuple(ids.tolist())) == ("int32", fits.tokens)
    assert not ids.flags.writeable, "answers share them"
    with pytest.raises(EngineRefusal, match=rf"12 tokens.* 13: {room + 1} in .*prompt") as info:
        check(replace(fits, tokens=(0, *fits.tokens)), INFO)
    assert info.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("change", "code", "says"),
    [
        ({"tokens": ()}, "empty_prompt", "no tokens"),
        ({"max_tokens": -1}, "invalid_count", "max_tokens -1"),
        ({"n": 0}, "invalid_count", "n 0"),
        ({"tokens": (0, 50, 51)}, "invalid_token_id", r"\[0, 50\), not 50"),
        ({"tokens": (1, -1)}, "invalid_token_id", "not -1"),
        ({"tokens": (1, 2**31)}, "invalid_token_id", f"not {2**31}"),
        ({"params": SamplingParams(logit_bias=((50, 1.0),))}, "invalid_token_id", "not 50"),
        ({"params": SamplingParams(banned=(50,))}, "invalid_token_id", "not 50"),
        ({"boundaries": ((3, "turn"), (5, "x"))}, "invalid_boundary", "'x' at 5"),
        ({"ends": ((7, "x"),)}, "invalid_boundary", "'x' at 7"),
    ],
)
def test_what_can_never_run_is_refused_with_a_code(
    change: dict[str, Any], code: str, says: str
) -> None:
    with pytest.raises(EngineRefusal, match=says) as info:
        check(replace(PLAIN, **change), INFO)
    assert info.value.code == code


# -- what becomes of a request ------------------------------------------------------------------


def test_only_the_first_choice_scores_the_prompt_and_matches_nothing() -> None:
    for number in (0, 1):
        seq = choice(number, n=2, prompt_logprobs=4).sequence
        assert (seq.choice, seq.matches, seq.prompt_logprobs) == (
            (0, False, 4),
            (1, True, None),
        )[number]
    assert choice().sequence.matches


def test_what_a_request_keeps_to_itself_has_no_boundaries_but_its_own_end() -> None:
    """Which its choices start from: a single one seals nothing."""
    asked = {"boundaries": ((4, "turn"),), "lives": ((4, 9.0),), "ends": ((5, "reasoning"),)}
    shared = choice(**asked).sequence
    assert shared.boundaries == ((4, Kind.TURN), (9, Kind.PROMPT))
    assert (shared.seals, shared.lives, shared.ends) == (True, {4: 9.0}, {5: Kind.REASONING})
    assert choice(shared=False).sequence.seals is False
    private = choice(shared=False, n=2, **asked).sequence
    assert (private.seals, private.boundaries) == (True, ((9, Kind.PROMPT),))
    grid = choice(grid=4, **asked).sequence
    assert (grid.lives, [at for at, _ in grid.boundaries]) == ({}, [4, 8])


def test_an_answer_without_a_limit_may_fill_the_context() -> None:
    assert choice(max_tokens=None).sequence.max_tokens == 77
    assert choice(max_tokens=0).sequence.max_tokens == 0


# -- events -------------------------------------------------------------------------------------


def test_a_choice_starts_once_and_reports_when() -> None:
    one = choice(stop="")
    one.sequence.admitted = False
    assert one.started(1.5) == []
    waiting = one.finished("abort", None, 4.0)
    assert (waiting.timing.queued_s, waiting.timing.first_token_s) == (3.0, None)
    one.sequence.admitted = True
    assert [type(event) for event in take(one, now=3.0)[0]] == [Started]
    events, done = take(one, 1, now=5.0)
    assert (events, done) == ([TokenEvent(0, 1, "b", None)], False)
    events, done = take(one, 2, 3, now=8.0)
    assert done
    end = events[-1]
    assert (end.timing.queued_s, end.timing.first_token_s, end.timing.total_s) == (2.0, 4.0, 7.0)
    assert (end.reason, end.stop, end.text, end.error) == ("length", None, "...", None)
    assert (end.prompt_tokens, end.completion_tokens) == (9, 3)


@pytest.mark.parametrize(
    ("stops", "reason", "stop", "count"),
    [
        ({"stop_ids": (4,)}, "stop", 4, 2),
        ({"stop": "e"}, "stop", "e", 2),
        ({"stop": "e", "stop_ids": (4,)}, "stop", "e", 2),
        ({"stop": "e", "max_tokens": 2}, "stop", "e", 2),
        ({"stop": "", "max_tokens": 2}, "length", None, 2),
        ({"stop_ids": (4,), "max_tokens": 2}, "stop", 4, 2),
        ({"stop_ids": (4,), "params": SamplingParams(min_tokens=3)}, "length", None, 3),
    ],
)
def test_whatever_ends_a_block_ends_the_answer_there(
    stops: dict[str, Any], reason: str, stop: int | str | None, count: int
) -> None:
    """With the log probabilities and the text of those tokens, and no row of later ones."""
    one, drawn = choice(**{"max_tokens": 3, **stops}), (3, 4, 5, 6)
    scores = tuple(TokenLogprob(token, -token) for token in drawn)
    events, done = take(one, *drawn, logprobs=scores)
    assert done
    started, *tokens, end = events
    assert (type(started), type(end)) == (Started, Finished)
    assert [event.token for event in tokens] == list(drawn[:count])
    assert [event.logprob for event in tokens] == list(scores[:count])
    assert "".join(event.text for event in tokens) == ("def"[:count] if "stop" in stops else "")
    assert (end.reason, end.stop, end.completion_tokens) == (reason, stop, count)
    assert (one.sequence.known, one.sequence.computed) == (9 + count, 9 + count - 1)


def test_an_answer_of_no_tokens_ends_with_its_prompt() -> None:
    one = choice(max_tokens=0, prompt_logprobs=0)
    first, second = TokenLogprob(1, -1.0), TokenLogprob(2, -2.0)
    one.sequence.computed = 4
    assert take(one, prompt_logprobs=(first,))[1] is False
    one.sequence.computed = 9
    events, done = take(one, prompt_logprobs=(second,))
    assert done
    assert (events[-1].reason, events[-1].completion_tokens) == ("length", 0)
    assert events[-1].prompt_logprobs == (None, first, second)
    assert take(choice(), now=3.0)[1] is False, "a prefill that is not over yet"


def test_after_a_failure_no_text_is_asked_for() -> None:
    one = choice(stop="")
    end = one.failed("it broke", 3.0)
    assert (end.reason, end.stop, end.text, end.error) == ("error", None, "", "it broke")
    assert end.prompt_logprobs is None is end.drafts


def test_drafts_are_reported_once_some_were_verified() -> None:
    one = choice()
    one.sequence.tally.note(2, 1)
    one.sequence.tally.note(1, 1)
    one.sequence.tally.note(3, 0)
    assert one.finished("length", None, 2.0).drafts == DraftReport(3, (3, 2, 1), (2, 0, 0))


# -- what the cache did -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "counts", "lost", "elsewhere"),
    [
        ({}, {"lost": "evicted"}, "evicted", False),
        ({"shared": False}, {"lost": "unknown"}, "disabled", False),
        ({"shared": False}, {"lost": "", "matched": 9, "restored": 9}, "", False),
        ({}, {"lost": "other_salt"}, "unknown", True),
        ({}, {"lost": "other_salt", "matched": 1}, "no_boundary", True),
        ({"grid": 4}, {"lost": "other_salt", "matched": 3}, "too_short", True),
        ({"grid": 4}, {"lost": "no_boundary", "matched": 3}, "too_short", False),
        ({"grid": 4}, {"lost": "no_boundary", "matched": 4}, "gate", False),
        ({"grid": 4}, {"lost": "evicted", "matched": 3}, "evicted", False),
        ({}, {"lost": "no_boundary", "matched": 3}, "no_boundary", False),
    ],
)
def test_the_word_for_what_was_lost(
    changes: dict[str, Any], counts: dict[str, Any], lost: str, elsewhere: bool
) -> None:
    one = choice(**changes)
    for name, value in counts.items():
        setattr(one.sequence, name, value)
    assert (one.report.lost, one.report.elsewhere) == (lost, elsewhere)
    assert (one.report.matched, one.report.restored) == (
        one.sequence.matched,
        one.sequence.restored,
    )


def test_written_is_what_lies_beyond_the_restored_tokens() -> None:
    one = choice()
    for restored, written, beyond in ((0, 9, 9), (4, 9, 5), (9, 4, 0)):
        one.sequence.restored, one.sequence.written = restored, written
        assert one.report.written == beyond
