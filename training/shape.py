"""The shape of merestone-tiny.

All parts of `glm5_next` at the smallest sizes that still do their work: two attention layers in
eight, as in the lead model; 16 index heads, because fewer tie at zero; a selection of 256 tokens,
so that a text of 1,000 is already sparse; heads, experts and vocabulary in multiples of 4; head
sizes of 64 for the recurrent kernels.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes in elements; ``index_topk`` in tokens, ``draft_window`` in positions."""

    vocab: int = 3072
    hidden: int = 256
    layers: int = 8
    dense_layers: int = 3
    intermediate: int = 512
    experts: int = 8
    experts_per_token: int = 2
    moe_intermediate: int = 128
    routed_scaling: float = 2.5
    kda_heads: int = 4
    kda_size: int = 64
    conv: int = 4
    gate_bound: float = -5.0
    heads: int = 4
    q_rank: int = 128
    kv_rank: int = 128
    qk_size: int = 64
    v_size: int = 64
    index_heads: int = 16
    index_size: int = 32
    index_topk: int = 256
    pool: int = 4
    streams: int = 4
    sinkhorn: int = 20
    hc_eps: float = 1e-6
    swiglu_limit: float = 10.0
    eps: float = 1e-5
    max_length: int = 32768

    draft_layers: int = 2
    draft_heads: int = 4
    draft_size: int = 64
    draft_intermediate: int = 512
    draft_taps: tuple[int, ...] = (1, 3, 5, 6, 7)
    draft_window: int = 512
    draft_block: int = 8
    draft_conv: int = 2
    draft_conv_group: int = 16
    selector_rank: int = 64
    selector_topk: int = 16
    rope_theta: float = 10000.0

    def is_mla(self, layer: int) -> bool:
        return layer % 4 == 3


TINY = Shape()
SMOKE = Shape(
    vocab=3072, hidden=64, intermediate=96, moe_intermediate=32, kda_heads=2, kda_size=32,
    heads=2, q_rank=48, kv_rank=32, qk_size=32, v_size=32, index_size=16, index_topk=32,
    draft_heads=2, draft_size=32, draft_intermediate=96, draft_window=64, selector_rank=16,
)  # fmt: skip
"""The same parts, for trials on a CPU."""
