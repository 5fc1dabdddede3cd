import pytest
import torch
from torch import Tensor

from merestone.ops.hyper import coefficients, collapse, expand, mean

pytestmark = pytest.mark.usefixtures("threads")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weights(n: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    total = n * (2 + n)
    scale = normal(3, seed=3).repeat_interleave(torch.tensor([n, n, n * n]))
    return normal(total, n * width, seed=1) / 8, normal(total, seed=2), scale


@pytest.mark.parametrize("n", [2, 4])
def test_definition(n: int) -> None:
    fn, base, scale = weights(n, 16)
    streams = normal(5, n, 16)
    pre, post, comb = coefficients(streams, fn, base, scale, 1e-6, 1e-5, 20)
    flat = torch.nn.functional.rms_norm(streams.view(5, -1), (n * 16,), eps=1e-5)
    z = (flat @ fn.t()) * scale + base
    assert torch.allclose(pre, z[:, :n].sigmoid() + 1e-6, atol=1e-5)
    assert torch.allclose(post, 2 * z[:, n : 2 * n].sigmoid(), atol=1e-5)
    expected = z[:, 2 * n :].view(5, n, n).softmax(-1) + 1e-6
    for half in range(39):
        expected = expected / (expected.sum(-1 if half % 2 else -2, keepdim=True) + 1e-6)
    assert torch.allclose(comb, expected, atol=1e-5)
    y = normal(5, 16, seed=4)
    mixed = post[:, :, None] * y[:, None] + comb.transpose(1, 2) @ streams
    assert torch.allclose(expand(streams, y, post, comb), mixed, atol=1e-5)
    assert torch.allclose(collapse(streams, pre), (pre[:, :, None] * streams).sum(1), atol=1e-5)
    assert torch.allclose(mean(streams), streams.mean(1), atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "width"), [(4, 64), (4, 17), (2, 48), (4, 4096)])
def test_rows_do_not_know_each_other(n: int, width: int, dtype: torch.dtype) -> None:
    fn, base, scale = weights(n, width)
    streams, y = normal(70, n, width).to(dtype), normal(70, width, seed=4).to(dtype)

    def run(part: slice) -> list[Tensor]:
        own = streams[part]
        pre, post, comb = coefficients(own, fn, base, scale, 1e-6, 1e-5, 20)
        return [pre, post, comb, collapse(own, pre), expand(own, y[part], post, comb), mean(own)]

    whole = run(slice(0, 70))
    for part in (slice(0, 1), slice(69, 70), slice(3, 20), slice(20, 60)):
        for alone, among in zip(run(part), whole, strict=True):
            assert torch.equal(alone, among[part])
