"""Hyper-connections: rows are their own, and close to the CPU's definition."""

import pytest
import torch
from torch import Tensor

from merestone.ops import hyper as plain
from merestone.ops.elementwise import rms_norm
from merestone.ops.triton.hyper import enter, leave, mean

N = 4


def weights(draw, width: int) -> dict[str, Tensor]:
    parts = N * (2 + N)
    return {
        "fn": draw(parts, N * width) * (N * width) ** -0.5,
        "base": draw(parts),
        "scale": draw(parts),
    }


def sublayer(streams: Tensor, y: Tensor, weight: Tensor, **coefficients: Tensor):
    """Everything a sublayer passes through: its input, the streams after it, their mean."""
    out, post, comb = enter(
        streams,
        **coefficients,
        weight=weight,
        eps=1e-6,
        rms_eps=1e-5,
        norm_eps=1e-5,
        iterations=20,
    )
    after = leave(streams, y, post, comb)
    return out, post, comb, after, mean(after)


@pytest.mark.usefixtures("ordered_dot")
def test_rows_are_their_own(draw) -> None:
    streams, y = 2 * draw(9, N, 48), draw(9, 48)
    weight, coefficients = draw(48), weights(draw, 48)
    got = sublayer(streams, y, weight, **coefficients)
    pre, post, comb = plain.coefficients(
        streams, *coefficients.values(), eps=1e-6, rms_eps=1e-5, iterations=20
    )
    after = plain.expand(streams, y, post, comb)
    entered = rms_norm(plain.collapse(streams, pre), weight, 1e-5)
    expected = entered, post, comb, after, plain.mean(after)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got[2].sum(1), torch.ones_like(post))
    for rows in ([3], [8, 0, 5], [1, 2, 3, 4]):
        again = sublayer(streams[rows], y[rows], weight, **coefficients)
        for one, other in zip(again, got, strict=True):
            assert torch.equal(one, other[rows])
    assert enter(
        streams[:0], **coefficients, weight=weight, eps=0.1, rms_eps=0.1, norm_eps=0.1, iterations=1
    )[0].shape == (0, 48)


@pytest.mark.gpu
def test_true_dimensions(draw) -> None:
    streams, y = draw(600, N, 4096).bfloat16(), draw(600, 4096).bfloat16()
    weight, coefficients = draw(4096).bfloat16(), weights(draw, 4096)
    got = sublayer(streams, y, weight, **coefficients)
    _, post, comb = plain.coefficients(
        streams, *coefficients.values(), eps=1e-6, rms_eps=1e-5, iterations=20
    )
    torch.testing.assert_close(got[1], post, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(got[2], comb, rtol=1e-3, atol=1e-3)
    after = plain.expand(streams, y, post, comb)
    torch.testing.assert_close(got[3].float(), after.float(), rtol=2e-2, atol=2e-2)
    for cut in (1, 2, 16, 17, 64, 65, 500):
        again = sublayer(streams[:cut], y[:cut], weight, **coefficients)
        for one, other in zip(again, got, strict=True):
            assert torch.equal(one, other[:cut]), cut
