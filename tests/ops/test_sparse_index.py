import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from merestone.ops.index import choose, members, pool, pool_scores
from merestone.ops.naive import chosen_tokens, pool_keys


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@given(st.data())
@settings(max_examples=60)
def test_choose_breaks_ties_by_number(data: st.DataObject) -> None:
    pools = data.draw(st.integers(3, 30))
    k = data.draw(st.integers(1, 3))
    values = st.sampled_from([0.0, -0.0, 1.0, -1.0, float("-inf"), float("nan")])
    rows = data.draw(
        st.lists(st.lists(values, min_size=pools, max_size=pools), min_size=1, max_size=3)
    )
    complete = data.draw(st.lists(st.integers(k, pools), min_size=len(rows), max_size=len(rows)))
    got = choose(torch.tensor(rows), torch.tensor(complete), k).tolist()
    for row, count, chosen in zip(rows, complete, got, strict=True):
        seen = row[:count]
        best = sorted(range(count), key=lambda j, seen=seen: (-seen[j], j))[:k]
        damaged = any(value != value for value in seen)
        assert chosen == ([-1] * k if damaged else sorted(best))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pool(dtype: torch.dtype) -> None:
    keys, gates, positions = (
        normal(80, 16).to(dtype),
        normal(80, 16, seed=1).to(dtype),
        normal(4, 16),
    )
    grouped = keys.view(20, 4, 16), gates.view(20, 4, 16)
    out = pool(*grouped, positions)
    near = pool_keys(keys.float(), gates.float(), positions)
    assert torch.allclose(out.float(), near, atol=1e-6 if dtype == torch.float32 else 0.02)
    for part in (slice(0, 1), slice(3, 10), slice(19, 20)):
        assert torch.equal(pool(grouped[0][part], grouped[1][part], positions), out[part])


@pytest.mark.usefixtures("threads")
def test_scores_know_neither_mates_nor_later_pools() -> None:
    q, weights, pools = normal(1, 30, 16, 16), normal(1, 30, 16, seed=1), normal(1, 700, 16, seed=2)
    scores = pool_scores(q, weights, pools)
    direct = (weights[0, 3][:, None] * (q[0, 3] @ pools[0].t() / 4).relu()).sum(0)
    assert torch.allclose(scores[0, 3], direct, atol=1e-4)
    for rows, count in ((slice(0, 1), 64), (slice(5, 9), 130), (slice(29, 30), 640)):
        part = pool_scores(q[:, rows], weights[:, rows], pools[:, :count])
        assert torch.equal(part, scores[:, rows, :count])
    several = pool_scores(
        q[:, :2].expand(3, -1, -1, -1), weights[:, :2].expand(3, -1, -1), pools.expand(3, -1, -1)
    )
    assert torch.equal(several[2], scores[0, :2])


@pytest.mark.parametrize("position", range(40, 48))
def test_selection_is_the_definitions(position: int) -> None:
    q, weights, pools = normal(16, 8), normal(16, seed=1), normal(16, 8, seed=2)
    complete = torch.tensor([(position + 1) // 4])
    scores = pool_scores(q[None, None], weights[None, None], pools[None])[0]
    tokens = members(choose(scores, complete, 5), complete, 4, 64)[0]
    count = 20 + (position + 1) % 4
    assert tokens[:count].tolist() == chosen_tokens(q, weights, pools, position, 4, 20)
