"""Two ranks on the device path: under the interpreter a thin thread of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpu.shares import answers
from parallel.ranks import Ranks


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    pool = Ranks(2)
    yield pool
    pool.close()


@pytest.mark.parametrize(("family", "length"), [("glm5_next", 14), ("kimi_linear", 7)])
def test_two_ranks_answer_as_their_cpu_layers_do_cold_and_restored(
    ranks: Ranks, family: str, length: int
) -> None:
    """In fp32; the replay, beside a mate, has the bits of the cold answer, on both ranks. Heads,
    the vocabulary and tokens are shared."""
    found = ranks.run(answers, 2, 2, family, length, timeout_s=300.0)
    cold, again, far = found[0]
    assert again == cold
    assert found[1][:2] == (cold, again)
    assert max(far) < 1e-3
