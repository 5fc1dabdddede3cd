"""Products: bits of a row against the number of rows, the tile, the split; closeness to torch."""

import pytest
import torch

from merestone.ops.triton import gemm
from merestone.ops.triton.gemm import (
    DEPTH,
    Tile,
    linear,
    linear_naive,
    product,
    segments,
    tile_for,
    wide_product,
)

CUDA = torch.cuda.is_available()

SMALL = Tile(16, 16, 32, 4, 2)
# Of one depth on a device, where fp32 is three products for each step.
DEEPER = (32, 32) if CUDA else (64, 128)
TILES = [SMALL, Tile(32, 64, DEEPER[0], 4, 2), Tile(32, 32, DEEPER[1], 8, 2)]


@pytest.mark.usefixtures("ordered_dot")
def test_every_number_of_rows_gives_the_same_rows(draw) -> None:
    x, w = draw(130, 96), draw(40, 96)
    expected = linear(x, w)
    torch.testing.assert_close(expected, linear_naive(x, w))
    for rows in range(1, 131):
        first = rows * 7 % (131 - rows)
        assert torch.equal(linear(x[first : first + rows], w), expected[first : first + rows]), rows


@pytest.mark.usefixtures("ordered_dot")
@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_tile_changes_no_bits(draw, count: int) -> None:
    x, w = draw(19, 4 * DEPTH), draw(33, 4 * DEPTH)
    expected = product(x, w, SMALL, count)
    torch.testing.assert_close(expected, linear_naive(x, w), rtol=1e-4, atol=1e-4)
    for tile in TILES:
        assert torch.equal(product(x, w, tile, count), expected), tile


@pytest.mark.skipif(CUDA, reason="on a device wide products are of bf16: see the true shapes")
@pytest.mark.usefixtures("ordered_dot")
def test_the_copy_engine_changes_no_bits(draw, monkeypatch: pytest.MonkeyPatch) -> None:
    """More tiles than programs, and tiles that reach over every edge."""
    monkeypatch.setattr(gemm, "_PROGRAMS", 3)
    x, w = draw(75, 96), draw(40, 96)
    expected = product(x, w, SMALL, 1)
    for tile in (Tile(32, 16, 64, 4, 2), Tile(16, 32, 32, 4, 2)):
        assert torch.equal(wide_product(x, w, tile), expected), tile


@pytest.mark.usefixtures("ordered_dot")
def test_a_batch_is_its_items(draw) -> None:
    x, w = draw(3, 5, 64), draw(3, 24, 64)
    out = linear(x, w)
    for item in range(3):
        assert torch.equal(out[item], linear(x[item], w[item]))
    # Heads side by side, as projections leave them.
    heads = draw(5, 3, 64).transpose(0, 1)
    assert torch.equal(linear(heads, w), linear(heads.contiguous(), w))


@pytest.mark.gpu
@pytest.mark.parametrize("n", [4096, 8192])
def test_a_batch_is_its_items_at_true_shapes(draw, n: int) -> None:
    """Two parts of a row, each with a weight of its own: decays and output gates."""
    x, w = draw(2048, 2, 128).bfloat16(), (draw(2, n, 128) * 128**-0.5).bfloat16()
    for rows in (1, 2, 16, 17, 64, 65, 512, 2048):
        some = x[:rows]
        out = linear(some.transpose(0, 1), w)
        for part in (0, 1):
            assert torch.equal(out[part], linear(some[:, part], w[part])), (rows, part)


@pytest.mark.usefixtures("ordered_dot")
def test_depth_need_not_divide_k(draw) -> None:
    x, w = draw(3, 40), draw(9, 40)
    torch.testing.assert_close(linear(x, w), linear_naive(x, w))
    assert linear(x[:0], w).shape == (0, 9)
    # Not bf16, which the interpreter truncates.
    assert torch.equal(linear(x, w, out_dtype=torch.float16), linear(x, w).half())


def test_rows_of_a_mate_may_be_anything(draw) -> None:
    x, w = draw(4, 64), draw(24, 64)
    expected = linear(x, w)
    x[2] = float("nan")
    out = linear(x, w)
    rest = [0, 1, 3]
    assert torch.equal(out[rest], expected[rest])
    assert out[2].isnan().all()


def test_segments_follow_the_weight() -> None:
    assert segments(4096, 4096) == 1
    assert segments(24576, 4096) == 1
    assert segments(24, 16384) == 64
    assert segments(288, 4096) == 16
    assert segments(256, 2304) == 9
    for n in (24, 288, 1536, 4096, 12288):
        for k in (512, 1536, 2048, 4096, 16384):
            assert k % (segments(n, k) * DEPTH) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("n", "k"), [(4096, 4096), (24896, 4096), (4096, 16384), (288, 4096), (24, 16384)]
)
def test_true_shapes(draw, dtype: torch.dtype, n: int, k: int) -> None:
    x, w = draw(2048, k).to(dtype), (draw(n, k) * k**-0.5).to(dtype)
    expected = linear(x, w)
    torch.testing.assert_close(
        expected.float(),
        linear_naive(x, w),
        rtol=2e-2,
        atol=2e-2 if dtype == torch.bfloat16 else 1e-3,
    )
    for rows in (1, 2, 8, 15, 16, 17, 31, 33, 64, 65, 128, 129, 512, 513, 1500):
        assert torch.equal(linear(x[7 : 7 + rows], w), expected[7 : 7 + rows]), rows
    count = segments(n, k)
    for rows in (1, 64, 2048):
        for most in (1, 32, 64, 128, 4096):
            tile = tile_for(most, n, dtype)
            assert torch.equal(product(x[:rows], w, tile, count), expected[:rows]), (rows, tile)
        if count == 1 and dtype == torch.bfloat16:
            for tile in (gemm._WIDE, gemm._WIDEST):
                assert torch.equal(wide_product(x[:rows], w, tile), expected[:rows]), (rows, tile)
