"""A switch for measurements only: the layers' products by cuBLAS, the recurrence by fla-core.

What an engine that does not promise bits would run in our place: cuBLAS chooses its algorithm by
the number of rows, decoding rewrites the state in place, prefill takes chunks as they come. Answers
are not checked; nothing can be resumed from such a state.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from merestone.device.gpu_passes import MIXED


def _linear(x: Tensor, weight: Tensor, *, out_dtype: torch.dtype | None = None) -> Tensor:
    out = x.to(weight.dtype) @ weight.transpose(-1, -2)
    return out if out_dtype is None else out.to(out_dtype)


def _recurrence(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, anchors: Any, cache: Any,
    sequences: Any, step: Any, *, chunk: int, lowest: float | None = None,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    from fla.ops.kda import chunk_kda
    from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd

    rows = q.shape[0]
    # Sequences of padding, last, have no rows; nor has one that an empty first launch passes by.
    slot, lengths = step.slot.long(), (step.end - sequences.first).clamp(min=0)
    ends = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).long()
    inputs = [x[None].contiguous() for x in (q, k, v, g, beta)]
    # What fla-core does with chunks reads lengths on the host, which a graph cannot.
    if rows <= MIXED[-1]:
        # A table of a state for each token: the same one for all of a sequence.
        result, _ = fused_recurrent_kda_fwd(
            *inputs, initial_state=cache.states, cu_seqlens=ends,
            ssm_state_indices=slot[:, None].expand(-1, rows), scale=1.0, state_v_first=True,
        )  # fmt: skip
    elif not lengths.any():
        return q if out is None else out
    else:
        bounded = {} if lowest is None else {"safe_gate": True, "lower_bound": lowest}
        result, final = chunk_kda(
            *inputs, initial_state=cache.states[slot], output_final_state=True,
            scale=1.0, cu_seqlens=ends, state_v_first=True, **bounded,
        )  # fmt: skip
        cache.states[slot] = final
    if out is None:
        return result[0]
    return out.copy_(result[0])


def few_configurations() -> None:
    """fla's tuner tries every configuration for minutes: four spread ones are enough here. To be
    called before fla is imported."""
    from triton.runtime.autotuner import Autotuner

    begin = Autotuner.__init__

    def few(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        self.configs = self.configs[:: max(1, len(self.configs) // 4)]

    Autotuner.__init__ = few


@contextmanager
def inexact() -> Iterator[None]:
    """While it lasts, engines are built on these."""
    os.environ["FLA_DISABLE_BACKEND_DISPATCH"] = "1"
    few_configurations()
    from merestone.layers.gpu import kda, mla, mlp, ranks
    from merestone.models import gpu

    rooms: list[Any] = [kda, mla, mlp, ranks, gpu]
    before = [(room, room.linear) for room in rooms if hasattr(room, "linear")]
    recurrence = kda.kda
    for room, _ in before:
        room.linear = _linear
    kda.kda = _recurrence
    try:
        yield
    finally:
        for room, one in before:
            room.linear = one
        kda.kda = recurrence
