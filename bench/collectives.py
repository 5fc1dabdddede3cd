"""Sums over ranks in a fixed order against the library's all-reduce: bits and times.

Refuses to report times of sums whose bits are not those of their definition. The last line of the
output is one JSON object. With several ranks on one GPU (or none) gloo carries the messages.
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, distributed

from bench.about import publish
from merestone.parallel.group import in_rank_order
from merestone.parallel.world import World, connect

ROWS = {"cpu": (1, 64, 256), "cuda": (1, 64, 4096)}
WIDTH = 4096
CALLS, REPEATS = 20, 7
TIMEOUT_S = 120.0


def over_ranks(
    function: Callable[..., Any], ranks: int, device: str, *arguments: Any, dcp: int = 1
) -> list[Any]:
    """What ``function(world, *arguments)`` returns on each of ``ranks`` new processes.

    ``dcp`` of them share tokens. ``device`` "cuda" deals the ranks over the GPUs there are. Raises
    RuntimeError with the traceback of a rank that failed.
    """
    context = multiprocessing.get_context("spawn")
    place = f"file://{tempfile.mkdtemp(prefix='merestone-')}/meet"
    pipes, processes = [], []
    for rank in range(ranks):
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_rank, args=(theirs, function, rank, (ranks, dcp), device, place, arguments)
        )
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    answers = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.join()
    for rank, (good, answer) in enumerate(answers):
        if not good:
            raise RuntimeError(f"rank {rank} of {ranks}:\n{answer}")
    return [answer for _, answer in answers]


def _rank(
    pipe: Connection,
    function: Callable[..., Any],
    rank: int,
    layout: tuple[int, int],
    device: str,
    place: str,
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    backend = None
    if device == "cuda":
        count = torch.cuda.device_count()
        device, backend = f"cuda:{rank % count}", "nccl" if layout[0] <= count else "gloo"
    try:
        world = connect(
            rank, *layout, rendezvous=place, device=device, backend=backend, timeout_s=TIMEOUT_S
        )
        answer = function(world, *arguments)
        world.close()
        pipe.send((True, answer))
    except Exception:
        pipe.send((False, traceback.format_exc()))


def partial(world: World, rows: int, width: int = WIDTH) -> Tensor:
    """[rows, width] fp32 of wild magnitudes, the rank's own; a row is the same in any batch."""
    found = torch.empty(rows, width)
    for row in range(rows):
        draw = torch.Generator().manual_seed(1000 * row + world.rank)
        found[row] = torch.randn(width, generator=draw) * 10.0 ** (row % 7 - 3)
    return found.to(world.device)


def exact(world: World, rows: int, width: int = WIDTH) -> str:
    """Why the bits of a fixed-order sum are not those of its definition; empty if they are."""
    mine = partial(world, rows, width)
    total = world.ranks.sum(mine)
    if not torch.equal(total, in_rank_order(world.ranks.gather(mine))):
        return f"{rows} rows: not the sum in rank order"
    if not bool((world.ranks.gather(total) == total).all()):
        return f"{rows} rows: ranks have different sums"
    for row in sorted({0, rows // 2, rows - 1}):
        if not torch.equal(world.ranks.sum(mine[row : row + 1])[0], total[row]):
            return f"{rows} rows: row {row} alone has another sum"
    return ""


def library_rows_alike(world: World, rows: int) -> bool:
    """Whether the library's all-reduce gives a row the same bits alone as among others."""
    mine = partial(world, rows)
    total = mine.clone()
    distributed.all_reduce(total)
    alike = True
    for row in range(0, rows, max(1, rows // 16)):
        alone = mine[row : row + 1].clone()
        distributed.all_reduce(alone)
        alike = alike and torch.equal(alone[0], total[row])
    return alike


def microseconds(world: World, call: Callable[[], object]) -> float:
    """Median time of one call, launches included; all ranks make the same calls."""
    wait = torch.cuda.synchronize if world.device.startswith("cuda") else lambda: None
    times = []
    for _ in range(REPEATS):
        call()
        wait()
        began = time.perf_counter()
        for _ in range(CALLS):
            call()
        wait()
        times.append((time.perf_counter() - began) / CALLS)
    return round(1e6 * median(times), 2)


def compare(world: World) -> list[dict[str, Any]]:
    """One entry a number of rows."""
    found = []
    for rows in ROWS[world.device.partition(":")[0]]:
        if wrong := exact(world, rows):
            raise RuntimeError(wrong)
        mine = partial(world, rows)
        half = mine.bfloat16()
        # Groups without a handle of their own use the library's default: all ranks.
        entry: dict[str, Any] = {"rows": rows, "bytes": mine.numel() * 4}
        entry["fixed_order_us"] = microseconds(world, lambda x=mine: world.ranks.sum(x))
        entry["all_reduce_fp32_us"] = microseconds(
            world, lambda x=mine: distributed.all_reduce(x.clone())
        )
        entry["all_reduce_bf16_us"] = microseconds(
            world, lambda x=half: distributed.all_reduce(x.clone())
        )
        entry["all_reduce_rows_alike"] = library_rows_alike(world, rows)
        found.append(entry)
    return found


def main(
    ranks: Annotated[int, typer.Option(min=2)] = 2,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    out: Annotated[Path | None, typer.Option(help="Write the JSON there, too.")] = None,
) -> None:
    """Compare sums in rank order with the library's all-reduce."""
    rows = over_ranks(compare, ranks, device)[0]
    for entry in rows:
        print(entry)
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    report = {"bench": "collectives", "ranks": ranks, "device": name, "width": WIDTH, "rows": rows}
    publish(report, out)


if __name__ == "__main__":
    sys.modules["bench.collectives"] = sys.modules[__name__]
    typer.run(main)
