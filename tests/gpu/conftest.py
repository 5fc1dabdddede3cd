"""Tests of the device path: whole on a CUDA device; a thin thread of it under the interpreter."""

from pathlib import Path

import pytest
import torch

from gpu.machine import CUDA
from interpreted import order_dots

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE) and not CUDA and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if item.path.is_relative_to(HERE) and item.get_closest_marker("multi_gpu"):
            few = torch.cuda.device_count() < 2
            item.add_marker(pytest.mark.skipif(few, reason="needs two CUDA devices"))


@pytest.fixture(autouse=True)
def _ordered_dots(monkeypatch: pytest.MonkeyPatch) -> None:
    if not CUDA:
        order_dots(monkeypatch)
