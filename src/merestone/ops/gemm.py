"""Matrix products in which a row's bits do not depend on its mates or its place.

Knows shapes, dtypes and what this machine's library was seen to do with them. Must not know
layers or sequences.

A BLAS chooses its algorithm by the number of rows, and may cut the rows among threads. So rows go
in blocks of one fixed shape, 16 rows, padded with zeros: the reference. Larger blocks, and batches
of blocks in one call, are used only for the shapes where a check on random data has shown that
they return the reference's bits. The check runs once, at the first use of a shape.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

ROWS = 16
"""Rows of the reference block."""

MAX_ROWS = 512
_LEAST_ROWS = 4
_SIZES = (4, 8, 16, 32, 64, 128, 256, 512)
_DRAWS = 3
_ALIGNMENT = 64
# Elements of the operands in one batched call: bounds both the check's time and the memory.
_BATCH_ELEMENTS = 1 << 21
_MAX_BATCH = 128


@dataclass(frozen=True, slots=True)
class Shape:
    """What a library may choose an algorithm by, besides the number of rows and the batch.

    The right operand is [k, n]; ``transposed``: it is stored as [n, k]. ``shared``: all items of a
    batch have the same left operand (stride 0). ``threads`` of the pool.
    """

    k: int
    n: int
    dtype: torch.dtype
    transposed: bool
    shared: bool
    threads: int


def aligned(x: Tensor) -> Tensor:
    """``x``, contiguous and starting at a multiple of 64 bytes (copied if it was not)."""
    x = x.contiguous()
    return x if x.data_ptr() % _ALIGNMENT == 0 else x.clone()


def _at_least(n: int) -> int:
    """The smallest power of two that is not below ``n``."""
    return 1 << max(n - 1, 0).bit_length()


class Products:
    """Row-invariant products over two raw ones: ``mm`` [M, K] x [K, N] and the batched ``bmm``.

    Holds what the checks found; results are deterministic functions of the operands either way.
    """

    def __init__(
        self,
        mm: Callable[[Tensor, Tensor], Tensor] = torch.mm,
        bmm: Callable[[Tensor, Tensor], Tensor] = torch.bmm,
    ) -> None:
        self._mm = mm
        self._bmm = bmm
        self._units: dict[Shape, int] = {}
        self._rows: dict[tuple[Shape, int, int], int] = {}
        self._batches: dict[tuple[Shape, int, int], int] = {}
        self._checked: dict[tuple[Shape, int, int], bool] = {}

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [M, K] times the transpose of weight [N, K] -> [M, N], in their common dtype.

        Row i of the result is a function of row i of ``x`` and of ``weight`` alone.
        """
        assert x.dtype == weight.dtype, (x.dtype, weight.dtype)
        weight = aligned(weight)
        shape = Shape(x.shape[1], weight.shape[0], x.dtype, True, False, torch.get_num_threads())
        return self._by_rows(x, weight.t(), shape)

    def bmm(self, a: Tensor, b: Tensor) -> Tensor:
        """a [B, M, K] times b [B, K, N] -> [B, M, N]; each row as :meth:`linear` would compute it.

        ``a`` may be expanded over the batch (stride 0). Items of ``b`` are contiguous, or
        transposes of contiguous ones; which of the two is part of the bits' definition.
        """
        batch, rows, k = a.shape
        n = b.shape[2]
        transposed = b.stride(1) == 1 and b.stride(2) == k and n > 1
        b = aligned(b.transpose(1, 2)).transpose(1, 2) if transposed else aligned(b)
        shared = batch > 1 and a.stride(0) == 0
        shape = Shape(k, n, a.dtype, transposed, shared, torch.get_num_threads())
        if rows > MAX_ROWS:
            parts = [self.bmm(part, b) for part in torch.split(a, MAX_ROWS, dim=1)]
            return torch.cat(parts, dim=1)
        block = self._block(shape, rows, 1) if rows < ROWS else _at_least(rows)
        if shared:
            one = aligned(pad(a[0], (0, 0, 0, block - rows)))
            a = one.expand(batch, block, k)
        elif block > rows:
            a = pad(a, (0, 0, 0, block - rows))
        else:
            a = aligned(a)
        outs: list[Tensor] = []
        done = 0
        while done < batch:
            step = self._batch(shape, block, batch - done)
            if step:
                outs.append(self._bmm(a[done : done + step], b[done : done + step]))
            else:
                step = 1
                outs.append(self._by_rows(a[done], self._item(b, done, transposed), shape)[None])
            done += step
        out = outs[0] if len(outs) == 1 else torch.cat(outs)
        return out[:, :rows] if block > rows else out

    def _by_rows(self, x: Tensor, b: Tensor, shape: Shape) -> Tensor:
        """[M, K] x [K, N] in the largest blocks of rows that are known to be safe."""
        rows = x.shape[0]
        if rows == 0:
            return x.new_empty(0, b.shape[1])
        block = self._block(shape, rows)
        if rows <= block:
            x = aligned(x if rows == block else pad(x, (0, 0, 0, block - rows)))
            out = self._mm(x, b)
            return out if rows == block else out[:rows]
        parts = [self._by_rows(part, b, shape) for part in torch.split(x, block)]
        return torch.cat(parts)

    def _item(self, b: Tensor, i: int, transposed: bool) -> Tensor:
        """Item ``i`` of a batched right operand, in its layout, aligned."""
        return aligned(b[i].t()).t() if transposed else aligned(b[i])

    # What is safe --------------------------------------------------------------------------

    def _block(self, shape: Shape, rows: int, batch: int = 0) -> int:
        """Rows of the block in which ``rows`` rows are best computed; ``batch`` 0: plainly."""
        wanted = max(min(_at_least(rows), MAX_ROWS), _LEAST_ROWS)
        block = self._rows.get((shape, wanted, batch))
        if block is None:
            # A few rows need not fill the reference block, many may go beyond it.
            sizes = [size for size in _SIZES if wanted <= size < ROWS]
            sizes += [size for size in reversed(_SIZES) if ROWS < size <= wanted]
            safe = (size for size in sizes if self._safe(shape, size, batch))
            block = self._rows[shape, wanted, batch] = next(
                safe, ROWS if batch else self._unit(shape)
            )
        return block

    def _unit(self, shape: Shape) -> int:
        """Rows of the reference block: 16, or 1 where even 16 rows are not independent."""
        unit = self._units.get(shape)
        if unit is None:
            self._units[shape] = unit = ROWS
            if not self._safe(shape, ROWS, 0):
                self._units[shape] = unit = 1
        return unit

    def _batch(self, shape: Shape, rows: int, wanted: int) -> int:
        """Items of ``rows`` rows to put into one batched call, at most ``wanted``; 0 for none."""
        room = _BATCH_ELEMENTS // (rows * (shape.k + shape.n) + shape.k * shape.n)
        wanted = min(wanted, max(room, 1), _MAX_BATCH)
        wanted = 1 << (wanted.bit_length() - 1)
        batch = self._batches.get((shape, rows, wanted))
        if batch is None:
            batch = wanted
            while batch and not self._safe(shape, rows, batch):
                batch //= 2
            self._batches[shape, rows, wanted] = batch
        return batch

    def _safe(self, shape: Shape, rows: int, batch: int) -> bool:
        """Does a call of this size return the reference's bits? ``batch`` 0: a plain product."""
        found = self._checked.get((shape, rows, batch))
        if found is None:
            draw = self._draw_rows if batch == 0 else self._draw_batch
            source = torch.Generator().manual_seed(rows * 1000 + batch)
            found = all(draw(shape, rows, batch, source) for _ in range(_DRAWS))
            self._checked[shape, rows, batch] = found
        return found

    def _reference(self, x: Tensor, b: Tensor, shape: Shape) -> Tensor:
        unit = self._unit(shape)
        return torch.cat([self._mm(aligned(part), b) for part in torch.split(x, unit)])

    def _draw_rows(self, shape: Shape, rows: int, batch: int, source: torch.Generator) -> bool:
        """Blocks of ``rows`` rows against the reference: other places, other mates, padding."""
        x = torch.randn(max(rows, 2 * ROWS), shape.k, generator=source).to(shape.dtype)
        b = _right(shape, 1, source)[0]
        expected = self._reference(x, b, shape)
        places = torch.randperm(x.shape[0], generator=source)
        moved = torch.cat([self._mm(aligned(part), b) for part in torch.split(x[places], rows)])
        few = 1 + int(torch.randint(rows, (1,), generator=source))
        padded = self._mm(pad(x[:few], (0, 0, 0, rows - few)), b)[:few]
        return torch.equal(moved, expected[places]) and torch.equal(padded, expected[:few])

    def _draw_batch(self, shape: Shape, rows: int, batch: int, source: torch.Generator) -> bool:
        """A batched call against the reference of each of its items."""
        count = 1 if shape.shared else batch
        a = torch.randn(count, rows, shape.k, generator=source).to(shape.dtype)
        b = _right(shape, batch, source)
        got = self._bmm(a.expand(batch, rows, shape.k), b)
        for i in range(batch):
            item = self._item(b, i, shape.transposed)
            if not torch.equal(got[i], self._reference(a[i % count], item, shape)):
                return False
        return True


def _right(shape: Shape, batch: int, source: torch.Generator) -> Tensor:
    """Random right operands [batch, k, n] in the shape's layout."""
    if shape.transposed:
        stored = torch.randn(batch, shape.n, shape.k, generator=source).to(shape.dtype)
        return stored.transpose(1, 2)
    return torch.randn(batch, shape.k, shape.n, generator=source).to(shape.dtype)


_products = Products()
linear = _products.linear
bmm = _products.bmm
