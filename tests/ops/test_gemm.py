"""Rows of a product keep their bits in any company; where the library breaks that, we notice."""

import pytest
import torch
from torch import Tensor

from merestone.ops.gemm import Products, aligned

DTYPES = [torch.float32, torch.bfloat16]
pytestmark = pytest.mark.usefixtures("threads")


def rows(count: int, k: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(count, k, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("k", "n"), [(64, 260), (64, 8), (256, 24), (17, 9), (16, 64), (1, 1), (4, 48), (8, 17)]
)
def test_linear(k: int, n: int, dtype: torch.dtype) -> None:
    products = Products()
    x, weight = rows(600, k, dtype), rows(n, k, dtype, 1)
    out = products.linear(x, weight)
    near = x.double() @ weight.double().t()
    assert torch.allclose(out.double(), near, rtol=0.02, atol=0.02 * k**0.5)
    order = torch.randperm(600, generator=torch.Generator().manual_seed(2))
    assert torch.equal(products.linear(x[order], weight), out[order])
    for first, count in ((0, 1), (599, 1), (3, 2), (5, 15), (0, 16), (7, 17), (80, 100), (1, 512)):
        part = slice(first, first + count)
        assert torch.equal(products.linear(x[part], weight), out[part])
    mates = torch.cat([x[:1], torch.zeros(9, k, dtype=dtype), x[1:2] * 1e4])
    assert torch.equal(products.linear(mates, weight)[0], out[0])
    assert products.linear(x[:0], weight).shape == (0, n)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("m", "k", "n"),
    [(64, 16, 64), (4, 32, 64), (1, 64, 32), (40, 17, 9), (16, 64, 16), (600, 8, 4)],
)
def test_bmm_has_the_rows_of_linear(m: int, k: int, n: int, transposed: bool) -> None:
    products = Products()
    a = rows(21 * m, k).view(21, m, k)
    b = rows(21 * k, n, seed=1).view(21, k, n)
    if transposed:
        b = b.transpose(1, 2).contiguous().transpose(1, 2)
    out = products.bmm(a, b)
    assert torch.allclose(out, a @ b, atol=1e-4)
    for part in (slice(0, 1), slice(20, 21), slice(2, 5), slice(1, 18)):
        assert torch.equal(products.bmm(a[part], b[part]), out[part])
    assert torch.equal(products.bmm(a[:, m // 2 :], b), out[:, m // 2 :])
    shared = products.bmm(a[3].expand(21, m, k), b)
    assert torch.equal(shared[3], out[3])
    if transposed:
        assert torch.equal(products.linear(a[7], b[7].t()), out[7])


def by_rows(x: Tensor, b: Tensor) -> Tensor:
    """Bits depend on the number of rows."""
    return (x @ b) * (1 + x.shape[0] * 2**-18)


def by_place(x: Tensor, b: Tensor) -> Tensor:
    """Bits depend on a row's place."""
    return (x @ b) * (1 + torch.arange(x.shape[0])[:, None] * 2**-18)


def by_mates(x: Tensor, b: Tensor) -> Tensor:
    """Bits depend on the other rows."""
    return (x @ b) * (1 + (x[:, :1].sum() > 0) * 2**-18)


@pytest.mark.parametrize("raw", [by_rows, by_place, by_mates])
def test_linear_without_a_good_library(raw) -> None:  # type: ignore[no-untyped-def]
    products = Products(mm=raw)
    x, weight = rows(100, 24), rows(12, 24, seed=1)
    out = products.linear(x, weight)
    order = torch.randperm(100, generator=torch.Generator().manual_seed(2))
    assert torch.equal(products.linear(x[order], weight), out[order])
    for part in (slice(0, 1), slice(4, 21), slice(10, 90)):
        assert torch.equal(products.linear(x[part], weight), out[part])


def batch_by_count(a: Tensor, b: Tensor) -> Tensor:
    """Bits depend on the batch beyond two items."""
    return torch.bmm(a, b) * (1 + (a.shape[0] > 2) * 2**-18)


def batch_by_place(a: Tensor, b: Tensor) -> Tensor:
    """Bits depend on the place in the batch."""
    return torch.bmm(a, b) * (1 + torch.arange(a.shape[0])[:, None, None] * 2**-18)


@pytest.mark.parametrize("raw", [batch_by_count, batch_by_place])
@pytest.mark.parametrize("mm", [torch.mm, by_place, by_rows])
def test_bmm_without_a_good_library(raw, mm) -> None:  # type: ignore[no-untyped-def]
    products = Products(mm=mm, bmm=raw)
    a, b = rows(9 * 20, 24).view(9, 20, 24), rows(9 * 24, 12, seed=1).view(9, 24, 12)
    out = products.bmm(a, b)
    assert torch.allclose(out, a @ b, atol=1e-2)
    for part in (slice(0, 1), slice(8, 9), slice(3, 7)):
        assert torch.equal(products.bmm(a[part], b[part]), out[part])
    assert torch.equal(products.bmm(a[:, 5:9], b), out[:, 5:9])


def test_a_check_is_made_once() -> None:
    calls = 0

    def counted(x: Tensor, b: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return torch.mm(x, b)

    products = Products(mm=counted)
    x, weight = rows(30, 16), rows(8, 16, seed=1)
    products.linear(x, weight)
    calls = 0
    products.linear(x, weight)
    assert calls == 1


def test_aligned() -> None:
    x = torch.arange(40.0)
    assert aligned(x).data_ptr() == x.data_ptr()
    assert aligned(x[1:]).data_ptr() % 64 == 0
    assert torch.equal(aligned(x[1:]), x[1:])
