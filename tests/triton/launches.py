"""Every operator once, at GLM-5.3-Flash's dimensions, for `aot.py`: nothing here is computed."""

from collections.abc import Callable

import torch

from merestone.core.geometry import GroupSpec
from merestone.ops.triton.copy import Copier, Region

LAUNCHES: dict[str, Callable[[], object]] = {}


def launch(function: Callable[[], object]) -> Callable[[], object]:
    LAUNCHES[function.__name__] = function
    return function


@launch
def copy() -> None:
    arena = torch.empty(4, 1 << 20, dtype=torch.uint8)
    slots = torch.empty(2, 16, 8192, dtype=torch.uint8)
    groups = {"full": (GroupSpec("full", page=1024), [Region(0, 1024)])}
    copier = Copier(arena, slots, groups, padding=(3, 1))
    copier.run(copier.encode((), 4))
