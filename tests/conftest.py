"""One thread for every test unless it says otherwise: the count is part of the configuration. Each
begins with the same random numbers.

Without a CUDA device Triton's kernels run under its interpreter, which must be chosen before Triton
is first imported, by whichever test or library does so.
"""

import os
import sys

import pytest
import torch
from hypothesis import HealthCheck, settings

# No example has a time to keep: a machine may have other work.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

if not torch.cuda.is_available():
    assert "triton" not in sys.modules, "Triton was imported before its interpreter was chosen"
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What a test needs is its marker's to say."""
    devices = torch.cuda.device_count()
    for item in items:
        if item.get_closest_marker("gpu") and devices < 1:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if item.get_closest_marker("multi_gpu") and devices < 2:
            item.add_marker(pytest.mark.skip(reason="needs two CUDA devices"))


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)  # what is drawn depends on no other test
    yield
    torch.set_num_threads(before)
