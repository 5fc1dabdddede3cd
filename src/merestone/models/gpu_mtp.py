"""The MTP layer of GLM-5.3-Flash on a GPU: the CPU layer's weights over a step's static tables.

Knows the layer's arithmetic and a scratch memory for what a draft's passes see. Must not know how
many passes there are, nor requests.
"""

from __future__ import annotations

import torch
from torch import Tensor

from merestone.layers.gpu.mla import GpuMla
from merestone.layers.gpu.mlp import gpu_mlp
from merestone.layers.gpu.step import DeviceState, Step
from merestone.layers.state import Field
from merestone.models.glm5_next_mtp import Glm5NextMtp
from merestone.ops.triton.attention import NARROW, TILE, Keys, attend, items
from merestone.ops.triton.gemm import linear
from merestone.ops.triton.norms import add_rms_norm, rms_norm


class Scratch:
    """Copies of the keys that ``count`` sequences' newest rows see, and room for ``passes`` more
    of each, as pages of TILE rows: what :class:`merestone.models.glm5_next_mtp.Reach` is on a
    CPU. Nothing of it outlives a step."""

    def __init__(self, layer: GpuMla, count: int, passes: int, device: str) -> None:
        shape = layer.shape
        pages = -(-(shape.dense_limit + passes) // TILE)
        self.width = pages * TILE
        dtype = layer.fields()[0].dtype
        self.memory = torch.zeros(count * pages, TILE, shape.kv_rank, dtype=dtype, device=device)
        self.tables = torch.arange(count * pages, dtype=torch.int32, device=device).view(count, -1)
        self.sequence = torch.arange(count, dtype=torch.int32, device=device)
        self.place = torch.arange(self.width, dtype=torch.int32, device=device)
        parts = [(row, row, 1) for row in range(count)]
        self.work = items(parts, shape.heads, NARROW).to(device)


class GpuMtp:
    """``layer``'s weights on ``device``. Takes its experts away, as ``models.gpu.on_gpu`` does."""

    def __init__(self, layer: Glm5NextMtp, device: str) -> None:
        self._eps = layer._eps
        self._token_norm = layer._token_norm.to(device)
        self._hidden_norm = layer._hidden_norm.to(device)
        self._join = layer._join.to(device)
        self._attention_norm = layer._attention_norm.to(device)
        self.attention = GpuMla(layer._attention, device)
        self._mlp_norm = layer._mlp_norm.to(device)
        self._mlp = gpu_mlp(layer._mlp, device)
        self._norm = layer._norm.to(device)

    def fields(self) -> tuple[Field, ...]:
        return self.attention.fields()

    def forward(
        self, embedded: Tensor, hidden: Tensor, step: Step, state: DeviceState
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Rows of committed tokens, as the CPU layer computes them: [N, D] and what each row
        chose. Both page tables of ``step`` are those of the layer's own group."""
        x = self._enter(embedded, hidden)
        y, chosen = self.attention.forward(
            rms_norm(x, self._attention_norm, self._eps), step, state, None
        )
        return self._leave(x, y), chosen

    def reach(
        self, chosen: tuple[Tensor, Tensor], tables: Tensor, scratch: Scratch, state: DeviceState
    ) -> Tensor:
        """Copy the keys that rows chose, ([S, width] and their numbers [S]), into ``scratch``;
        ``tables`` [S, n] are the rows' pages. Returns how many each row sees, [S] int32."""
        tokens, seen = chosen
        pages = state.rows(self.attention.layer, "latent")
        page = pages.shape[1]
        # What was not chosen, or could not be: token 0, which is there.
        known = tokens.clamp(min=0)
        frames = tables.gather(1, (known // page).long()).long()
        keys = pages[frames, (known % page).long()]  # [S, width, kv_rank]
        count, width, size = keys.shape
        scratch.memory.view(-1, scratch.width, size)[:count, :width] = keys
        return seen.clone()

    def recycle(
        self, embedded: Tensor, hidden: Tensor, seen: Tensor, scratch: Scratch
    ) -> tuple[Tensor, Tensor]:
        """One more pass: embeddings of drafts [S, D] and the hidden rows that drafted them ->
        hidden rows whose logits are of the next drafts, and what is seen from now on, [S]."""
        attention, shape = self.attention, self.attention.shape
        count = seen.shape[0]
        x = self._enter(embedded, hidden)
        residual, latents = attention.inputs(rms_norm(x, self._attention_norm, self._eps))
        tables, sequence = scratch.tables[:count], scratch.sequence[:count]
        attention.keep(latents, scratch.memory, tables, sequence, seen)
        seen = seen + 1
        query = attention.queries(residual)
        each = scratch.work.shape[0] // scratch.tables.shape[0]
        mixed, _ = attend(
            query, Keys(scratch.memory, tables), scratch.work[: count * each], seen,
            shape.scale, longest=scratch.width, split=True,
        )  # fmt: skip
        return self._leave(x, attention.outputs(mixed)), seen

    def _enter(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        parts = (
            rms_norm(embedded, self._token_norm, self._eps),
            rms_norm(hidden, self._hidden_norm, self._eps),
        )
        return linear(torch.cat(parts, 1), self._join)

    def _leave(self, x: Tensor, y: Tensor) -> Tensor:
        x, a = add_rms_norm(x, y, self._mlp_norm, self._eps)
        return self._mlp.add(x, a, self._norm, self._eps)[1]
