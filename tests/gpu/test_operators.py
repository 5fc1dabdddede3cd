"""No operator of the library whose sums depend on sizes: products and reductions are ours.

The library's operators that steps dispatch on floating-point tensors, without graphs, are named
ones: for every family and drafter, greedy and drawn, prefilled, decoded, restored and batched. What
it does with integers is exact.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.real import stream
from gpu import test_gpu_dflash as dflash
from gpu import test_speculation as mtp
from gpu.machine import CUDA, GpuReal, tiny
from merestone.sched.plan import SamplingParams

ALLOWED = {
    # Allocation, views, copies and gathers.
    "empty", "new_empty", "zeros_like", "full_like", "empty_like", "empty_strided", "_to_copy",
    "lift_fresh", "detach", "alias", "view", "_unsafe_view", "reshape", "slice", "select",
    "split_with_sizes", "unsqueeze", "expand", "transpose", "t", "unbind", "clone", "copy_",
    "cat", "index", "index_select", "zero_", "as_strided", "_local_scalar_dense", "zeros", "full",
    "to", "contiguous", "item", "resolve_conj", "resolve_neg", "detach_", "is_pinned", "flatten",
    "pin_memory", "_pin_memory",
    # Elementwise, rounded once.
    "add", "div",
}  # fmt: skip
# Triton's interpreter gives tensors their memory back.
INTERPRETED = set() if CUDA else {"set_"}
OPTIONS = {"frames": 2000, "max_running": 2, "token_budget": 256}


class Floating(TorchDispatchMode):
    """Collects the names of the operators that read or write floating-point tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, kwargs, found)) if isinstance(x, torch.Tensor)]
        if any(tensor.is_floating_point() for tensor in tensors):
            self.names.add(func.overloadpacket.__name__)
        return found


def plain(family: str) -> Callable[[], GpuReal]:
    return lambda: GpuReal(tiny("bfloat16", family=family), **OPTIONS)


MAKERS = {
    "glm5_next": plain("glm5_next"),
    "kimi_linear": plain("kimi_linear"),
    "mtp": lambda: mtp.Drafting(mtp.bundled(torch.bfloat16), 3, **OPTIONS),
    "dflash": lambda: dflash.Noted(*dflash.bundled(torch.bfloat16), **OPTIONS),
    # Two layers, and one that drafts.
    "small": lambda: mtp.Drafting(mtp.small(), 2, frames=300, max_running=1, token_budget=64),
}
ON_DEVICE = [pytest.param(name, 200, 20, marks=pytest.mark.gpu) for name in list(MAKERS)[:4]]


@pytest.mark.parametrize(("maker", "length", "count"), [("small", 4, 2), *ON_DEVICE])
def test_a_step_launches_only_what_it_may(maker: str, length: int, count: int) -> None:
    real = MAKERS[maker]()
    prompt = tuple(t % 64 for t in stream(length, 2))
    drawn = SamplingParams(temperature=0.9, seed=5)
    with Floating() as seen:
        first = real.ask(prompt, count, params=SamplingParams())
        replies = [real.send(prompt, count, params=drawn)]
        if length > count:
            turn = (*prompt, *first.ids(), 3)
            replies.append(real.send(turn, count, params=SamplingParams()))
        real.drain()
    assert replies[0].restored == length
    assert len(seen.names) > 5
    assert seen.names - ALLOWED - INTERPRETED == set()
