"""Every operator at GLM-5.3-Flash's dimensions, for `aot.py`: nothing here is computed.

A function takes the number of rows of a small step; what more it needs it adds to them.
"""

from collections.abc import Callable
from unittest.mock import patch

import torch

from merestone.core.geometry import GroupSpec
from merestone.ops.triton.attention import NARROW, WIDE, Keys, attend, items
from merestone.ops.triton.attention_wide import ROWS, attend_wide
from merestone.ops.triton.block import Context, attend_block, convolve
from merestone.ops.triton.copy import Copier, Region
from merestone.ops.triton.draw import draw, draws
from merestone.ops.triton.follow import Noise, Odds, add_noise, among, follow
from merestone.ops.triton.gemm import linear
from merestone.ops.triton.grouped import experts, experts_norm, route
from merestone.ops.triton.hyper import enter, leave, mean
from merestone.ops.triton.index import choose, members, pool_scores, write_pools
from merestone.ops.triton.judge import bad_anchors, bad_rows, best
from merestone.ops.triton.kda import OpenRows, Pass, kda, open_rows_shapes
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
from merestone.ops.triton.pages import (
    feed,
    read_rows,
    set_entries,
    write_ring,
    write_rows,
    write_tail,
)
from merestone.ops.triton.rotary import norm_rotate
from merestone.ops.triton.rows import Cells, Sequences
from merestone.ops.triton.tokens import select_own
from merestone.sched.plan import SamplingParams

LAUNCHES: dict[str, Callable[[int], None]] = {}


def launch(function: Callable[[int], None]) -> Callable[[int], None]:
    LAUNCHES[function.__name__] = function
    return function


@launch
def copy(rows: int) -> None:
    arena = torch.empty(4, 1 << 20, dtype=torch.uint8)
    slots = torch.empty(2, 16, 8192, dtype=torch.uint8)
    groups = {"full": (GroupSpec("full", page=1024), [Region(0, 1024)])}
    copier = Copier(arena, slots, groups, padding=(3, 1))
    copier.run(copier.encode((), rows))


@launch
def gemm(rows: int) -> None:
    bf16 = torch.bfloat16
    for more in (0, 16, 32, 64, 512):
        x = torch.empty(rows + more, 4096, dtype=bf16)
        linear(x, torch.empty(4096, 4096, dtype=bf16))
        linear(x, torch.empty(24896, 4096, dtype=bf16))
        linear(torch.empty(rows + more, 16384, dtype=bf16), torch.empty(24, 16384))
    linear(torch.empty(64, rows, 256, dtype=bf16), torch.empty(64, 512, 256, dtype=bf16))


@launch
def norms(rows: int) -> None:
    bf16 = torch.bfloat16
    for width in (512, 1536, 4096):
        x, weight = torch.empty(rows, width, dtype=bf16), torch.empty(width, dtype=bf16)
        rms_norm(x, weight, 1e-5)
        add_rms_norm(x, x, weight, 1e-5)
    heads = torch.empty(64 * rows, 128)
    gated_rms_norm(heads, torch.empty(128), heads.bfloat16(), 1e-5)
    layer_norm(heads.bfloat16(), heads[0].bfloat16(), heads[1].bfloat16(), 1e-6)
    l2_norm(heads.bfloat16(), 1e-6)
    swiglu(torch.empty(rows, 4096, dtype=bf16), 10.0)
    for lowest in (-5.0, None):
        log_decay(torch.empty(rows, 8192, dtype=bf16), torch.empty(8192), torch.empty(64), lowest)


def sequences(count: int) -> Sequences:
    one = torch.zeros(count, dtype=torch.int32)
    return Sequences(one, one, one, one[:, None].repeat(1, count), one[:, None].repeat(1, 74))


@launch
def attention(rows: int) -> None:
    q = torch.empty(rows, 64, 512, dtype=torch.bfloat16)
    arena = torch.empty(2, 1 << 20, dtype=torch.bfloat16)
    tables = torch.zeros(rows, rows, dtype=torch.int32)
    keys = Keys(arena.as_strided((2, 1024, 512), (1 << 20, 512, 1)), tables)
    seen = torch.ones(rows, dtype=torch.int32)
    parts = [(row, row, 1) for row in range(rows)]
    for selection in (None, torch.zeros(rows, 2112, dtype=torch.int32)):
        for height, split in ((NARROW, True), (WIDE, True), (WIDE, False)):
            work, longest = items(parts, 64, height), 512 * rows
            attend(
                q, keys, work, seen, 0.1, longest=longest, split=split, height=height,
                selection=selection,
            )  # fmt: skip
    # A part that only scores, as Kimi-Linear has it.
    q = torch.empty(rows, 32, 576, dtype=torch.bfloat16)
    keys = Keys(arena.as_strided((2, 1024, 576), (1 << 20, 576, 1)), tables)
    for height, split in ((16, True), (NARROW, True), (WIDE, False)):
        work, longest = items(parts, 32, height), 512 * rows
        attend(q, keys, work, seen, 0.1, longest=longest, split=split, height=height)


@launch
def wide_attention(rows: int) -> None:
    """Of Kimi-Linear: alone, and where ranks share tokens. And of the tiny model's width."""
    bf16, seen = torch.bfloat16, torch.ones(rows, dtype=torch.int32)
    arena = torch.empty(2, 1 << 20, dtype=bf16)
    tables = torch.zeros(rows, rows, dtype=torch.int32)
    for heads, dim in ((32, 576), (4, 64)):
        q = torch.empty(rows, heads, dim, dtype=bf16)
        keys = Keys(arena.as_strided((2, 1024, dim), (1 << 20, dim, 1)), tables)
        work = items([(row, row, 1) for row in range(rows)], heads, ROWS)
        for out_dtype in (bf16, torch.float32):
            attend_wide(q, keys, work, seen, 0.1, longest=512 * rows, out_dtype=out_dtype)


@launch
def sparse_index(rows: int) -> None:
    bf16 = torch.bfloat16
    one = torch.ones(rows, dtype=torch.int32)
    raw_rows = torch.empty(rows, 288, dtype=bf16)
    arena = torch.empty(2, 1 << 20, dtype=bf16)
    raw = arena.as_strided((2, 16, 128), (1 << 20, 128, 1))
    pools = arena.as_strided((2, 256, 128), (1 << 20, 128, 1))
    tables = torch.zeros(rows, rows, dtype=torch.int32)
    positions = torch.empty(4, 128)
    keys, gates, weights = torch.split(raw_rows, [128, 128, 32], 1)
    # Keys come from a norm, gates as they lie.
    keys = keys.contiguous()
    write_pools(keys, gates, raw, raw, positions, pools, tables, one, one, sequences(rows))
    q = torch.empty(rows, 32, 128, dtype=bf16)
    scores = pool_scores(q, weights, pools, tables, one, one, longest=512 * rows)
    tokens, _ = members(choose(scores, one, 512), one, 4, 2112)
    select_own(tokens, one, run=4, ranks=2, rank=1)


@launch
def hyper_connections(rows: int) -> None:
    streams, n = torch.empty(rows, 4, 4096, dtype=torch.bfloat16), 24
    fn, base = torch.empty(n, 4 * 4096), torch.empty(n)
    y, post, comb = enter(
        streams,
        fn,
        base,
        base,
        torch.empty(4096, dtype=torch.bfloat16),
        eps=1e-6,
        rms_eps=1e-5,
        norm_eps=1e-5,
        iterations=20,
    )
    mean(leave(streams, y, post, comb))


def mix(rows: int, k: int, shared: bool) -> None:
    x, bf16 = torch.empty(rows, 512, dtype=torch.bfloat16), torch.bfloat16
    router = torch.empty(288, 512), torch.empty(288)
    ids, weights = route(x, *router, k, True, 2.5, shared=shared)
    # The expert weights are never read: one expert stands for all.
    gate_up = torch.empty(1, 4096, 512, dtype=bf16).expand(288 + shared, -1, -1)
    down = torch.empty(1, 512, 2048, dtype=bf16).expand(288 + shared, -1, -1)
    given = x, ids, weights, gate_up, down, 10.0
    experts(*given)
    experts_norm(*given, x, x[0], 1e-5)


@launch
def mixture(rows: int) -> None:
    """Of more rows than one, which has kernels of its own."""
    few = max(rows, 2)
    mix(few, 7, True)
    for more in (0, 1024, 4096):
        mix(few + more, 8, False)


@launch
def mixture_of_one(rows: int) -> None:
    for shared in (False, True):
        mix(1, 8, shared)


@launch
def recurrence(rows: int) -> None:
    bf16, heads, dim = torch.bfloat16, 64, 128
    x, beta = torch.empty(rows, heads, dim, dtype=bf16), torch.empty(rows, heads)
    cells = Cells(torch.empty(2, 1 << 19), torch.zeros(heads, 2, dtype=torch.int64))
    shapes = open_rows_shapes(heads, dim, dim, 64, bf16).items()
    cache = OpenRows(**{name: torch.zeros(1, *shape, dtype=t) for name, (shape, t) in shapes})
    tables = sequences(rows)
    step = Pass(tables.first, tables.first, tables.first, tables.anchor_frames)
    many = torch.empty(rows * 17, heads, dim, dtype=bf16)
    for new, strengths in ((x, beta), (many, many[:, :, 0].float())):
        for lowest, overlap in ((-5.0, True), (None, True), (None, False)):
            with patch("merestone.ops.triton.kda.overlaps", return_value=overlap):
                kda(
                    new, new, new, new.float(), strengths, cells, cache, tables, step,
                    chunk=64, lowest=lowest,
                )  # fmt: skip


@launch
def kept_rows(rows: int) -> None:
    bf16, width = torch.bfloat16, 24576
    arena = torch.empty(2, 1 << 20, dtype=bf16)
    pages = arena.as_strided((2, 16, width), (1 << 20, width, 1))
    tables = sequences(rows)
    one = torch.zeros(rows, dtype=torch.int32)
    new = torch.empty(rows, width, dtype=bf16)
    for floor in (None, one):
        write_rows(new, pages, tables.open_pages, one, one, floor)
    read_rows(pages, tables.open_pages, one, one)
    write_ring(new[:, :4096], torch.empty(2, 128, 4096, dtype=bf16), one, one, one, one)
    tail = Cells(arena, torch.zeros(3, 2, dtype=torch.int64))
    write_tail(new, pages, tail, tables, one, tables.anchor_frames)
    set_entries(one, one, one)
    feed(one, one, one, one, 151552)


@launch
def latents(rows: int) -> None:
    """Of GLM-5.3-Flash, and with columns that are not normed, as Kimi-Linear has them."""
    bf16, one = torch.bfloat16, torch.zeros(rows, dtype=torch.int32)
    arena = torch.empty(2, 1 << 20, dtype=bf16)
    for width in (512, 576):
        pages = arena.as_strided((2, 1024, width), (1 << 20, width, 1))
        new = torch.empty(rows, 1536 + width, dtype=bf16)[:, 1536:]
        write_latents(new, torch.empty(512, dtype=bf16), 1e-5, pages, one[:, None], one, one)


@launch
def delta_inputs(rows: int) -> None:
    bf16, heads, width = torch.bfloat16, 64, 8192
    widths = 3 * width, width, heads
    arena, zero = torch.empty(2, 1 << 20, dtype=bf16), torch.zeros(rows, dtype=torch.int32)
    raw = Raw(*(torch.empty(rows, n, dtype=bf16) for n in widths))
    pages = Raw(*(arena.as_strided((2, 16, n), (1 << 20, n, 1)) for n in widths))
    tail = Cells(arena, torch.zeros(3, 2, dtype=torch.int64))
    fixed = torch.empty(4, 3 * width), torch.empty(width), torch.empty(heads)
    for lowest, floor in ((-5.0, zero), (None, None)):
        kda_inputs(
            raw, pages, tail, *fixed, zero, zero, sequences(rows),
            eps=1e-6, lowest=lowest, floor=floor,
        )  # fmt: skip


@launch
def judgements(rows: int) -> None:
    logits, one = torch.empty(rows, 154880), torch.zeros(rows, dtype=torch.int32)
    best(logits, one, one)
    bad_rows(torch.empty(rows, 4096, dtype=torch.bfloat16), one, one)
    cells = Cells(torch.empty(2, 1 << 19), torch.zeros(64, 2, dtype=torch.int64))
    bad_anchors(cells, 128 * 128, one[:, None].repeat(1, 74), one)
    draw(logits, draws([(0, SamplingParams(temperature=1.0), 0, 0)] * rows, 154880))


@launch
def drafts(rows: int) -> None:
    """As many blocks of DFlash2 as there are rows."""
    bf16, size, vocab = torch.bfloat16, 8, 154880
    x, one = torch.empty(rows * size, 6144, dtype=bf16), torch.zeros(rows, dtype=torch.int32)
    q, keys, values = torch.split(x, [4096, 1024, 1024], 1)
    tables = torch.empty(2, 2, 2048, 64)
    positions = one.repeat_interleave(size)
    q = norm_rotate(q, torch.empty(128, dtype=bf16), 1e-5, (tables[0], tables[1]), positions)
    keys = norm_rotate(keys, torch.empty(128, dtype=bf16), 1e-5, (tables[0], tables[1]), positions)
    pages = torch.empty(2, 64, 8, 128, dtype=bf16)
    for reach, window in ((2047, 2048), (None, None)):
        context = Context(one, size, pages, pages, one[:, None], reach, window, 4096)
        split = reach is not None
        attend_block(q.view(-1, 32, 128), keys, values, context, 0.1, split=split)
    dynamic = torch.empty(rows * size, 1024, dtype=bf16)
    for side in (0, 1):
        convolve(q, dynamic, torch.empty(2, 2, 4096), side, size)
    noise = Noise(one.long(), one, one, one.float())
    logits = torch.empty(rows * (size - 1), vocab)
    book = torch.empty(vocab, 256, dtype=bf16)
    candidates = torch.zeros(rows * (size - 1), 16, dtype=torch.int32)
    projected = torch.empty(rows * (size - 1), 256, dtype=bf16)
    out = torch.zeros(rows, size - 1, dtype=torch.int32)
    follow(logits, candidates, projected, (book, book), one, noise, out)
    odds = Odds(candidates, torch.empty(candidates.shape))
    follow(logits, candidates, projected, (book, book), one, noise, out, odds)
    add_noise(logits, noise, size - 1)
    among(logits, noise, size - 1, 1, out, odds)
