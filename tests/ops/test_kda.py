"""The chunk form against the recurrent definition, and the law of equal bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from merestone.ops.kda import kda_chunks
from merestone.ops.naive import kda_recurrent

CHUNK, HEADS = 64, 3
pytestmark = pytest.mark.usefixtures("threads")


@dataclass
class Sample:
    """One sequence: q, k, v, g [T, H, *], beta [T, H], state [H, K, V]."""

    inputs: list[Tensor]
    state: Tensor

    @property
    def length(self) -> int:
        return self.inputs[0].shape[0]

    def head(self, rows: int) -> Sample:
        return Sample([x[:rows] for x in self.inputs], self.state)

    def tail(self, rows: int, state: Tensor) -> Sample:
        return Sample([x[rows:] for x in self.inputs], state)


def draw(length: int, strongest: float, dims: tuple[int, int] = (16, 16), seed: int = 0) -> Sample:
    source = torch.Generator().manual_seed(seed)
    key, value = dims

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=source)

    unit = torch.nn.functional.normalize
    q = unit(normal(length, HEADS, key), dim=-1) * key**-0.5
    k = unit(normal(length, HEADS, key), dim=-1)
    g = -torch.rand(length, HEADS, key, generator=source) * strongest
    beta = torch.rand(length, HEADS, generator=source)
    return Sample([q, k, normal(length, HEADS, value), g, beta], normal(HEADS, key, value))


def run(
    samples: Sequence[Sample], advances: Sequence[int], lowest: float | None, filler: float = 0.0
) -> tuple[list[Tensor], Tensor]:
    """Outputs [T, H, V] of each sequence, most chunks first, and the states at ``advances``.

    Rows past an end hold ``filler`` (its negative in g).
    """
    counts = [-(-s.length // CHUNK) for s in samples]
    packed: list[list[Tensor]] = [[] for _ in range(5)]
    where: list[list[int]] = [[] for _ in samples]
    for turn in range(counts[0]):
        for s, sample in enumerate(samples):
            if turn >= counts[s]:
                continue
            where[s].append(len(packed[0]))
            for i, x in enumerate(sample.inputs):
                chunk = torch.full((CHUNK, *x.shape[1:]), -abs(filler) if i == 3 else filler)
                rows = x[turn * CHUNK : (turn + 1) * CHUNK]
                chunk[: rows.shape[0]] = rows
                packed[i].append(chunk.transpose(0, 1))
    q, k, v, g, beta = (torch.stack(x).contiguous() for x in packed)
    state = torch.stack([s.state for s in samples])
    out, states = kda_chunks(q, k, v, g, beta, state, counts, advances, lowest)
    outs = [
        torch.cat([out[i].transpose(0, 1) for i in own])[: sample.length]
        for own, sample in zip(where, samples, strict=True)
    ]
    return outs, states


@pytest.mark.parametrize("dims", [(16, 16), (32, 48), (8, 4)])
@pytest.mark.parametrize(
    ("strongest", "lowest"),
    [(0.01, None), (1.0, None), (30.0, None), (0.01, -5.0), (5.0, -5.0), (5.0, -30.0)],
)
def test_near_the_recurrent_form(
    strongest: float, lowest: float | None, dims: tuple[int, int]
) -> None:
    samples = [draw(n, strongest, dims, n) for n in (300, 128, 1)]
    outs, states = run(samples, [4, 1, 0], lowest)
    for sample, out, state, advance in zip(samples, outs, states, (4, 1, 0), strict=True):
        expected, _ = kda_recurrent(*sample.inputs, sample.state)
        assert torch.allclose(out, expected, atol=2e-5)
        at = (
            kda_recurrent(*sample.head(advance * CHUNK).inputs, sample.state)[1]
            if advance
            else None
        )
        assert torch.allclose(state, sample.state if at is None else at, atol=2e-5)


@pytest.mark.parametrize(("strongest", "lowest"), [(0.05, -5.0), (5.0, -5.0), (9.0, None)])
def test_later_rows_do_not_matter(strongest: float, lowest: float | None) -> None:
    """Every prefix, whatever lies after it, has the bits of the whole."""
    sample = draw(130, strongest)
    whole = run([sample], [0], lowest)[0][0]
    for rows in (1, 7, 16, 17, 40, 63, 64, 65, 96, 129):
        for filler in (0.0, 0.2):
            assert torch.equal(run([sample.head(rows)], [0], lowest, filler)[0][0], whole[:rows])


@pytest.mark.parametrize(("strongest", "lowest"), [(0.05, -5.0), (9.0, None)])
def test_anchors_and_mates_do_not_matter(strongest: float, lowest: float | None) -> None:
    samples = [draw(n, strongest, seed=n) for n in (700, 200, 190, 64, 3)]
    outs, _ = run(samples, [0] * 5, lowest)
    for sample, out in zip(samples, outs, strict=True):
        alone, states = run([sample], [min(2, sample.length // CHUNK)], lowest)
        assert torch.equal(alone[0], out)
        if sample.length > 2 * CHUNK:
            rest, _ = run([sample.tail(2 * CHUNK, states[0])], [0], lowest)
            assert torch.equal(rest[0], out[2 * CHUNK :])
    reordered, _ = run([samples[i] for i in (0, 1, 2, 4, 3)], [3, 0, 1, 0, 0], lowest)
    for place, i in enumerate((0, 1, 2, 4, 3)):
        assert torch.equal(reordered[place], outs[i])


def test_the_past_matters() -> None:
    """Power: another state changes every row."""
    sample = draw(64, 0.01)
    other = Sample(sample.inputs, sample.state + 0.1)
    first, second = run([sample], [0], -5.0)[0][0], run([other], [0], -5.0)[0][0]
    assert ((first - second).abs().amax((1, 2)) > 1e-3).all()
