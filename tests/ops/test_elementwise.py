"""Values keep their bits at any place of any tensor."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from merestone.ops import elementwise as ew

pytestmark = pytest.mark.usefixtures("threads")

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": ew.sigmoid,
    "silu": ew.silu,
    "softplus": ew.softplus,
    "softmax": ew.softmax,
    "rms": lambda x: ew.rms(x, 1e-5),
    "l2_norm": lambda x: ew.l2_norm(x, 1e-6),
    "rms_norm": lambda x: ew.rms_norm(x, torch.linspace(-1, 2, x.shape[1]), 1e-5),
    "rms_norm bf16": lambda x: ew.rms_norm(
        x.bfloat16(), torch.linspace(-1, 2, x.shape[1]).bfloat16(), 1e-5
    ),
    "layer_norm": lambda x: ew.layer_norm(
        x, torch.linspace(-1, 2, x.shape[1]), torch.linspace(1, 2, x.shape[1]), 1e-6
    ),
    "swiglu": lambda x: ew.swiglu(x, x.flip(1), 2.0),
    "swiglu bf16": lambda x: ew.swiglu(x.bfloat16(), x.flip(1).bfloat16(), None),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("width", [1, 4, 8, 17, 48, 64, 256, 4096, 16384])
def test_place_does_not_matter(name: str, width: int) -> None:
    function = FUNCTIONS[name]
    count = 70 if width > 1000 else 700
    x = torch.randn(count, width, generator=torch.Generator().manual_seed(width)) * 4
    out = function(x)
    steps = (1, 2, 3, 5, 16, 31, 70) if width > 1000 else range(1, 71)
    for rows in steps:
        first = rows * 7 % (count - rows + 1)
        part = slice(first, first + rows)
        assert torch.equal(function(x[part]), out[part]), rows
        assert torch.equal(function(x[part].clone()), out[part]), rows
    columns = x.t().contiguous().t()  # the same rows in a strided layout
    assert torch.equal(function(columns), out)


def test_definitions() -> None:
    x = torch.linspace(-200, 200, 4001)
    functional = torch.nn.functional
    for ours, theirs in (
        (ew.sigmoid(x), torch.sigmoid(x)),
        (ew.silu(x), functional.silu(x)),
        (ew.softplus(x), functional.softplus(x)),
        (ew.softmax(x), x.softmax(-1)),
        (ew.rms_norm(x, x, 1e-5), functional.rms_norm(x, x.shape, x, 1e-5)),
        (ew.l2_norm(x, 0.0), functional.normalize(x, dim=0)),
    ):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-30)
    theirs = functional.layer_norm(x, x.shape, x, x, 1e-6)
    assert torch.allclose(ew.layer_norm(x, x, x, 1e-6), theirs, atol=1e-3)


def test_swiglu_clamps_the_gate_from_above_only() -> None:
    gate, up = torch.tensor([-50.0, 50.0, 1.0]), torch.tensor([1.0, -50.0, 50.0])
    expected = torch.nn.functional.silu(torch.tensor([-50.0, 2.0, 1.0])) * torch.tensor(
        [1.0, -2.0, 2.0]
    )
    assert torch.allclose(ew.swiglu(gate, up, 2.0), expected)
