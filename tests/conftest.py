"""One thread for every test unless it says otherwise: the count is part of the configuration.

Without a CUDA device Triton's kernels run under its interpreter, which must be chosen before Triton
is first imported, by whichever test or library does so.
"""

import os
import sys

import pytest
import torch

if not torch.cuda.is_available():
    assert "triton" not in sys.modules, "Triton was imported before its interpreter was chosen"
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
