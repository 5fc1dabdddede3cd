"""The few operations that are not plain torch on a GPU: the chunked KDA pass and Sinkhorn's
balancing. Each has its definition in torch beside it, which runs where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
except ImportError:  # a CPU needs neither
    HAS_TRITON = False

Kda = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float], Tensor]


def kda_torch(
    q: Tensor, k: Tensor, v: Tensor, f: Tensor, b: Tensor, a_log: Tensor, bias: Tensor, bound: float
) -> Tensor:
    """Kimi delta attention in chunks of 64, fp32 inside.

    q, k, v, f: [B, L, H, K] (f the raw gate, v of the same size); b: [B, L, H] raw write strength;
    a_log: [H]; bias: [H * K]. Returns [B, L, H, K] in v's dtype. Source: Kimi Linear, section 3,
    with the lower-bounded gate of GLM-5.3-Flash.
    """
    batch, length, heads, size = q.shape
    chunk = min(CHUNK, length)
    assert length % chunk == 0, (length, chunk)

    def chunks(x: Tensor) -> Tensor:  # [B, L, H, ...] -> [B, H, N, C, ...]
        x = x.float().reshape(batch, length // chunk, chunk, heads, *x.shape[3:])
        return x.movedim(3, 1)

    def unit(x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)

    gate = f.float() + bias.view(heads, size)
    decay = chunks(bound * torch.sigmoid(a_log.exp()[:, None] * gate)).cumsum(-2)
    query, key = unit(chunks(q)) * size**-0.5, unit(chunks(k))
    value, beta = chunks(v), torch.sigmoid(chunks(b))[..., None]
    # Only differences of cumulated decays are exponentiated: the sums alone would overflow.
    pair = (decay[..., :, None, :] - decay[..., None, :, :]).clamp(max=0).exp()
    lower = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
    keys = torch.einsum("bhnid,bhnjd,bhnijd->bhnij", key, key, pair) * beta
    keys = keys.masked_fill(~lower.tril(-1), 0.0) + torch.eye(chunk, device=q.device)
    right = torch.cat([beta * value, beta * key * decay.exp()], -1)
    solved = torch.linalg.solve_triangular(keys, right, upper=False, unitriangular=True)
    u, w = solved.split(size, -1)
    scores = torch.einsum("bhnid,bhnjd,bhnijd->bhnij", query, key, pair).masked_fill(~lower, 0.0)
    last = decay[..., -1:, :]
    rest = key * (last - decay).exp()
    state = q.new_zeros(batch, heads, size, size, dtype=torch.float32)
    out = []
    for n in range(length // chunk):
        fresh = u[:, :, n] - w[:, :, n] @ state
        out.append((query[:, :, n] * decay[:, :, n].exp()) @ state + scores[:, :, n] @ fresh)
        kept = state * last[:, :, n].exp().transpose(-1, -2)
        state = kept + rest[:, :, n].transpose(-1, -2) @ fresh
    return torch.stack(out, 2).movedim(1, 3).reshape(batch, length, heads, size).to(v.dtype)


def kda_fla(
    q: Tensor, k: Tensor, v: Tensor, f: Tensor, b: Tensor, a_log: Tensor, bias: Tensor, bound: float
) -> Tensor:
    """`kda_torch` by fla-core's chunk kernels, on a GPU."""
    from fla.ops.kda import chunk_kda

    out, _ = chunk_kda(
        q, k, v, f, b,
        use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
        A_log=a_log, dt_bias=bias, safe_gate=True, lower_bound=bound,
    )  # fmt: skip
    result: Tensor = out
    return result


def kda(
    q: Tensor, k: Tensor, v: Tensor, f: Tensor, b: Tensor, a_log: Tensor, bias: Tensor, bound: float
) -> Tensor:
    pass_: Kda = kda_fla if q.is_cuda else kda_torch
    return pass_(q, k, v, f, b, a_log, bias, bound)


def sinkhorn_torch(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """[T, n, n] -> nearly doubly stochastic [T, n, n]; the columns' sums are exact.

    Source: manifold-constrained hyper-connections, as GLM-5.3-Flash rounds them off.
    """
    matrix = torch.softmax(logits, -1) + eps
    matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        matrix = matrix / (matrix.sum(-1, keepdim=True) + eps)
        matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    return matrix


if HAS_TRITON:

    @triton.jit  # type: ignore[untyped-decorator]
    def _load(pointer: Any, rows: Any, row_mask: Any) -> Any:
        i = tl.arange(0, 4)
        at = rows[:, None, None] * 16 + i[None, :, None] * 4 + i[None, None, :]
        return tl.load(pointer + at, mask=row_mask[:, None, None], other=0.0), at

    @triton.jit  # type: ignore[untyped-decorator]
    def _forward(
        logits: Any, out: Any, count: Any, eps: Any, ITERATIONS: tl.constexpr, BLOCK: tl.constexpr
    ) -> None:
        rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        x, at = _load(logits, rows, rows < count)
        x = tl.exp(x - tl.max(x, axis=2, keep_dims=True))
        m = x / tl.sum(x, axis=2, keep_dims=True) + eps
        m = m / (tl.sum(m, axis=1, keep_dims=True) + eps)
        for _ in range(ITERATIONS - 1):
            m = m / (tl.sum(m, axis=2, keep_dims=True) + eps)
            m = m / (tl.sum(m, axis=1, keep_dims=True) + eps)
        tl.store(out + at, m, mask=(rows < count)[:, None, None])

    @triton.jit  # type: ignore[untyped-decorator]
    def _backward(
        logits: Any,
        grad: Any,
        out: Any,
        sums: Any,
        count: Any,
        eps: Any,
        ITERATIONS: tl.constexpr,
        BLOCK: tl.constexpr,
    ) -> None:
        """Forward again with every divisor kept, then back: a matrix before a division is the
        matrix after it times the divisor."""
        rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        mask = (rows < count)[:, None, None]
        x, at = _load(logits, rows, rows < count)
        x = tl.exp(x - tl.max(x, axis=2, keep_dims=True))
        p = x / tl.sum(x, axis=2, keep_dims=True)
        i = tl.arange(0, 4)
        wide = rows[:, None, None] * 4 + i[None, None, :]  # column sums [B, 1, 4]
        tall = rows[:, None, None] * 4 + i[None, :, None]  # row sums [B, 4, 1]
        step = count.to(tl.int64) * 4
        m = p + eps
        s = tl.sum(m, axis=1, keep_dims=True) + eps
        tl.store(sums + wide, s, mask=mask)
        m = m / s
        for k in range(ITERATIONS - 1):
            t = tl.sum(m, axis=2, keep_dims=True) + eps
            tl.store(sums + (2 * k + 1) * step + tall, t, mask=mask)
            m = m / t
            s = tl.sum(m, axis=1, keep_dims=True) + eps
            tl.store(sums + (2 * k + 2) * step + wide, s, mask=mask)
            m = m / s
        tl.debug_barrier()
        d = tl.load(grad + at, mask=mask, other=0.0)
        for j in range(ITERATIONS - 1):
            k = ITERATIONS - 2 - j
            s = tl.load(sums + (2 * k + 2) * step + wide, mask=mask, other=1.0)
            d = (d - tl.sum(d * m, axis=1, keep_dims=True)) / s
            m = m * s
            t = tl.load(sums + (2 * k + 1) * step + tall, mask=mask, other=1.0)
            d = (d - tl.sum(d * m, axis=2, keep_dims=True)) / t
            m = m * t
        s = tl.load(sums + wide, mask=mask, other=1.0)
        d = (d - tl.sum(d * m, axis=1, keep_dims=True)) / s
        d = p * (d - tl.sum(d * p, axis=2, keep_dims=True))
        tl.store(out + at, d, mask=mask)


class _Sinkhorn(torch.autograd.Function):
    BLOCK = 64

    @staticmethod
    def forward(ctx: Any, logits: Tensor, iterations: int, eps: float) -> Tensor:
        logits = logits.contiguous()
        ctx.save_for_backward(logits)
        ctx.iterations, ctx.eps = iterations, eps
        out = torch.empty_like(logits)
        count = len(logits)
        grid = (-(-count // _Sinkhorn.BLOCK),)
        _forward[grid](logits, out, count, eps, ITERATIONS=iterations, BLOCK=_Sinkhorn.BLOCK)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (logits,) = ctx.saved_tensors
        out = torch.empty_like(logits)
        count = len(logits)
        sums = logits.new_empty(2 * ctx.iterations - 1, count, 4)
        grid = (-(-count // _Sinkhorn.BLOCK),)
        _backward[grid](
            logits, grads[0].contiguous(), out, sums, count, ctx.eps,
            ITERATIONS=ctx.iterations, BLOCK=_Sinkhorn.BLOCK,
        )  # fmt: skip
        return out, None, None


def sinkhorn_triton(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """`sinkhorn_torch` for n = 4 and fp32, with its gradient, in one kernel each."""
    assert logits.shape[1:] == (4, 4)
    assert logits.dtype == torch.float32
    out: Tensor = _Sinkhorn.apply(logits, iterations, eps)  # type: ignore[no-untyped-call]
    return out


def sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    chosen = sinkhorn_triton if logits.is_cuda else sinkhorn_torch
    return chosen(logits, iterations, eps)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """[B, H, L, K] -> [B, H, L, V]: causal attention, over the tokens of ``mask`` [B, L, L]."""
    if mask is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    bias = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, float("-inf"))
    bias = bias[:, None].expand(-1, q.shape[1], -1, -1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


__all__ = [
    "CHUNK", "attend", "kda", "kda_fla", "kda_torch", "sinkhorn", "sinkhorn_torch",
    "sinkhorn_triton",
]  # fmt: skip
