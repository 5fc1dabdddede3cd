"""Two ranks on the device path: under the interpreter a thin thread of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from gpu.machine import DEVICE
from gpu.shares import answers, drafted, engines
from parallel.ranks import Ranks


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    pool = Ranks(2)
    yield pool
    pool.close()


@pytest.mark.parametrize(
    ("family", "length"), [("glm5_next", 14), ("kimi_linear", 7), ("one head", 10)]
)
def test_two_ranks_answer_as_their_cpu_layers_do_cold_and_restored(
    ranks: Ranks, family: str, length: int
) -> None:
    """In fp32; the replay, beside a mate, has the bits of the cold answer, on both ranks. Heads,
    the vocabulary and tokens are shared."""
    found = ranks.run(answers, 2, 2, family, length, timeout_s=300.0, device=DEVICE, staged=True)
    cold, again, far = found[0]
    assert again == cold
    assert found[1][:2] == (cold, again)
    assert max(far) < 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("dcp", [1, 2])
@pytest.mark.parametrize("kind", ["mtp", "dflash"])
def test_two_ranks_draft_without_a_change_of_bits(ranks: Ranks, kind: str, dcp: int) -> None:
    """The MTP layer by head, a DFlash draft whole; their rows are on both ranks while the target's
    are shared. Both accept the same drafts by their chances."""
    found = ranks.run(drafted, 2, dcp, kind, 13, 9, timeout_s=300.0, device=DEVICE)
    plain, cold, again, sampled, replayed = found[0]
    assert plain == cold == again
    assert sampled == replayed
    assert found[1] == found[0]


@pytest.mark.multi_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("dcp", [1, 2])
def test_two_gpus_restore_everything_with_the_bits_of_a_cold_run(
    ranks: Ranks, dcp: int, dtype: torch.dtype
) -> None:
    """With graphs and without, which makes no difference; both ranks agree."""
    found = ranks.run(engines, 2, dcp, dtype, True, timeout_s=120.0, device="cuda")
    found += ranks.run(engines, 2, dcp, dtype, False, timeout_s=120.0, device="cuda")
    assert all(other == found[0] for other in found)
