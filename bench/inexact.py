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


class _InPlace:
    """fla-core's recurrence behind our operator's parameters. Where a step is cut in two passes,
    rows of one sequence may be taken for another's: as many, so they take as long."""

    def __init__(self) -> None:
        self._first: int | None = None
        self._tables: dict[int, tuple[Any, Tensor, Tensor]] = {}

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, anchors: Any, cache: Any,
        sequences: Any, step: Any, *, chunk: int, lowest: float | None = None,
        out: Tensor | None = None, few: bool = True,
    ) -> Tensor:  # fmt: skip
        from fla.ops.kda import chunk_kda
        from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd

        rows = q.shape[0]
        inputs = [x[None].contiguous() for x in (q, k, v, g, beta)]
        out = torch.empty_like(inputs[2][0]) if out is None else out
        # What fla-core does with chunks reads lengths on the host, which a graph cannot.
        if rows <= MIXED[-1]:
            ends, slots = self._of(cache.states, sequences, step)
            fused_recurrent_kda_fwd(
                *inputs, initial_state=cache.states, cu_seqlens=ends, ssm_state_indices=slots,
                scale=1.0, state_v_first=True, out=out[None],
            )  # fmt: skip
            return out
        # An empty sequence would shift the numbers of all behind it.
        lengths = (step.end - sequences.first).clamp(min=0)
        slot, lengths = step.slot[lengths > 0].long(), lengths[lengths > 0]
        if not len(lengths):
            return out
        bounded = {} if lowest is None else {"safe_gate": True, "lower_bound": lowest}
        result, final = chunk_kda(
            *inputs, initial_state=cache.states[slot], output_final_state=True,
            scale=1.0, cu_seqlens=_ends(lengths), state_v_first=True, **bounded,
        )  # fmt: skip
        cache.states[slot] = final
        return out.copy_(result[0])

    def _of(self, states: Tensor, sequences: Any, step: Any) -> tuple[Tensor, Tensor]:
        """Ends of sequences and the slot of each of their tokens, made once a step: a server of the
        other kind has them ready for all layers."""
        if self._first is None:
            self._first = states.data_ptr()
        known = self._tables.get(id(step))
        if known is None or known[0] is not step or states.data_ptr() == self._first:
            ends = _ends((step.end - sequences.first).clamp(min=0))
            # The kernel steps from a token's entry to the next by one, whatever the stride says.
            known = step, ends, step.slot[:, None].expand(-1, MIXED[-1]).contiguous()
            if len(self._tables) > 4:
                self._tables.pop(next(iter(self._tables)))
            self._tables[id(step)] = known
        return known[1:]


def _ends(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).long()


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
    layer: Any = kda
    recurrence = layer.kda
    for room, _ in before:
        room.linear = _linear
    layer.kda = _InPlace()
    try:
        yield
    finally:
        for room, one in before:
            room.linear = one
        layer.kda = recurrence
