"""Unit lower triangular systems whose rows do not know what comes after them.

Row i of the solution uses rows up to i of both sides, by definition; here also in its bits, and
whatever other systems share the call. The library's solver is used where a check has shown just
that; otherwise plain elimination, column by column, every operation elementwise.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_DRAWS = 3
_MAX_BATCH = 128


def eliminate(a: Tensor, b: Tensor) -> Tensor:
    """(I + a) x = b by right-looking elimination: a [B, C, C] strictly lower, b [B, C, N]."""
    x = b.clone()
    for j in range(a.shape[1] - 1):
        x[:, j + 1 :] -= a[:, j + 1 :, j : j + 1] * x[:, j : j + 1]
    return x


def library(a: Tensor, b: Tensor) -> Tensor:
    """The same by BLAS (trsm)."""
    x: Tensor = torch.linalg.solve_triangular(a, b, upper=False, unitriangular=True)
    return x


class Solver:
    """(I + a) x = b over a raw solver; holds what the checks found."""

    def __init__(self, raw: Callable[[Tensor, Tensor], Tensor] = library) -> None:
        self._raw = raw
        self._batches: dict[tuple[int, int, int, int], int] = {}

    def solve(self, a: Tensor, b: Tensor) -> Tensor:
        """a [B, C, C] strictly lower triangular, b [B, C, N], fp32 -> x [B, C, N].

        Row i of item j is a function of that item's rows up to i alone.
        """
        batch, size, columns = b.shape
        outs: list[Tensor] = []
        done = 0
        while done < batch:
            wanted = 1 << (min(batch - done, _MAX_BATCH).bit_length() - 1)
            key = (size, columns, wanted, torch.get_num_threads())
            step = self._batches.get(key)
            if step is None:
                step = wanted
                while step and not self._safe(size, columns, step):
                    step //= 2
                self._batches[key] = step
            if not step:
                outs.append(eliminate(a[done:], b[done:]))
                break
            outs.append(self._raw(a[done : done + step], b[done : done + step]))
            done += step
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _safe(self, size: int, columns: int, batch: int) -> bool:
        """Batched equals one by one, and rows below a cut do not change those above it."""
        source = torch.Generator().manual_seed(batch)
        for _ in range(_DRAWS):
            a = (torch.randn(batch, size, size, generator=source) / 4).tril(-1)
            b = torch.randn(batch, size, columns, generator=source)
            whole = self._raw(a, b)
            alone = torch.cat(
                [
                    self._raw(x.clone(), y.clone())
                    for x, y in zip(a[:, None], b[:, None], strict=True)
                ]
            )
            if not torch.equal(whole, alone):
                return False
            cuts = torch.randint(1, size, (8,), generator=source).tolist() if size > 1 else []
            for cut in cuts:
                changed, other = a.clone(), b.clone()
                changed[:, cut:] = 0.0
                other[:, cut:] = 0.0
                if not torch.equal(self._raw(changed, other)[:, :cut], whole[:, :cut]):
                    return False
        return True


_solver = Solver()
solve_unit_lower = _solver.solve
