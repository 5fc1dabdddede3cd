import pytest
import torch
from torch import Tensor

from merestone.ops.moe import experts, route
from merestone.ops.naive import experts as naive_experts

pytestmark = pytest.mark.usefixtures("threads")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_does_not_know_the_others(dtype: torch.dtype) -> None:
    x = normal(90, 32).to(dtype)
    gate, bias = normal(8, 32, seed=1), normal(8, seed=2) / 10
    gate_up = list((normal(8, 48, 32, seed=3) / 6).to(dtype))
    down = list((normal(8, 32, 24, seed=4) / 5).to(dtype))

    def run(rows: Tensor) -> Tensor:
        ids, weights = route(rows, gate, bias, 3, True, 2.5)
        return experts(rows, ids, weights, gate_up, down, 10.0)

    out = run(x)
    order = torch.randperm(90, generator=torch.Generator().manual_seed(5))
    assert torch.equal(run(x[order]), out[order])
    for part in (slice(0, 1), slice(4, 9), slice(30, 80)):
        assert torch.equal(run(x[part]), out[part])
    if dtype == torch.float32:
        ids, weights = route(x, gate, bias, 3, True, 2.5)
        expected = naive_experts(x, ids, weights, torch.stack(gate_up), torch.stack(down))
        assert torch.allclose(out, expected, atol=1e-4)


def test_router() -> None:
    x = torch.tensor([[1.0, 0.0]])
    gate = torch.tensor([[0.0, 0.0], [2.0, 0.0], [0.0, 5.0], [0.0, 1.0]])
    ids, weights = route(x, gate, torch.tensor([0.0, 0.0, 0.0, 1.0]), 3, False, 2.0)
    # The bias puts 3 first; 0 and 2 tie at one half, and the lower comes in.
    assert ids.tolist() == [[3, 1, 0]]
    assert torch.allclose(weights, 2 * torch.sigmoid(torch.tensor([[0.0, 2.0, 0.0]])))
    _, normed = route(x, gate, torch.zeros(4), 2, True, 2.5)
    assert torch.allclose(normed.sum(), torch.tensor(2.5))
