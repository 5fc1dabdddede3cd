"""Every operator whose rows are independent inputs, small, for `test_triton_rows.py`.

A function gives the cases of a family of operators, in one dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from merestone.ops.rotary import Rotary
from merestone.ops.triton import attention_wide
from merestone.ops.triton.attention import Keys, attend, items
from merestone.ops.triton.attention_wide import attend_wide
from merestone.ops.triton.block import Context, attend_block, convolve
from merestone.ops.triton.by_expert import sort_by_expert
from merestone.ops.triton.draw import draw as draw_tokens
from merestone.ops.triton.draw import draws
from merestone.ops.triton.follow import Noise, Odds, add_noise, among, follow
from merestone.ops.triton.gemm import linear, product, segment_products, segments, tile_for
from merestone.ops.triton.grouped import (
    experts,
    experts_norm,
    grouped_gated,
    grouped_linear,
    route,
)
from merestone.ops.triton.hyper import enter, leave, mean
from merestone.ops.triton.index import choose, members, pool_scores
from merestone.ops.triton.judge import bad_rows, best
from merestone.ops.triton.kda_inputs import Raw, kda_inputs
from merestone.ops.triton.latents import write_latents
from merestone.ops.triton.norms import (
    add_rms_norm,
    gated_rms_norm,
    l2_norm,
    layer_norm,
    log_decay,
    rms_norm,
    swiglu,
)
from merestone.ops.triton.pages import read_rows, write_rows
from merestone.ops.triton.rotary import norm_rotate
from merestone.ops.triton.rows import Cells, Sequences
from merestone.ops.triton.tokens import select_own
from merestone.sched.plan import SamplingParams

ROWS, WIDTH, VOCAB, DEPTH = 19, 32, 40, 3


@dataclass(frozen=True)
class Case:
    """``given``: tensors with an entry for each row. ``run``: of any of those entries, in any
    order, results with an entry for each. ``of``: the operators that it shows."""

    of: tuple[Callable, ...]
    given: tuple[Tensor, ...]
    run: Callable[..., Tensor | tuple[Tensor, ...]]

    def at(self, rows: list[int], given: tuple[Tensor, ...] | None = None) -> tuple[Tensor, ...]:
        some = [tensor[rows].contiguous() for tensor in given or self.given]
        found = self.run(*some)
        return found if isinstance(found, tuple) else (found,)


def ints(*values: int, device: str) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def products(draw, device: str, dtype: torch.dtype) -> list[Case]:
    x, w = draw(ROWS, 96).to(dtype), draw(40, 96).to(dtype)
    long, short = draw(ROWS, 512).to(dtype), draw(24, 512).to(dtype)
    heads, batch = draw(ROWS, 3, 64).to(dtype), draw(3, 24, 64).to(dtype)
    assert segments(24, 512) == 2
    tile = tile_for(1, 40, dtype)

    def batched(x: Tensor) -> Tensor:
        return linear(x.transpose(0, 1), batch).transpose(0, 1)

    return [
        Case((linear,), (x,), lambda x: linear(x, w)),
        Case((product,), (x,), lambda x: product(x, w, tile, 1)),
        Case((linear,), (long,), lambda x: linear(x, short)),
        Case((segment_products,), (long,), lambda x: segment_products(x, short).transpose(0, 1)),
        Case((linear,), (heads,), batched),
    ]


def norms(draw, device: str, dtype: torch.dtype) -> list[Case]:
    x, y = 3 * draw(ROWS, 48).to(dtype), draw(ROWS, 48).to(dtype)
    weight, bias, wide = draw(48).to(dtype), draw(48).to(dtype), draw(48)
    rate = draw(3).exp()
    return [
        Case((rms_norm,), (x,), lambda x: rms_norm(x, weight, 1e-5)),
        Case((add_rms_norm,), (x, y), lambda x, y: add_rms_norm(x, y, weight, 1e-5)),
        Case((gated_rms_norm,), (x, y), lambda x, y: gated_rms_norm(x, wide, y, 1e-5)),
        Case((layer_norm,), (x,), lambda x: layer_norm(x, weight, bias, 1e-6)),
        Case((l2_norm,), (x,), lambda x: l2_norm(x, 1e-6, 0.5)),
        Case((swiglu,), (x,), lambda x: swiglu(x, None)),
        Case((swiglu,), (x,), lambda x: swiglu(x, 1.0)),
        Case((log_decay,), (x,), lambda x: log_decay(x, wide, rate, -5.0)),
        Case((log_decay,), (x,), lambda x: log_decay(x, wide, rate, None)),
    ]


def mixture(draw, device: str, dtype: torch.dtype) -> list[Case]:
    count, inner, k = 5, 16, 2
    made_of = experts, grouped_linear, grouped_gated, sort_by_expert
    x, residual = draw(ROWS, WIDTH).to(dtype), draw(ROWS, WIDTH).to(dtype)
    gate, bias = draw(count, WIDTH), draw(count) / 10
    up, down = draw(count + 1, 2 * inner, WIDTH).to(dtype), draw(count + 1, WIDTH, inner).to(dtype)
    norm, more = draw(WIDTH).to(dtype), draw(ROWS, WIDTH).to(dtype)
    ids, weights = route(x, gate, bias, k, True, 2.5)

    def router(x: Tensor) -> tuple[Tensor, ...]:
        return (*route(x, gate, bias, k, True, 2.5), *route(x, gate, bias, k, False, 1.0))

    def shared(x: Tensor) -> Tensor:
        return experts(x, *route(x, gate, bias, k, True, 2.5, shared=True), up, down, 1.0)

    return [
        Case((route,), (x,), router),
        Case((experts,), (x,), shared),
        Case(made_of, (x, ids, weights), lambda *given: experts(*given, up, down, None, True)),
        Case(
            (experts_norm,),
            (x, ids, weights, residual, more),
            lambda x, ids, weights, residual, more: experts_norm(
                x, ids, weights, up, down, None, residual, norm, 1e-5, more=more
            ),
        ),
    ]


def streams(draw, device: str, dtype: torch.dtype) -> list[Case]:
    n, width = 4, 128
    x, y = 2 * draw(ROWS, n, width).to(dtype), draw(ROWS, width).to(dtype)
    parts = n * (2 + n)
    fn, base, scale = draw(parts, n * width) / 20, draw(parts), draw(parts)
    weight, post, comb = draw(width).to(dtype), draw(ROWS, n), draw(ROWS, n, n)

    def entered(x: Tensor) -> tuple[Tensor, ...]:
        return enter(
            x, fn, base, scale, weight, eps=1e-6, rms_eps=1e-5, norm_eps=1e-5, iterations=5
        )

    return [
        Case((enter,), (x,), entered),
        Case((leave,), (x, y, post, comb), leave),
        Case((mean,), (x,), mean),
    ]


def selections(draw, device: str, dtype: torch.dtype) -> list[Case]:
    page, dim, heads, longest, k, size = 8, 16, 4, 96, 5, 4
    pools = draw(24, page, dim).to(dtype)
    tables = torch.arange(24, dtype=torch.int32, device=device).flip(0).view(2, 12)
    q, weights = draw(ROWS, heads, dim).to(dtype), draw(ROWS, heads).to(dtype)
    which = torch.arange(ROWS, dtype=torch.int32, device=device) % 2
    complete = ints(*(1 + 5 * i for i in range(ROWS)), device=device)
    place = torch.arange(longest, device=device)
    scores = draw(ROWS, longest).round()
    chosen = torch.arange(k, dtype=torch.int32, device=device).repeat(ROWS, 1)
    tokens = 3 * torch.arange(64, dtype=torch.int32, device=device).repeat(ROWS, 1)

    def scored(q: Tensor, weights: Tensor, which: Tensor, complete: Tensor) -> Tensor:
        found = pool_scores(q, weights, pools, tables, which, complete, longest=longest)
        return torch.where(place < complete[:, None], found, 0.0)

    def best_of(scores: Tensor, complete: Tensor) -> Tensor:
        found = choose(scores, complete, k)
        return torch.where(place[:k] < complete[:, None], found, 0)

    def own(tokens: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        found, held = select_own(tokens, counts, run=4, ranks=2, rank=1)
        return torch.where(place[:64] < held[:, None], found, 0), held

    return [
        Case((pool_scores,), (q, weights, which, complete), scored),
        Case((choose,), (scores, complete), best_of),
        Case((members,), (chosen, complete), lambda best, seen: members(best, seen, size, 32)),
        Case((select_own,), (tokens, complete.clamp(max=64)), own),
    ]


def tokens(draw, device: str, dtype: torch.dtype) -> list[Case]:
    logits, rank, count = 2 * draw(ROWS, DEPTH, VOCAB), 6, 5
    number = torch.arange(ROWS, device=device)
    newest = (number % VOCAB).int()
    keys = number - 3, newest, (number % 3).int(), (number % 4) / 3
    candidates = torch.stack(
        [torch.randperm(VOCAB)[:count].sort().values for _ in range(ROWS * DEPTH)]
    )
    candidates = candidates.int().view(ROWS, DEPTH, count).to(device)
    projected, books = draw(ROWS, DEPTH, rank), (draw(VOCAB, rank), draw(VOCAB, rank))

    def drawn(logits: Tensor, number: Tensor) -> Tensor:
        how = [
            SamplingParams(temperature=0.5 + i % 3, seed=i, top_p=0.8 if i % 6 == 0 else 1.0)
            for i in number.tolist()
        ]
        wanted = [(row, params, 7, 1) for row, params in enumerate(how)]
        return draw_tokens(logits[:, 0].contiguous(), draws(wanted, VOCAB))

    def judged(logits: Tensor) -> tuple[Tensor, ...]:
        flat = logits[:, 0].contiguous()
        ids, bad, again = torch.zeros(3, flat.shape[0], dtype=torch.int32, device=device)
        best(flat, ids, bad)
        every = torch.arange(flat.shape[0], dtype=torch.int32, device=device)
        bad_rows(flat, every, again)
        return ids, bad, again

    def noisy(logits: Tensor, *keys: Tensor) -> Tensor:
        flat = logits.flatten(0, 1).clone()
        add_noise(flat, Noise(*keys), DEPTH)
        return flat.view_as(logits)

    def room(rows: int) -> tuple[Tensor, Odds]:
        out = torch.zeros(rows, DEPTH, dtype=torch.int32, device=device)
        kept = torch.zeros(rows * DEPTH, count, device=device)
        return out, Odds(kept.int(), kept)

    def few(logits: Tensor, *keys: Tensor) -> tuple[Tensor, ...]:
        out, odds = room(logits.shape[0])
        among(logits.flatten(0, 1), Noise(*keys), DEPTH, 1, out, odds)
        return out, odds.scores.view(-1, DEPTH, count)

    def following(
        logits: Tensor, candidates: Tensor, projected: Tensor, *keys: Tensor
    ) -> tuple[Tensor, ...]:
        out, odds = room(logits.shape[0])
        each = (x.flatten(0, 1) for x in (logits, candidates, projected))
        follow(*each, books, keys[1], Noise(*keys), out, odds)
        return out, odds.scores.view(-1, DEPTH, count)

    return [
        Case((draw_tokens, draws), (logits, number), drawn),
        Case((best, bad_rows), (logits,), judged),
        Case((add_noise,), (logits, *keys), noisy),
        Case((among,), (logits, *keys), few),
        Case((follow,), (logits, candidates, projected, *keys), following),
    ]


def blocks(draw, device: str, dtype: torch.dtype) -> list[Case]:
    size, heads, shared, dim, page = 3, 4, 2, 16, 64
    pages = draw(2, 2 * ROWS, page, shared, dim).to(dtype)
    tables = torch.randperm(2 * ROWS).to(torch.int32).view(ROWS, 2).to(device)
    positions = ints(*(6 * i for i in range(ROWS)), device=device)
    q = draw(ROWS, size, heads, dim).to(dtype)
    keys, values = draw(2, ROWS, size, shared * dim).to(dtype)
    x, base = draw(ROWS, size, 64).to(dtype), draw(2, 2, 64)
    dynamic = draw(ROWS, size, 2 * 2 * 8).to(dtype)
    weight, rotary = draw(dim).to(dtype), Rotary(10000.0, dim)
    turns = rotary._coarse.to(device), rotary._fine.to(device)

    def block(split: bool, q: Tensor, keys: Tensor, values: Tensor, *where: Tensor) -> Tensor:
        given = Context(where[0], size, *pages, where[1], 40, 20, 128)
        each = (x.flatten(0, 1) for x in (q, keys, values))
        return attend_block(*each, given, dim**-0.5, split=split).view(q.shape)

    def convolved(x: Tensor, dynamic: Tensor) -> Tensor:
        return convolve(x.flatten(0, 1), dynamic.flatten(0, 1), base, 1, size).view(x.shape)

    def turned(q: Tensor, positions: Tensor) -> Tensor:
        return norm_rotate(q.flatten(1), weight, 1e-5, turns, positions)

    given = q, keys, values, positions, tables
    return [
        Case((attend_block,), given, lambda *given: block(True, *given)),
        Case((attend_block,), given, lambda *given: block(False, *given)),
        Case((convolve,), (x, dynamic), convolved),
        Case((norm_rotate,), (q[:, 0].contiguous(), positions), turned),
    ]


def latent_attention(draw, device: str, dtype: torch.dtype) -> list[Case]:
    heads, dim, page = 4, 32, 16
    keys = Keys(
        draw(12, page, dim).to(dtype),
        torch.arange(12, dtype=torch.int32, device=device).flip(0).view(2, 6),
    )
    q = draw(ROWS, heads, dim).to(dtype)
    which = torch.arange(ROWS, dtype=torch.int32, device=device) // 7 % 2
    seen = ints(*(5 * i for i in range(ROWS)), device=device)
    selection = torch.stack([torch.randperm(96)[:48].sort().values for _ in range(ROWS)])
    selection = selection.int().to(device)

    def work(which: Tensor, height: int, lone: bool) -> Tensor:
        """Neighbours of one sequence share items, as in a prefill; or nobody does."""
        parts: list[tuple[int, int, int]] = []
        for row, sequence in enumerate(which.tolist()):
            if parts and parts[-1][0] == sequence and not lone:
                parts[-1] = (sequence, parts[-1][1], parts[-1][2] + 1)
            else:
                parts.append((sequence, row, 1))
        return items(parts, heads, height).to(device)

    def paged(split: bool, q: Tensor, which: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        given = work(which, 32, lone=False)
        return attend(q, keys, given, seen, 0.3, longest=96, split=split, height=32)

    def wide(q: Tensor, which: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        given = work(which, attention_wide.ROWS, lone=False)
        return attend_wide(q, keys, given, seen, 0.3, longest=96)

    def chosen(q: Tensor, which: Tensor, seen: Tensor, some: Tensor) -> tuple[Tensor, Tensor]:
        given, seen = work(which, 16, lone=True), seen.clamp(max=48)
        return attend(q, keys, given, seen, 0.3, longest=48, split=True, height=16, selection=some)

    given = q, which, seen
    return [
        Case((attend, items), given, lambda *given: paged(True, *given)),
        Case((attend,), given, lambda *given: paged(False, *given)),
        Case((attend_wide,), given, wide),
        Case((attend,), (*given, selection), chosen),
    ]


def kept(draw, device: str, dtype: torch.dtype) -> list[Case]:
    """Rows that go to pages are read where they went."""
    page, taps, heads, dim = 8, 4, 3, 16
    x, weight = draw(ROWS, WIDTH).to(dtype), draw(24).to(dtype)
    width = heads * dim
    raw = draw(ROWS, 3 * width).to(dtype)
    gate, beta = draw(ROWS, width).to(dtype), draw(ROWS, heads).to(dtype)
    fixed = draw(taps, 3 * width), draw(width), draw(heads).exp()
    position = torch.arange(ROWS, dtype=torch.int32, device=device)

    def through(
        write: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None], x: Tensor
    ) -> Tensor:
        rows = x.shape[0]
        pages = torch.zeros(1 + rows // page, page, WIDTH, dtype=dtype, device=device)
        table = torch.arange(pages.shape[0], dtype=torch.int32, device=device).flip(0)[None]
        at = torch.arange(rows, dtype=torch.int32, device=device)
        one = torch.zeros_like(at)
        write(x, pages, table.contiguous(), one, at)
        return read_rows(pages, table.contiguous(), one, at)

    def latents(x: Tensor, pages: Tensor, *where: Tensor) -> None:
        write_latents(x, weight, 1e-5, pages, *where)

    def inputs(gate: Tensor, beta: Tensor, position: Tensor) -> tuple[Tensor, ...]:
        arena = torch.zeros(2, 4096, dtype=dtype, device=device)
        views = Raw(
            *(
                arena.as_strided((2, 4, n), (4096, n, 1), at)
                for n, at in ((3 * width, 0), (width, 1024), (heads, 2048))
            )
        )
        none = ints(0, device=device)
        tail = Cells(arena, torch.zeros(taps - 1, 2, dtype=torch.int64, device=device))
        step = Sequences(none, none, none, none[None], none[None] - 1)
        return kda_inputs(
            Raw(raw, gate, beta), views, tail, *fixed, torch.zeros_like(position), position, step,
            eps=1e-6, lowest=-5.0,
        )  # fmt: skip

    return [
        Case((write_rows, read_rows), (x,), lambda x: through(write_rows, x)),
        Case((write_latents,), (x,), lambda x: through(latents, x)),
        Case((kda_inputs,), (gate, beta, position), inputs),
    ]


FAMILIES = [
    products, norms, mixture, streams, selections, tokens, blocks, latent_attention, kept
]  # fmt: skip
