"""Operators on a CUDA device: microseconds against the library's or fla-core's, and against bytes.

    python -m bench.kernels [gemm kda attention ...] [--save FILE]

Dimensions are those of GLM-5.3-Flash and Kimi-Linear-48B-A3B. Inputs are cold (they rotate through
more memory than the cache holds). A table on the way; the last line is one JSON object.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

os.environ["FLA_DISABLE_BACKEND_DISPATCH"] = "1"  # before fla-core is imported

import torch
import typer
from torch import Tensor

from bench.about import publish
from bench.inexact import few_configurations
from bench.timing import Call, about_device, copies, microseconds
from merestone.core.geometry import GroupSpec
from merestone.core.orders import CopyRows
from merestone.ops.triton.attention import NARROW, WIDE, Keys, attend, items
from merestone.ops.triton.attention_wide import ROWS as WIDEST
from merestone.ops.triton.attention_wide import attend_wide
from merestone.ops.triton.copy import Copier, Region
from merestone.ops.triton.gemm import linear
from merestone.ops.triton.grouped import experts, route
from merestone.ops.triton.hyper import enter, leave
from merestone.ops.triton.index import choose, members, pool_scores
from merestone.ops.triton.kda import OpenRows, Pass, kda, open_rows_shapes
from merestone.ops.triton.kda_inputs import Raw, kda_inputs
from merestone.ops.triton.norms import gated_rms_norm, l2_norm, log_decay, rms_norm, swiglu
from merestone.ops.triton.rows import Cells, Sequences

BF16 = torch.bfloat16
ROWS = (1, 4, 16, 64, 512, 2048, 8192)
# Weights [N, K] by model.
GLM = {
    "kda in": (24896, 4096), "kda out": (4096, 8192), "decay": (8192, 128), "q_a": (2112, 4096),
    "q_b": (16384, 1536), "mla out": (4096, 16384), "dense up": (24576, 4096),
    "shared down": (4096, 2048),
}  # fmt: skip
KIMI = {
    "kda in": (12576, 2304), "kda out": (2304, 4096), "mla q": (6144, 2304), "kv_a": (576, 2304),
    "dense up": (18432, 2304), "shared up": (2048, 2304), "shared down": (2304, 1024),
    "head": (163840, 2304),
}  # fmt: skip
CHUNK = 64

Row = dict[str, Any]
Section = Callable[[], Iterator[Row]]
SECTIONS: dict[str, Section] = {}


def section(function: Section) -> Section:
    SECTIONS[function.__name__] = function
    return function


def draw(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def row(name: str, ours: float, reference: float | None = None, **more: Any) -> Row:
    """One line: microseconds, the reference's, and how many times as fast we are."""
    found = {"name": name, "us": ours, "reference_us": reference, **more}
    if reference is not None:
        found["speed"] = reference / ours
    if "bytes" in more:
        found["tb_s"] = more["bytes"] / ours / 1e6
    if "flops" in more:
        found["tflop_s"] = more["flops"] / ours / 1e6
    return found


@section
def ceilings() -> Iterator[Row]:
    """The rates that everything is held against."""
    size = 1 << 30
    one, other = (torch.randint(0, 255, (size,), dtype=torch.uint8, device="cuda") for _ in "ab")
    us = microseconds([partial(other.copy_, one)])
    yield row("copy 1 GiB", us, bytes=2 * size)
    x, w = draw(8192, 8192), draw(8192, 8192)
    yield row("matmul 8192", microseconds([partial(torch.matmul, x, w)]), flops=2 * 8192**3)


@section
def copy() -> Iterator[Row]:
    """136 MiB over scattered frames, 2 MiB each."""
    frame, count = 2 << 20, 68
    arena = torch.randint(0, 255, (4 * count, frame), dtype=torch.uint8, device="cuda")
    slots = torch.zeros(2, 8, 8192, dtype=torch.uint8, device="cuda")
    page = GroupSpec("full", page=1024)
    copier = Copier(arena, slots, {"full": (page, [Region(0, frame // 1024)])}, padding=(0, 1))
    calls: list[Call] = []
    for seed in range(2):
        where = torch.randperm(4 * count, generator=torch.Generator().manual_seed(seed)).tolist()
        orders = tuple(
            CopyRows(group="full", source=a, target=b, rows=1024)
            for a, b in zip(where[:count], where[count : 2 * count], strict=True)
        )
        table = copier.encode(orders, count).cuda()
        calls.append(partial(copier.run, table))
    yield row("copy 136 MiB", microseconds(calls), bytes=2 * frame * count)


def _products(model: str, shapes: dict[str, tuple[int, int]]) -> Iterator[Row]:
    for name, (n, k) in shapes.items():
        weights = [draw(n, k) * k**-0.5 for _ in range(copies(n * k * 2))]
        for m in ROWS:
            if m * n > 1 << 29:
                continue
            x = draw(m, k)
            some = weights if m < 512 else weights[:2]
            ours = microseconds([partial(linear, x, w) for w in some])
            theirs = microseconds([partial(torch.matmul, x, w.T) for w in some])
            size, work = 2 * (n * k + m * k + m * n), 2 * m * n * k
            yield row(f"{model} {name} {m}x{n}x{k}", ours, theirs, bytes=size, flops=work)


@section
def gemm() -> Iterator[Row]:
    """Products against cuBLAS; then the router's and the hyper-connections' fp32 ones."""
    yield from _products("glm", GLM)
    yield from _products("kimi", KIMI)
    for name, n, k in (("router", 288, 4096), ("streams", 24, 16384), ("router", 256, 2304)):
        weight = draw(n, k, dtype=torch.float32)
        for m in (1, 64, 8192):
            x = draw(m, k)
            wide = x.float()
            ours = microseconds([partial(linear, x, weight)])
            theirs = microseconds([partial(torch.matmul, wide, weight.T)])
            yield row(f"fp32 {name} {m}x{n}x{k}", ours, theirs)
    for name, n, k, heads in (("absorb q", 512, 256, 64), ("absorb v", 256, 512, 64)):
        weight = draw(heads, n, k)
        for m in (1, 64, 8192):
            x = draw(m, heads, k).transpose(0, 1)
            ours = microseconds([partial(linear, x, weight)])
            theirs = microseconds([partial(torch.matmul, x, weight.transpose(1, 2))])
            yield row(f"batched {name} {m}x{n}x{k}x{heads}", ours, theirs)


class Recurrence:
    """Inputs of one layer: ``batch`` sequences that stand ``opened`` rows after their anchors."""

    def __init__(self, heads: int, batch: int, opened: int, rows: int) -> None:
        def table(values: list[Any]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device="cuda")

        dim, total = 128, batch * rows
        q, k = (torch.nn.functional.normalize(draw(total, heads, dim), dim=-1) for _ in "qk")
        self.inputs = (q * dim**-0.5, k, draw(total, heads, dim))
        self.g = -draw(total, heads, dim, dtype=torch.float32).abs().clamp(max=5) * 0.3
        self.beta = draw(total, heads, dtype=torch.float32).sigmoid()
        self.memory = draw(2 * batch, heads * dim * dim, dtype=torch.float32)
        places = torch.tensor([(0, h * dim * dim) for h in range(heads)], device="cuda")
        self.cells = Cells(self.memory, places)
        shapes = open_rows_shapes(heads, dim, dim, CHUNK, BF16).items()
        full = {name: (draw(batch, *shape) * 0.1).to(dtype) for name, (shape, dtype) in shapes}
        full["decays"] = -full["decays"].abs()
        # Where the state of a sequence stands that was decoded row by row.
        full["stands"] = torch.full_like(full["stands"], CHUNK + max(opened - 1, 0) // 16 * 16)
        self.cache = OpenRows(**{name: tensor.contiguous() for name, tensor in full.items()})
        first = [CHUNK + opened] * batch
        last = [at + rows for at in first]
        anchor = [CHUNK] * batch
        self.sequences = Sequences(
            table(first), table([i * rows for i in range(batch)]), table(anchor),
            table([[0]] * batch), table([[i] for i in range(batch)]),
        )  # fmt: skip
        advance = [0] * batch if rows == 1 else [last[0] // CHUNK * CHUNK] * batch
        self.step = Pass(
            table(last), table(advance), table(list(range(batch))),
            table([[batch + i] for i in range(batch)]),
        )  # fmt: skip

    def run(self, lowest: float | None) -> Tensor:
        return kda(
            *self.inputs, self.g, self.beta, self.cells, self.cache, self.sequences, self.step,
            chunk=CHUNK, lowest=lowest,
        )  # fmt: skip


def _in_place(one: Recurrence, batch: int) -> Call:
    from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd

    heads = one.beta.shape[1]
    state = draw(batch, heads, 128, 128, dtype=torch.float32)
    ends = torch.arange(batch + 1, device="cuda")
    inputs = [x[None] for x in (*one.inputs, one.g, one.beta)]
    places = torch.arange(batch, device="cuda", dtype=torch.int32)
    return partial(
        fused_recurrent_kda_fwd,
        *inputs,
        initial_state=state,
        cu_seqlens=ends,
        ssm_state_indices=places,
        scale=1.0,
    )


@section
def kda_decode() -> Iterator[Row]:
    """One row of each sequence against fla's recurrent kernel, which writes states in place."""
    for heads, lowest in ((64, -5.0), (32, None)):
        for batch in (1, 8, 64):
            sets = min(copies(heads * batch * 128 * 128 * 4), 16)
            one = [Recurrence(heads, batch, 0, 1) for _ in range(sets)]
            theirs = microseconds([_in_place(x, batch) for x in one])
            for opened in (0, 15, 31, 47, 63, 100):
                some = [Recurrence(heads, batch, opened, 1) for _ in range(sets)]
                ours = microseconds([partial(x.run, lowest) for x in some])
                size = batch * heads * (128 * 128 * 4 + opened * 128 * 8)
                yield row(f"{heads} heads x{batch}, {opened} open", ours, theirs, bytes=size)


@section
def kda_prefill() -> Iterator[Row]:
    """A long prompt against fla's chunk kernels."""
    from fla.ops.kda import chunk_kda

    for heads, lowest in ((64, -5.0), (32, None)):
        for rows in (64, 8192, 32768):
            one = Recurrence(heads, 1, 0, rows)
            inputs = [x[None] for x in (*one.inputs, one.g, one.beta)]
            state = draw(1, heads, 128, 128, dtype=torch.float32)
            ends = torch.tensor([0, rows], device="cuda")
            more: dict[str, Any] = {"safe_gate": True, "lower_bound": -5.0} if lowest else {}
            theirs = partial(
                chunk_kda, *inputs, initial_state=state, output_final_state=True, scale=1.0,
                cu_seqlens=ends, **more,
            )  # fmt: skip
            ours = microseconds([partial(one.run, lowest)], graph=False)
            yield row(f"{heads} heads, {rows} rows", ours, microseconds([theirs], graph=False))


def _attend(
    heads: int, dim: int, width: int, rows: int, seen: int, split: bool, batch: int, height: int
) -> tuple[Call, int]:
    """Attention of ``rows`` last rows of each of ``batch`` sequences of ``seen`` keys."""
    page = 1024
    pages = -(-seen // page)
    arena = draw(batch * pages + 1, page, dim)
    frames = torch.randperm(batch * pages).view(batch, pages).int().cuda()
    q = draw(batch * rows, heads, dim)
    parts = [(i, i * rows, rows) for i in range(batch)]
    work = items(parts, heads, height).cuda()
    sees = torch.arange(seen - rows + 1, seen + 1, dtype=torch.int32, device="cuda").repeat(batch)
    keys = Keys(arena, frames)
    call = partial(attend_wide, q, keys, work, sees, 0.1, longest=seen, width=width)
    if height < WIDEST:
        call = partial(
            attend, q, keys, work, sees, 0.1, longest=seen, split=split, height=height, width=width
        )
    pairs = batch * (rows * seen - rows * (rows - 1) // 2)
    return call, 2 * pairs * heads * (dim + width)


@section
def attention() -> Iterator[Row]:
    """Absorbed attention over pages; floors: bytes of the keys, or operations."""
    for name, heads, dim, width in (("glm", 64, 512, 512), ("kimi", 32, 576, 512)):
        for seen in (1024, 8192, 32768):
            for batch in (1, 8, 64):
                if batch * seen > 1 << 19:
                    continue
                size = batch * seen * dim * 2
                sets = min(copies(size), 8)
                for height in (16, NARROW):
                    calls = [
                        _attend(heads, dim, width, 1, seen, True, batch, height)[0]
                        for _ in range(sets)
                    ]
                    label = f"{name} decode x{batch}, {seen} keys, items of {height}"
                    yield row(label, microseconds(calls), bytes=size)
        for rows, seen in ((1024, 1024), (8192, 8192), (4096, 32768), (8192, 32768)):
            for height in (WIDE, WIDEST):
                call, work = _attend(heads, dim, width, rows, seen, False, 1, height)
                us = microseconds([call], graph=False)
                label = f"{name} prefill {rows} rows, {seen} keys, items of {height}"
                yield row(label, us, flops=work)


@section
def sparse() -> Iterator[Row]:
    """GLM-5.3-Flash's index and attention over what it selects."""
    for rows, seen in ((1, 8192), (1, 32768), (64, 8192), (2048, 8192)):
        pools = draw(64, 256, 128)
        tables = torch.arange(64, dtype=torch.int32, device="cuda").repeat(1, 1)
        which = torch.zeros(rows, dtype=torch.int32, device="cuda")
        complete = torch.full((rows,), seen // 4, dtype=torch.int32, device="cuda")
        q, weights = draw(rows, 32, 128), draw(rows, 32)
        longest = seen // 4
        score = partial(pool_scores, q, weights, pools, tables, which, complete, longest=longest)
        scores = score()
        best = choose(scores, complete, 512)
        sees = complete * 4
        selection, counts = members(best, sees, 4, 2112)
        yield row(f"scores {rows} rows, {seen}", microseconds([score]))
        us = microseconds([partial(choose, scores, complete, 512)])
        yield row(f"choose {rows} rows, {seen}", us)
        keys = Keys(draw(33, 1024, 512), torch.arange(32, dtype=torch.int32, device="cuda")[None])
        queries = draw(rows, 64, 512)
        split = rows < 512
        work = items([(0, i, 1) for i in range(rows)], 64, NARROW if split else WIDE).cuda()
        chosen = partial(
            attend, queries, keys, work, counts, 0.1, longest=2112, split=split, selection=selection
        )
        us = microseconds([chosen])
        size = rows * 2048 * 1024
        yield row(f"selected {rows} rows, {seen}", us, bytes=size, flops=rows * 2048 * 64 * 2048)


@section
def mixture() -> Iterator[Row]:
    """Routing and experts; the floor is the bytes of the experts that were chosen."""
    shapes = (("glm", 288, 4096, 2048), ("kimi", 256, 2304, 1024))
    for name, count, width, inner in shapes:
        up, down = draw(count, 2 * inner, width), draw(count, width, inner)
        gate = draw(count, width, dtype=torch.float32) * width**-0.5
        bias = torch.zeros(count, device="cuda")
        for rows in (1, 8, 64, 512, 8192):
            xs = [draw(rows, width) for _ in range(4)]
            choices = [route(x, gate, bias, 8, True, 2.5) for x in xs]
            us = microseconds([partial(route, xs[0], gate, bias, 8, True, 2.5)])
            yield row(f"{name} route {rows}", us)
            used = sum(ids.unique().numel() for ids, _ in choices) / len(choices)
            calls = [
                partial(experts, x, *c, up, down, 10.0) for x, c in zip(xs, choices, strict=True)
            ]
            us = microseconds(calls)
            size, work = used * 6 * inner * width, rows * 8 * 6 * inner * width
            yield row(f"{name} experts {rows}", us, bytes=size, flops=work, experts=used)


@section
def rows() -> Iterator[Row]:
    """Everything that passes over rows once."""
    widths, frame = (3 * 8192, 8192, 64), 1 << 20
    arena = draw(66, frame)
    pages = Raw(*(arena.as_strided((66, 16, n), (frame, n, 1)) for n in widths))
    tail = Cells(arena, torch.tensor([(1, i * 3 * 8192) for i in range(3)], device="cuda"))
    taps = draw(4, 3 * 8192, dtype=torch.float32)
    for n in (1, 8, 64, 8192):
        numbers = torch.arange(n, dtype=torch.int32, device="cuda")
        zero = torch.zeros(1, dtype=torch.int32, device="cuda")
        table = torch.zeros(1, 512, dtype=torch.int32, device="cuda")
        where = Sequences(zero, zero, zero, table, table)
        x, raw = draw(n, 4096), Raw(*(draw(n, width) for width in widths))
        heads, gates = draw(n * 64, 128, dtype=torch.float32), draw(n * 64, 128)
        streams, small = draw(n, 4, 4096), draw(24, dtype=torch.float32)
        fn = draw(24, 16384, dtype=torch.float32) * 0.01
        both, one = draw(n, 8192), draw(4096)
        rate, bias = draw(64, dtype=torch.float32).abs(), draw(8192, dtype=torch.float32)
        factor = draw(128, dtype=torch.float32)
        eps = {"eps": 1e-6, "rms_eps": 1e-5, "norm_eps": 1e-5, "iterations": 20}
        passing = enter(streams, fn, small, small, one, **eps)
        given = partial(
            kda_inputs, raw, pages, tail, taps, bias, rate, numbers * 0, numbers, where,
            eps=1e-6, lowest=-5.0, floor=zero,
        )  # fmt: skip
        calls: dict[str, tuple[Call, int]] = {
            "rms_norm": (partial(rms_norm, x, one, 1e-5), n * 4096 * 4),
            "l2_norm": (partial(l2_norm, gates, 1e-6), n * 8192 * 4),
            "gated_rms_norm": (partial(gated_rms_norm, heads, factor, gates, 1e-5), n * 65536),
            "swiglu": (partial(swiglu, both, 10.0), n * 4096 * 6),
            "log_decay": (partial(log_decay, both, bias, rate, -5.0), n * 8192 * 6),
            "kda_inputs": (given, n * 8192 * 26),
            "enter": (partial(enter, streams, fn, small, small, one, **eps), n * 40960),
            "leave": (partial(leave, streams, x, *passing[1:]), n * 4096 * 18),
        }  # fmt: skip
        for name, (call, size) in calls.items():
            yield row(f"{name} {n}", microseconds([call]), bytes=size)


def _line(found: Row) -> str:
    parts = [f"{found['name']:<40}", f"{found['us']:10.1f} us"]
    if found["reference_us"] is not None:
        parts.append(f"reference {found['reference_us']:10.1f} us  x{found['speed']:5.2f}")
    parts += [f"{found[key]:7.2f} {key}" for key in ("tb_s", "tflop_s", "experts") if key in found]
    return "  ".join(parts)


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Sections; all by default.")] = None,
    save: Annotated[Path | None, typer.Option(help="Write the JSON there, too.")] = None,
) -> None:
    """Measure and report."""
    torch.manual_seed(0)
    report: dict[str, Any] = about_device()
    chosen = names or list(SECTIONS)
    if "kda_prefill" in chosen:
        few_configurations()
    for name in chosen:
        print(f"# {name}", flush=True)
        report[name] = []
        try:
            for found in SECTIONS[name]():
                print(_line(found), flush=True)
                report[name].append(found)
        except (RuntimeError, AssertionError, ValueError) as error:
            # One operator that fails must not cost the others' figures.
            report[name].append({"failed": f"{type(error).__name__}: {error}"})
            print(report[name][-1], flush=True)
        torch.cuda.empty_cache()
    publish(report, save)


if __name__ == "__main__":
    typer.run(main)
