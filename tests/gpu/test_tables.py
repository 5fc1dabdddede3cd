"""A step's tables: every row in its place, every row of attention once, passes that may be cut."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from merestone.device.gpu_passes import MIXED, Passes, bucket, contexts, ladder
from merestone.device.gpu_tables import Key, Tables, cut_at
from merestone.sched.plan import Work

CHUNK, FRAMES, PADDING = 64, 2, 9


def work(slot: int, start: int, count: int, late: bool = False) -> Work:
    """``late``: the anchor is left where it is, a chunk behind."""
    anchor = start // CHUNK * CHUNK
    end = start + count
    advance = anchor if late and end - anchor < 2 * CHUNK else end // CHUNK * CHUNK
    frames = (10 * slot, 10 * slot + 1)
    return Work(
        slot, start, end, tuple(range(start, end)), (), anchor, frames if anchor else (), advance,
        (90 + slot, 91 + slot) if advance > anchor else (), True,
    )  # fmt: skip


@st.composite
def steps(draw: st.DrawFn) -> list[Work]:
    spans = st.tuples(st.integers(0, 300), st.integers(1, 300), st.booleans())
    found = draw(st.lists(spans, min_size=1, max_size=5))
    return [work(slot, *span) for slot, span in enumerate(found)]


def filled(
    works: list[Work], *, heads: int, pool: int, spare: int, wide: bool = False
) -> tuple[Tables, dict]:
    rows = sum(w.end - w.start for w in works) + spare
    key = Key(rows, len(works) + spare // 3, 4096, True)
    tables = Tables(key, chunk=CHUNK, heads=heads, pool=pool, frames=FRAMES, wide=wide)
    buffer = np.full(tables.size, 12345, np.int32)
    tables.fill(buffer, works, PADDING)
    return tables, {name: tables._part(buffer, name) for name in tables._places}


@settings(max_examples=60)
@given(
    steps(), st.sampled_from([4, 32, 64, 128]), st.sampled_from([0, 4]),
    st.sampled_from([0, 1, 40]), st.booleans(),
)  # fmt: skip
def test_every_row_has_its_place(
    works: list[Work], heads: int, pool: int, spare: int, wide: bool
) -> None:
    tables, t = filled(works, heads=heads, pool=pool, spare=spare, wide=wide and not pool)
    rows, last = tables.key.rows, tables.key.sequences
    expected = [(i, p) for i, w in enumerate(works) for p in range(w.start, w.end)]
    expected += [(last, 0)] * (rows - len(expected))
    assert (
        list(zip(t["row_sequence"].tolist(), t["row_position"].tolist(), strict=True)) == expected
    )
    real = sum(w.end - w.start for w in works)
    assert t["seen"].tolist() == [p + 1 for _, p in expected[:real]] + [0] * (rows - real)
    assert t["tokens"][:real].tolist() == [p for _, p in expected[:real]]
    for i, w in enumerate(works):
        assert (t["first"][i], t["end"][i], t["floor"][i]) == (w.start, w.end, w.advance)
        assert expected[t["row"][i]] == (i, w.start)
    assert t["slot"].tolist() == [w.slot for w in works] + [PADDING] * (last + 1 - len(works))
    # Attention: every row and head once, in an item of its own sequence (or row, if rows select).
    covered = np.zeros(rows * heads, int)
    for sequence, first, count in t["work"].tolist():
        covered[first : first + count] += 1
        owners = {expected[flat // heads][0] for flat in range(first, first + count)}
        assert owners <= {sequence}
        assert count <= (32 if tables.split else 128 if wide and not pool else 64)
        assert not pool or count == 0 or first // heads == (first + count - 1) // heads
    assert (covered == 1).all()
    if pool:
        found = [(int(s), int(n)) for s, n in t["pools"].T if n >= 0]
        assert found == [
            (i, n) for i, w in enumerate(works) for n in range(w.start // pool, w.end // pool)
        ]


@settings(max_examples=60)
@given(steps())
def test_passes_cover_every_row_once_and_stay_within_two_chunks(works: list[Work]) -> None:
    _, t = filled(works, heads=4, pool=0, spare=3)
    for i, w in enumerate(works):
        passes = [
            (t["first"][i], t["cut_end"][i], t["anchor"][i], t["cut_advance"][i], t["row"][i]),
            (t["rest_first"][i], t["end"][i], t["rest_anchor"][i], t["rest_advance"][i],
             t["rest_row"][i]),
        ]  # fmt: skip
        computed = [p for first, end, *_ in passes for p in range(first, end)]
        assert computed == list(range(w.start, w.end))
        for first, end, anchor, _, row in passes:
            if first < end:
                assert first == anchor or end - anchor <= 2 * CHUNK
                assert row - t["row"][i] == first - w.start
        # The anchor that was ordered is the last that any pass leaves, in the frames for it.
        moves = [advance for *_, advance, _ in passes if advance]
        assert (moves[-1:] or [w.anchor]) == [w.advance]
        if cut_at(w, CHUNK) is not None:
            assert tuple(t["rest_frames"][i]) == tuple(t["cut_frames"][i]) == w.advance_frames
        else:
            assert t["cut_end"][i] == 0


def test_sizes_of_graphs() -> None:
    assert ladder(1) == [1]
    assert ladder(6) == [1, 2, 4, 6]
    assert ladder(64) == [1, 2, 4, 8, 16, 32, 64]
    assert bucket(65, MIXED) == 128
    assert bucket(5000, MIXED) is None
    assert contexts(1) == contexts(4096) == [4096]
    assert contexts(36_864) == [4096, 16384, 65536]


@pytest.mark.parametrize("drafts", [0, 3])
def test_every_graph_that_a_step_asks_for_is_made(drafts: int) -> None:
    """Whatever decodes, verifies or prefills a little, at any length: no request waits for one."""
    passes = object.__new__(Passes)
    passes._slots, passes._each, passes.graphs = 6, drafts + 1, True
    made = set(passes.keys(512, 20_000))
    for end in (900, 4096, 4097, 20_000):
        for count in range(1, 7):
            for most in (1, drafts + 1):
                works = [work(slot, end - most, most) for slot in range(count)]
                key, graphed = passes._key_of(works)
                assert graphed
                assert key in made
                assert key.rows >= count * most
        key, graphed = passes._key_of([work(0, end - 300, 300), work(1, 10, 1)])
        assert graphed
        assert key in made
    assert passes._key_of([work(0, 0, 2000)]) == (Key(2000, 1, 2048, True), False)


@pytest.mark.parametrize("slots", [1, 7, 64])
def test_every_number_of_decodes_has_a_graph(slots: int) -> None:
    for count in range(1, slots + 1):
        size = bucket(count, ladder(slots))
        assert size is not None
        assert count <= size <= min(slots, 2 * count)
