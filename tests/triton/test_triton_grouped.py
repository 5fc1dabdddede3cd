"""The mixture of experts: a token's result is its own, whoever else chose its experts."""

import pytest
import torch
from torch import Tensor

from merestone.ops import moe, naive
from merestone.ops.triton.by_expert import sort_by_expert
from merestone.ops.triton.gemm import linear
from merestone.ops.triton.grouped import (
    experts,
    experts_norm,
    grouped_gated,
    grouped_linear,
    route,
)
from merestone.ops.triton.norms import add_rms_norm, swiglu

EXPERTS, WIDTH, INNER, K = 6, 32, 16, 3


def test_route(draw, device: str) -> None:
    x, gate, bias = draw(9, WIDTH), draw(EXPERTS, WIDTH), draw(EXPERTS)
    bias[3] = bias[1] = 2.0
    gate[3] = gate[1]  # equal scores: the lower expert comes first
    for normalise in (True, False):
        ids, weights = route(x, gate, bias, K, normalise, 2.5)
        expected, shares = moe.route(x.cpu(), gate.cpu(), bias.cpu(), K, normalise, 2.5)
        assert torch.equal(ids.cpu().long(), expected)
        torch.testing.assert_close(weights.cpu(), shares)
    assert route(x[:0], gate, bias, K, True, 1.0)[0].shape == (0, K)
    x[0] = float("nan")
    ids, _ = route(x, gate, bias, K, True, 1.0)
    assert ids[0].tolist() == [0, 1, 2]


@pytest.mark.parametrize("rows", [2, 11, 200])
def test_sort_is_stable(device: str, rows: int) -> None:
    source = torch.Generator().manual_seed(rows)
    ids = torch.randint(EXPERTS, (rows, K), dtype=torch.int32, generator=source)
    ids[ids == 2] = 4  # an expert that nobody chose
    entries = sort_by_expert(ids.to(device), EXPERTS, torch.float32)
    assert torch.equal(entries.order.cpu().long(), ids.flatten().sort(stable=True).indices)
    assert entries.ends is not None
    assert entries.tile_ends is not None
    counts = torch.bincount(ids.flatten(), minlength=8)
    assert torch.equal(entries.ends.cpu().long(), counts.cumsum(0))
    tiles = -(-counts // entries.tile.rows)
    assert torch.equal(entries.tile_ends.cpu().long(), tiles.cumsum(0))
    assert entries.most_tiles >= int(tiles.sum())


@pytest.mark.usefixtures("ordered_dot")
def test_tokens_are_their_own(draw, device: str) -> None:
    x, gate_up, down = draw(40, WIDTH), draw(EXPERTS, 2 * INNER, WIDTH), draw(EXPERTS, WIDTH, INNER)
    source = torch.Generator().manual_seed(0)
    ids = torch.stack([torch.randperm(EXPERTS, generator=source)[:K] for _ in range(40)])
    ids[5:30] = torch.tensor([4, 0, 1])  # one expert has several tiles
    weights = draw(40, K).abs()
    ids = ids.int().to(device)

    def run(some: Tensor) -> Tensor:
        return experts(x[some], ids[some], weights[some], gate_up, down, None)

    everybody = torch.arange(40, device=device)
    expected = run(everybody)
    torch.testing.assert_close(
        expected, naive.experts(x, ids, weights, gate_up, down), rtol=1e-4, atol=1e-3
    )
    for some in (everybody[7:8], everybody[:4], everybody.flip(0), everybody[20:35]):
        assert torch.equal(run(some), expected[some])
    assert run(everybody[:0]).shape == (0, WIDTH)
    shared = draw(40, WIDTH)
    both = experts(x, ids, weights, gate_up, down, None, more=shared, out_dtype=torch.float16)
    assert torch.equal(both, (expected + shared).half())


@pytest.mark.usefixtures("ordered_dot")
@pytest.mark.parametrize("partial", [False, True])
def test_one_row_needs_no_sort(draw, device: str, partial: bool) -> None:
    """Alone it has the bits that it has beside another."""
    x, gate_up, down = draw(2, WIDTH), draw(EXPERTS, 2 * INNER, WIDTH), draw(EXPERTS, WIDTH, INNER)
    ids = torch.tensor([[4, 0, 5], [5, 1, 4]], dtype=torch.int32, device=device)
    weights = draw(2, K).abs()
    both = experts(x, ids, weights, gate_up, down, None, partial)
    for row in (slice(0, 1), slice(1, 2)):
        assert sort_by_expert(ids[row], EXPERTS, torch.float32).ends is None
        alone = experts(x[row], ids[row], weights[row], gate_up, down, None, partial)
        assert torch.equal(alone, both[row])


@pytest.mark.usefixtures("ordered_dot")
def test_gates_in_the_same_launch(draw, device: str) -> None:
    """Rounded in between as if they had been stored; a clamp counts."""
    x = draw(9, WIDTH).half()
    weight = draw(EXPERTS, 2 * INNER, WIDTH).half()
    ids = torch.arange(9 * K, dtype=torch.int32, device=device).view(9, K) % EXPERTS
    entries = sort_by_expert(ids, EXPERTS, torch.float16)
    for limit in (None, 0.5):
        apart = swiglu(grouped_linear(x, weight, entries, K, gather=True), limit)
        assert torch.equal(grouped_gated(x, weight, entries, K, limit), apart), limit


@pytest.mark.usefixtures("ordered_dot")
@pytest.mark.parametrize("rows", [1, 3, 17])
@pytest.mark.parametrize("limit", [None, 0.5])
def test_a_shared_expert_is_one_more(draw, device: str, rows: int, limit: float | None) -> None:
    """The bits of its own products, added last; of a part of its width, too."""
    x, gate, bias = draw(rows, WIDTH).half(), draw(EXPERTS, WIDTH), draw(EXPERTS)
    gate_up = draw(EXPERTS + 1, 2 * INNER, WIDTH).half()
    down = draw(EXPERTS + 1, WIDTH, INNER).half()
    chosen = route(x, gate, bias, K, True, 2.5)
    ids, weights = route(x, gate, bias, K, True, 2.5, shared=True)
    assert torch.equal(ids[:, :K], chosen[0])
    assert torch.equal(weights[:, :K], chosen[1])
    assert ids[:, K].tolist() == [EXPERTS] * rows
    inner = swiglu(linear(x, gate_up[-1]), limit)
    for partial, dtype in ((False, torch.float16), (True, torch.float32)):
        more = linear(inner, down[-1], out_dtype=dtype)
        apart = experts(
            x, *chosen, gate_up[:-1], down[:-1], limit, partial, more=more, out_dtype=dtype
        )
        joined = experts(x, ids, weights, gate_up, down, limit, partial, out_dtype=dtype)
        assert torch.equal(joined, apart), partial


def same_sum(args: tuple, residual: Tensor, norm: Tensor, more: Tensor | None) -> None:
    apart = experts(*args, more=more, out_dtype=residual.dtype)
    wanted = add_rms_norm(residual, apart, norm, 1e-5)
    found = experts_norm(*args, residual, norm, 1e-5, more=more)
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)


@pytest.mark.usefixtures("ordered_dot")
@pytest.mark.parametrize("rows", [0, 1, 5, 70])
def test_the_sum_goes_into_the_residual_and_its_norm(draw, device: str, rows: int) -> None:
    """Of rows that fill no block of a norm, too; rounded as if all had been stored in between."""
    x, gate, bias = draw(rows, WIDTH).half(), draw(EXPERTS, WIDTH), draw(EXPERTS)
    gate_up, down = draw(EXPERTS, 2 * INNER, WIDTH).half(), draw(EXPERTS, WIDTH, INNER).half()
    args = (x, *route(x, gate, bias, K, True, 2.5), gate_up, down, None)
    for more in (None, draw(rows, WIDTH).half()):
        same_sum(args, 3 * draw(rows, WIDTH).half(), draw(WIDTH).half(), more)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3, 64, 1000])
@pytest.mark.parametrize("width", [512, 2304, 4096])
def test_the_norm_of_the_sum_at_true_widths(draw, device: str, rows: int, width: int) -> None:
    count, inner, k = 16, 256, 8
    x, gate = draw(rows, width).bfloat16(), draw(count, width) * width**-0.5
    gate_up, down = (draw(count, 2 * inner, width) / 32, draw(count, width, inner) / 16)
    chosen = route(x, gate, draw(count) / 10, k, True, 2.5)
    args = (x, *chosen, gate_up.bfloat16(), down.bfloat16(), None)
    for more in (None, draw(rows, width).bfloat16()):
        same_sum(args, 3 * draw(rows, width).bfloat16(), draw(width).bfloat16(), more)


@pytest.mark.gpu
@pytest.mark.parametrize(("width", "inner"), [(2304, 1024), (4096, 2048)])
def test_a_shared_expert_at_true_dimensions(draw, device: str, width: int, inner: int) -> None:
    count, k = 16, 8
    x = draw(32, width).bfloat16()
    gate, bias = draw(count, width) * width**-0.5, draw(count) / 10
    gate_up = (torch.randn(count + 1, 2 * inner, width, device=device) * width**-0.5).bfloat16()
    down = (torch.randn(count + 1, width, inner, device=device) * inner**-0.5).bfloat16()
    for rows in (1, 2, 17, 32):
        some = x[:rows]
        more = linear(swiglu(linear(some, gate_up[-1]), 10.0), down[-1])
        chosen = route(some, gate, bias, k, True, 2.5)
        apart = experts(
            some, *chosen, gate_up[:-1], down[:-1], 10.0, more=more, out_dtype=torch.bfloat16
        )
        chosen = route(some, gate, bias, k, True, 2.5, shared=True)
        joined = experts(some, *chosen, gate_up, down, 10.0, out_dtype=torch.bfloat16)
        assert torch.equal(joined, apart), rows


@pytest.mark.gpu
def test_true_dimensions(draw, device: str) -> None:
    count, rows, width, inner, k = 64, 4096, 4096, 2048, 8
    x = draw(rows, width).bfloat16()
    gate, bias = draw(count, width) * width**-0.5, draw(count) / 10
    gate_up = (torch.randn(count, 2 * inner, width, device=device) * width**-0.5).bfloat16()
    down = (torch.randn(count, width, inner, device=device) * inner**-0.5).bfloat16()
    ids, weights = route(x, gate, bias, k, True, 2.5)
    expected = experts(x, ids, weights, gate_up, down, 10.0)
    for cut in (1, 2, 16, 64, 500, 2000):
        mine = route(x[:cut], gate, bias, k, True, 2.5)
        assert torch.equal(mine[0], ids[:cut]), cut
        assert torch.equal(mine[1], weights[:cut]), cut
        assert torch.equal(experts(x[:cut], *mine, gate_up, down, 10.0), expected[:cut]), cut
    some = [0, 17, 4095]
    one = [weight.float() for weight in (gate_up, down)]
    close = naive.experts(x[some].float(), ids[some], weights[some], *one)
    torch.testing.assert_close(expected[some], close, rtol=5e-2, atol=5e-2)
