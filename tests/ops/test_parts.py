"""Attention and choices over parts of a sequence, as ranks that share its rows compute them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from merestone.ops.attention import TILE, attend, attend_part
from merestone.ops.index import candidates, choose, choose_candidates
from merestone.parallel.tokens import merge_parts

WIDTH, ROWS = 32, 9


def test_a_part_knows_its_log_sum_exp() -> None:
    source = torch.Generator().manual_seed(0)
    q = torch.randn(2, ROWS, WIDTH, generator=source) * 3
    keys = torch.randn(2, 3 * TILE, WIDTH, generator=source)
    seen = torch.randint(1, 3 * TILE, (2, ROWS), generator=source)
    seen[0, 3] = 0
    out, lse = attend_part(q, keys, seen, 0.25)
    assert out[0, 3].eq(0).all()
    assert lse[0, 3] == float("-inf")
    some = seen > 0
    assert torch.equal(out[some], attend(q, keys, seen.clamp(min=1), 0.25)[some])
    scores = q @ keys.transpose(1, 2) * 0.25
    scores = scores.masked_fill(torch.arange(3 * TILE) >= seen[:, :, None], float("-inf"))
    assert torch.allclose(lse[some], scores.logsumexp(2)[some], atol=1e-5)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_parts_merge_to_the_whole(ranks: int) -> None:
    """Keys dealt out in runs, some ranks without any; a NaN reaches its own row alone."""
    source = torch.Generator().manual_seed(ranks)
    q = torch.randn(1, ROWS, WIDTH, generator=source) * 3
    keys = torch.randn(1, 200, WIDTH, generator=source)
    seen = torch.tensor([[1, 2, 8, 9, 63, 64, 65, 150, 200]])
    outs, lses = [], []
    for rank in range(ranks):
        mine = torch.arange(200) // 8 % ranks == rank
        held = torch.stack([mine[:n].sum() for n in seen[0].tolist()])[None]
        own = torch.zeros(1, 4 * TILE, WIDTH)
        own[0, : mine.sum()] = keys[0, mine]
        out, lse = attend_part(q, own, held, 0.25)
        outs.append(out)
        lses.append(lse)
    parts, weights = torch.stack(outs), torch.stack(lses)
    whole = torch.zeros(1, 4 * TILE, WIDTH)
    whole[0, :200] = keys[0]
    merged = merge_parts(parts, weights)
    assert torch.allclose(merged, attend(q, whole, seen, 0.25), atol=1e-5)
    for row in range(ROWS):
        alone = merge_parts(parts[:, :, row : row + 1], weights[:, :, row : row + 1])
        assert torch.equal(alone, merged[:, row : row + 1])
    weights[:, 0, 3], parts[:, 0, 3] = float("-inf"), 0.0
    assert merge_parts(parts, weights)[0, 3].eq(0).all()
    parts[-1, 0, 4] = weights[-1, 0, 4] = float("nan")
    damaged = merge_parts(parts, weights)
    assert damaged[0, 4].isnan().all()
    assert torch.equal(damaged[0, 5:], merged[0, 5:])


@given(st.data())
@settings(max_examples=60)
def test_candidates_lead_to_the_whole_choice(data: st.DataObject) -> None:
    """Ties to the lowest pool, wherever it lies; a damaged part damages the choice."""
    ranks, run = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    pools, k = data.draw(st.integers(4, 30)), data.draw(st.integers(1, 4))
    values = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, float("nan")])
    row = data.draw(st.lists(values, min_size=pools, max_size=pools))
    complete = data.draw(st.integers(k, pools))
    scores = torch.tensor([row])
    found, places = [], []
    for rank in range(ranks):
        mine = (torch.arange(pools) // run % ranks == rank).nonzero()[:, 0]
        held = int((mine < complete).sum())
        # As gathered pages are: zeros after the end.
        own = torch.zeros(1, len(mine) + 3)
        own[0, : len(mine)] = scores[0, mine]
        value, best = candidates(own, torch.tensor([held]), k)
        names = torch.cat([mine, torch.full((k + 3,), 10_000)])
        found.append(value)
        places.append(names[best])
    got = choose_candidates(torch.cat(found, 1), torch.cat(places, 1), k)
    assert torch.equal(got, choose(scores, torch.tensor([complete]), k))
