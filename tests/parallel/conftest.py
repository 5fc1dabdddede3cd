from collections.abc import Iterator

import pytest

from parallel.ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Four processes, for layouts of up to four ranks."""
    pool = Ranks(4)
    yield pool
    pool.close()
