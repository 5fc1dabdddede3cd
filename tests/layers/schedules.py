"""Ways to run a model over one sequence, and the companies it is run in."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from layers.arena_double import Arena, Sequence, step
from merestone.models.interface import Model

VOCAB = 320


def text(count: int, seed: int) -> list[int]:
    source = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCAB, (count,), generator=source).tolist()


Make = Callable[..., Arena]
"""Makes an arena as its constructor does: a rank of several has its own way."""


def whole(model: Model, ids: list[int], make: Make = Arena) -> Tensor:
    """Hidden rows of one pass, alone, in an arena of its own."""
    return step(model, make(model.fields(), 64), [(Sequence(ids), len(ids))])[0]


def in_parts(
    model: Model, ids: list[int], parts: list[int], seed: int = 0, make: Make = Arena
) -> Tensor:
    """Hidden rows of a pass cut into ``parts``, now and then with a late anchor."""
    arena = make(model.fields(), 64, seed)
    sequence = Sequence(ids)
    out = []
    for i, count in enumerate(parts):
        # A late anchor leaves at most two chunks of open rows.
        may = sequence.length + count - sequence.anchor < 2 * 64
        out += step(model, arena, [(sequence, count)], [may and (i + seed) % 3 == 0])
    return torch.cat(out)


def cuts(total: int, most: int, seed: int) -> list[int]:
    source = torch.Generator().manual_seed(seed)
    parts: list[int] = []
    while sum(parts) < total:
        part = int(torch.randint(1, most + 1, (1,), generator=source))
        parts.append(min(part, total - sum(parts)))
    return parts


def in_company(
    model: Model, texts: list[list[int]], seed: int = 3, make: Make = Arena
) -> list[Tensor]:
    """Hidden rows of ragged sequences in one arena, in changing company and order."""
    arena = make(model.fields(), 200)
    sequences = [Sequence(ids) for ids in texts]
    got: list[list[Tensor]] = [[] for _ in texts]
    source = torch.Generator().manual_seed(seed)
    while True:
        left = [i for i, s in enumerate(sequences) if s.length < len(s.ids)]
        if not left:
            return [torch.cat(parts) for parts in got]
        order = [left[int(i)] for i in torch.randperm(len(left), generator=source)]
        work = []
        for i in order[: 1 + int(torch.randint(len(order), (1,), generator=source))]:
            most = [1, 3, 90][int(torch.randint(3, (1,), generator=source))]
            room = len(sequences[i].ids) - sequences[i].length
            work.append((i, min(most, room)))
        outs = step(model, arena, [(sequences[i], n) for i, n in work])
        for (i, _), out in zip(work, outs, strict=True):
            got[i].append(out)
