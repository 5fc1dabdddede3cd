"""Tests of the device path: whole on a CUDA device; a thin thread of it under the interpreter."""

import pytest

from gpu.machine import CUDA
from interpreted import order_dots


@pytest.fixture(autouse=True)
def _ordered_dots(monkeypatch: pytest.MonkeyPatch) -> None:
    if not CUDA:
        order_dots(monkeypatch)
