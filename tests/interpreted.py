"""What Triton's interpreter lacks to stand in for a device."""

from __future__ import annotations

import pytest


def order_dots(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's product is numpy's, whose rows depend on their mates. A tensor core adds
    to its accumulator in a fixed order: so does this one."""
    from triton.runtime import interpreter

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        total = d.data
        left, right = a.data.astype(total.dtype), b.data.astype(total.dtype)
        for k in range(left.shape[1]):
            total = total + left[:, k : k + 1] * right[k : k + 1]
        return interpreter.TensorHandle(total, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
