"""One thread for the models' tests: small products gain nothing from a second, and on a shared
machine waiting for it costs ten times the work. (The thread count is part of a configuration.)"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
