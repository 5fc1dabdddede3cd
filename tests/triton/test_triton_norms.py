"""Norms and gates: each row alone, anywhere in a batch, has the same bits; close to the CPU's."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from merestone.ops import elementwise
from merestone.ops.triton import norms

Operator = Callable[..., Tensor]


def cases(draw, width: int, dtype: torch.dtype = torch.float32) -> dict[str, tuple[Operator, ...]]:
    """Our operator on rows x and rows y [M, width], and its definition."""
    weight, bias = draw(width), draw(width)
    rate = draw(1).exp()

    def gated(x: Tensor, y: Tensor) -> Tensor:
        return elementwise.rms(x.float(), 1e-5) * weight * elementwise.sigmoid(y.float())

    def decay(x: Tensor, lowest: float | None) -> Tensor:
        z = x.float() + bias
        if lowest is None:
            return elementwise.softplus(z) * -rate
        return elementwise.sigmoid(z * rate) * lowest

    plain = weight.to(dtype), bias.to(dtype)
    return {
        "rms": (
            lambda x, y: norms.rms_norm(x, plain[0], 1e-5),
            lambda x, y: elementwise.rms_norm(x, plain[0], 1e-5),
        ),
        "gated": (lambda x, y: norms.gated_rms_norm(x, weight, y, 1e-5), gated),
        "layer": (
            lambda x, y: norms.layer_norm(x, *plain, 1e-6),
            lambda x, y: elementwise.layer_norm(x, *plain, 1e-6),
        ),
        "l2": (
            lambda x, y: norms.l2_norm(x, 1e-6, 0.25),
            lambda x, y: elementwise.l2_norm(x.float(), 1e-6) * 0.25,
        ),
        "swiglu": (
            lambda x, y: norms.swiglu(torch.cat([x, y], 1), 1.0),
            lambda x, y: elementwise.swiglu(x, y, 1.0),
        ),
        "swiglu, unlimited": (
            lambda x, y: norms.swiglu(torch.cat([x, y], 1), None),
            lambda x, y: elementwise.swiglu(x, y, None),
        ),
        "bounded decay": (
            lambda x, y: norms.log_decay(x, bias, rate, -5.0),
            lambda x, y: decay(x, -5.0),
        ),
        "decay": (lambda x, y: norms.log_decay(x, bias, rate, None), lambda x, y: decay(x, None)),
    }


def same_alone(operator: Operator, x: Tensor, y: Tensor) -> Tensor:
    """The result of all rows, after comparing it with those of other batches."""
    rows = x.shape[0]
    expected = operator(x, y)
    places = torch.randperm(rows, generator=torch.Generator().manual_seed(rows)).to(x.device)
    assert torch.equal(operator(x[places], y[places]), expected[places])
    for cut in {1, 2, rows // 2, rows - 1}:
        assert torch.equal(operator(x[:cut], y[:cut]), expected[:cut])
    assert operator(x[:0], y[:0]).shape[0] == 0
    return expected


@pytest.mark.parametrize("width", [8, 48, 520])
def test_rows_are_their_own(draw, width: int) -> None:
    x, y = 3 * draw(17, width), draw(17, width)
    for name, (operator, definition) in cases(draw, width).items():
        got = same_alone(operator, x, y)
        torch.testing.assert_close(got, definition(x, y), msg=lambda m, name=name: f"{name}: {m}")


def test_a_strided_part_of_a_product(draw) -> None:
    """Projections are computed together and split: rows then lie further apart."""
    wide, weight = draw(5, 64), draw(16)
    part = wide[:, 16:32]
    assert torch.equal(
        norms.rms_norm(part, weight, 1e-5), norms.rms_norm(part.contiguous(), weight, 1e-5)
    )


def same_sum(x: Tensor, y: Tensor, weight: Tensor) -> None:
    total, normed = norms.add_rms_norm(x, y, weight, 1e-5)
    assert torch.equal(total, x + y)
    assert torch.equal(normed, norms.rms_norm(x + y, weight, 1e-5))


@pytest.mark.parametrize("width", [8, 48, 520])
def test_a_sum_and_its_norm(draw, width: int) -> None:
    """The sum is rounded as if it had been stored in between."""
    for rows in (0, 1, 5, 17):
        same_sum(3 * draw(rows, width).half(), draw(rows, width).half(), draw(width).half())


@pytest.mark.gpu
@pytest.mark.parametrize("width", [128, 2304, 4096])
def test_a_sum_and_its_norm_at_true_widths(draw, width: int) -> None:
    for rows in (1, 5, 1000):
        x, y, weight = 3 * draw(rows, width), draw(rows, width), draw(width)
        same_sum(x.bfloat16(), y.bfloat16(), weight.bfloat16())


@pytest.mark.gpu
@pytest.mark.parametrize("width", [128, 512, 1536, 4096])
def test_true_widths(draw, width: int) -> None:
    x, y = 3 * draw(1000, width).bfloat16(), draw(1000, width).bfloat16()
    for name, (operator, definition) in cases(draw, width, torch.bfloat16).items():
        got = same_alone(operator, x, y)
        torch.testing.assert_close(
            got.float(),
            definition(x, y).float(),
            rtol=2e-2,
            atol=2e-2,
            msg=lambda m, name=name: f"{name}: {m}",
        )
