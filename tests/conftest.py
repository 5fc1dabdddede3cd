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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--times",
        type=int,
        default=1,
        help="give the state machines this many times their examples, other ones in each run",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What a test needs is its marker's to say."""
    if config.getoption("--times") > 1:
        _multiply(items, config.getoption("--times"))
    devices = torch.cuda.device_count()
    for item in items:
        if item.get_closest_marker("gpu") and devices < 1:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if item.get_closest_marker("multi_gpu") and devices < 2:
            item.add_marker(pytest.mark.skip(reason="needs two CUDA devices"))


def _multiply(items: list[pytest.Item], times: int) -> None:
    for machine in {item.cls for item in items if isinstance(item, pytest.Function)}:
        usual = getattr(machine, "settings", None)
        if isinstance(usual, settings):
            count = times * usual.max_examples
            machine.settings = settings(usual, max_examples=count, derandomize=False)


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)  # what is drawn depends on no other test
    yield
    torch.set_num_threads(before)
