import pytest
import torch
from torch import Tensor

from merestone.ops.solve import Solver, eliminate, library

pytestmark = pytest.mark.usefixtures("threads")


def system(batch: int, size: int = 64, columns: int = 32) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(batch)
    a = (torch.randn(batch, size, size, generator=source) / 8).tril(-1)
    return a, torch.randn(batch, size, columns, generator=source)


def batch_dependent(a: Tensor, b: Tensor) -> Tensor:
    return library(a, b) * (1 + a.shape[0] * 2**-18)


def suffix_dependent(a: Tensor, b: Tensor) -> Tensor:
    return library(a, b) * (1 + (b[:, -1:, :1] != 0) * 2**-18)


@pytest.mark.parametrize("raw", [library, eliminate, batch_dependent, suffix_dependent])
def test_rows_know_neither_mates_nor_successors(raw) -> None:  # type: ignore[no-untyped-def]
    solver = Solver(raw)
    a, b = system(13)
    x = solver.solve(a, b)
    assert torch.allclose(x, torch.linalg.inv(torch.eye(64) + a.double()).float() @ b, atol=1e-3)
    for part in (slice(0, 1), slice(12, 13), slice(2, 9)):
        assert torch.equal(solver.solve(a[part], b[part]), x[part])
    for cut in (1, 15, 16, 40, 63):
        changed, other = a.clone(), b.clone()
        changed[:, cut:, :cut] = 0.5
        other[:, cut:] = 3.0
        assert torch.equal(solver.solve(changed, other)[:, :cut], x[:, :cut])
