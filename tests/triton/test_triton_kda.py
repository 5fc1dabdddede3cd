"""The recurrence: however a sequence is cut into steps, the same outputs and the same anchors."""

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from merestone.ops.naive import kda_recurrent
from merestone.ops.triton.kda import OpenRows, Pass, kda, open_rows_shapes
from merestone.ops.triton.rows import Cells, Sequences

HEADS, DIM, WIDTH, CHUNK, FRAME = 2, 16, 16, 32, 1024
# The two heads' states lie in an anchor's two frames.
PLACES = [(1, 64), (0, 512)]


@dataclass
class Rows:
    """One sequence's inputs, [T, H, ...]."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor

    def cut(self, first: int, last: int) -> tuple[Tensor, ...]:
        parts = (x[first:last] for x in (self.q, self.k, self.v, self.g, self.beta))
        return tuple(x.contiguous() for x in parts)


def rows(draw, count: int, scale: float = 0.3, heads: int = HEADS, dim: int = DIM) -> Rows:
    q, k = (torch.nn.functional.normalize(draw(count, heads, dim), dim=-1) for _ in "qk")
    # Slow decays, so that a row far back still counts.
    g = -scale * draw(count, heads, dim).abs().clamp(max=5 / scale)
    beta = draw(count, heads).sigmoid()
    return Rows(q * dim**-0.5, k, draw(count, heads, dim), g, beta)


@dataclass
class Machine:
    """Slots with caches, and an arena of anchors: steps of several sequences at once."""

    device: str
    lowest: float | None = -5.0
    heads: int = HEADS
    dim: int = DIM
    chunk: int = CHUNK
    dtype: torch.dtype = torch.float32
    slots: int = 3
    few: bool = True
    memory: Tensor = field(init=False)
    cache: OpenRows = field(init=False)

    def __post_init__(self) -> None:
        size = max(FRAME, self.heads * self.dim * self.dim)
        self.memory = torch.full((16 + 2 * self.slots, size), float("nan"), device=self.device)
        shapes = open_rows_shapes(self.heads, self.dim, self.dim, self.chunk, self.dtype)
        self.cache = OpenRows(
            **{
                # Nothing but what a pass wrote may count.
                name: torch.full(
                    (self.slots, *shape), -1 if dtype == torch.int32 else float("nan")
                ).to(self.device, dtype)
                for name, (shape, dtype) in shapes.items()
            }
        )
        self.places = torch.tensor(PLACES, device=self.device)
        if self.heads != HEADS:
            square = self.dim * self.dim
            self.places = torch.tensor(
                [(0, head * square) for head in range(self.heads)], device=self.device
            )

    def step(self, works: list[tuple[Rows, int, int, int, int, int, tuple[int, int]]]) -> list:
        """works: (rows, slot, first, end, anchor, advance, frames: of the anchor, to advance to).
        Anchor number i lies in frames 2 i and 2 i + 1; 0 means none."""

        def table(values: list) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self.device)

        def pair(anchor: int) -> list[int]:
            return [2 * anchor, 2 * anchor + 1] if anchor else [-1, -1]

        parts = [work[0].cut(work[2], work[3]) for work in works]
        inputs = [torch.cat([part[i] for part in parts]) for i in range(5)]
        inputs[:3] = [x.to(self.dtype) for x in inputs[:3]]
        at, starts = 0, []
        for part in parts:
            starts.append(at)
            at += part[0].shape[0]
        pages = table([[0]] * len(works))
        sequences = Sequences(
            table([w[2] for w in works]),
            table(starts),
            table([w[4] for w in works]),
            pages,
            table([pair(w[6][0]) for w in works]),
        )
        step = Pass(
            table([w[3] for w in works]),
            table([w[5] for w in works]),
            table([w[1] for w in works]),
            table([pair(w[6][1]) for w in works]),
        )
        cells = Cells(self.memory, self.places)
        options = {"chunk": self.chunk, "lowest": self.lowest, "few": self.few}
        out = kda(*inputs, cells, self.cache, sequences, step, **options)
        return list(out.split([part[0].shape[0] for part in parts]))

    def anchor(self, number: int) -> Tensor:
        """The state of anchor ``number``, [H, K, V]."""
        size = self.dim * self.dim
        cells = [self.memory[2 * number + f, o : o + size] for f, o in self.places.tolist()]
        return torch.stack(cells).view(self.heads, self.dim, self.dim)


@pytest.mark.usefixtures("ordered_dot")
@pytest.mark.parametrize(("lowest", "scale"), [(-5.0, 0.3), (-5.0, 3.0), (None, 0.3), (None, 3.0)])
def test_close_to_the_recurrence(draw, device: str, lowest: float | None, scale: float) -> None:
    one = rows(draw, 75, scale)
    machine = Machine(device, lowest)
    [out] = machine.step([(one, 0, 0, 75, 0, 64, (0, 1))])
    zero = torch.zeros(HEADS, DIM, WIDTH, device=device)
    expected, _ = kda_recurrent(one.q, one.k, one.v, one.g, one.beta, zero)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    _, state = kda_recurrent(*one.cut(0, 64), zero)
    torch.testing.assert_close(machine.anchor(1), state, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("ordered_dot")
@pytest.mark.parametrize("lowest", [-5.0, None])
def test_decode_is_prefill(draw, device: str, lowest: float | None) -> None:
    """Row by row and in draft-sized bites, the anchor moving late; then the whole in one pass.

    In fp16, which the interpreter rounds rightly: a cache must hold what was computed with.
    """
    one = rows(draw, 75)
    expected = Machine(device, lowest, dtype=torch.float16)
    [whole] = expected.step([(one, 1, 0, 75, 0, 64, (0, 1))])
    machine = Machine(device, lowest, dtype=torch.float16)
    [prompt] = machine.step([(one, 0, 0, 13, 0, 0, (0, 0))])
    assert torch.equal(prompt, whole[:13])
    at = 13
    for bite in (1, 2, 1, 5, 8, 1, 3, 7, 1):
        [out] = machine.step([(one, 0, at, at + bite, 0, 0, (0, 0))])
        assert torch.equal(out, whole[at : at + bite]), at
        at += bite
    # 42 rows are open, more than a chunk. The anchor moves to 32 while row 42 is computed.
    [out] = machine.step([(one, 0, 42, 43, 0, 32, (0, 2))])
    assert torch.equal(out, whole[42:43])
    for first, last, anchor, frames in ((43, 50, 32, (2, 0)), (50, 51, 32, (2, 0))):
        [out] = machine.step([(one, 0, first, last, anchor, 0, frames)])
        assert torch.equal(out, whole[first:last])
    [out] = machine.step([(one, 0, 51, 75, 32, 64, (2, 3))])
    assert torch.equal(out, whole[51:75])
    assert torch.equal(machine.anchor(3), expected.anchor(1))


@pytest.mark.usefixtures("ordered_dot")
def test_decays_that_leave_the_range_of_numbers(draw, device: str) -> None:
    """Without a bound a tile may decay by more than exp(-80): such rows are formed pair by pair,
    from their own decays only, whatever comes after them."""
    one = rows(draw, 40)
    one.g[:, :, ::3] = -draw(40, HEADS, DIM)[:, :, ::3].abs() * 25
    one.g[7] = -30.0
    assert one.g[:16].sum(0).min() < -160
    [whole] = Machine(device, None).step([(one, 0, 0, 40, 0, 32, (0, 1))])
    zero = torch.zeros(HEADS, DIM, WIDTH, device=device)
    expected, _ = kda_recurrent(one.q, one.k, one.v, one.g, one.beta, zero)
    torch.testing.assert_close(whole, expected, rtol=1e-4, atol=1e-5)
    machine = Machine(device, None)
    at = 0
    for bite in (3, 1, 4, 1, 8, 2, 13, 8):
        [out] = machine.step([(one, 0, at, at + bite, 0, 0, (0, 0))])
        assert torch.equal(out, whole[at : at + bite]), at
        at += bite
    assert at == 40


@pytest.mark.usefixtures("ordered_dot")
def test_rejected_rows_leave_nothing(draw, device: str) -> None:
    """Drafts are rolled back by index: other rows come at the same positions."""
    one, other = rows(draw, 40), rows(draw, 40)
    machine = Machine(device)
    [whole] = Machine(device).step([(one, 1, 0, 40, 0, 0, (0, 0))])
    machine.step([(one, 0, 0, 30, 0, 0, (0, 0))])
    machine.step([(other, 0, 30, 38, 0, 0, (0, 0))])
    [out] = machine.step([(one, 0, 30, 34, 0, 0, (0, 0))])
    assert torch.equal(out, whole[30:34])


@pytest.mark.usefixtures("ordered_dot")
def test_restored_and_batched(draw, device: str) -> None:
    """From an anchor, with a cache that somebody else used, among others and padding."""
    one, other = rows(draw, 60), rows(draw, 45)
    machine = Machine(device)
    [whole] = machine.step([(one, 0, 0, 60, 0, 32, (0, 1))])
    [others] = machine.step([(other, 1, 0, 45, 0, 32, (0, 2))])
    rebuilt, mate, none = machine.step(
        [
            (one, 2, 32, 50, 32, 0, (1, 0)),
            (other, 1, 40, 45, 32, 0, (2, 0)),
            (one, 0, 60, 60, 60, 0, (0, 0)),
        ]
    )
    assert torch.equal(rebuilt, whole[32:50])
    assert torch.equal(mate, others[40:45])
    assert none.shape[0] == 0
    [out] = machine.step([(one, 2, 50, 60, 32, 0, (1, 0))])
    assert torch.equal(out, whole[50:])


# The passes (first, end, anchor to move to or 0) before one, and its own first row and anchor to
# move to. The first of a sequence's passes leaves the state at its anchor.
SITUATIONS = {
    "inside a tile": ([(0, 20, 0), (20, 21, 0)], 21, 0),
    "to a tile's last row": ([(0, 20, 0), (20, 28, 0)], 28, 0),
    "one row short of a tile": ([(0, 20, 0), (20, 31, 0)], 31, 0),
    "over a boundary": ([(0, 20, 0), (20, 30, 0)], 30, 0),
    "rolled back to a boundary": ([(0, 15, 0), (15, 17, 0), (16, 18, 0)], 16, 0),
    "the state moves": ([(0, 20, 0), (20, 32, 0)], 32, 0),
    "the state moves by two tiles": ([(0, 33, 0)], 33, 0),
    "the state moves, over a boundary": ([(0, 20, 0), (20, 47, 0)], 47, 0),
    "more open than a chunk": ([(0, 20, 0), (20, 50, 0), (50, 51, 0)], 51, 0),
    "at the zero state": ([], 0, 0),
    "at the anchor": ([(0, 32, 32)], 32, 0),
    "behind an anchor": ([(0, 32, 32), (32, 40, 0), (40, 41, 0)], 41, 0),
    "an anchor is written": ([(0, 20, 0), (20, 42, 0)], 42, 32),
    "an anchor is written inside the pass": ([(0, 20, 0), (20, 30, 0)], 30, 32),
}


def every_situation(draw, machine: Machine, expected: Machine, each: int) -> None:
    """A step of ``each`` rows in all situations at once, beside padding, and the steps after it,
    which read what it kept: the bits of a prefill."""
    one = rows(draw, 80, 0.3, machine.heads, machine.dim)
    [whole] = expected.step([(one, 0, 0, 80, 0, 64, (0, 2))])
    expected.step([(one, 0, 0, 40, 0, 32, (0, 1))])
    anchors = [0] * len(SITUATIONS)

    def step(passes: dict[int, tuple[int, int, int]]) -> None:
        works = []
        for slot, (first, end, advance) in passes.items():
            frames = (slot + 3 if anchors[slot] else 0, slot + 3 if advance else 0)
            works.append((one, slot, first, end, anchors[slot], advance, frames))
        padding = (one, machine.slots - 1, 7, 7, 7, 0, (0, 0))
        outs = machine.step([*works[:1], padding, *works[1:]])
        for work, out in zip([*works[:1], padding, *works[1:]], outs, strict=True):
            assert torch.equal(out, whole[work[2] : work[3]]), work[1:]
        for slot, (_, _, advance) in passes.items():
            anchors[slot] = advance or anchors[slot]

    for turn in range(3):
        step({s: x[0][turn] for s, x in enumerate(SITUATIONS.values()) if len(x[0]) > turn})
    stands = machine.cache.stands.clone()
    ends, passes = [], {}
    for slot, (_, first, advance) in enumerate(SITUATIONS.values()):
        ends.append(first + each)
        passes[slot] = (first, ends[slot], advance if advance <= ends[slot] else 0)
    step(passes)
    moved = (machine.cache.stands != stands).flatten(1).any(1).tolist()
    for name, found in zip(SITUATIONS, moved, strict=False):
        # Two of them are not what their names say unless the state stays, or moves.
        assert found or "the state moves" not in name, name
        assert not found or name not in ("inside a tile", "rolled back to a boundary"), name
    for more in (1, 9, 12):
        step({slot: (end, end + more, 0) for slot, end in enumerate(ends)})
        ends = [end + more for end in ends]
    for slot, anchor in enumerate(anchors):
        assert anchor in (0, 32)
        assert not anchor or torch.equal(machine.anchor(slot + 3), expected.anchor(1)), slot


@pytest.mark.usefixtures("ordered_dot")
@pytest.mark.parametrize(("each", "few"), [(1, True), (4, True), (1, False)])
def test_few_rows_in_every_situation(draw, device: str, each: int, few: bool) -> None:
    shape = {"lowest": None, "dtype": torch.float16, "slots": len(SITUATIONS) + 1}
    every_situation(draw, Machine(device, few=few, **shape), Machine(device, **shape), each)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("each", "few"), [(1, True), (4, True), (4, False)])
def test_few_rows_in_every_situation_of_true_dimensions(
    draw, device: str, each: int, few: bool, dtype: torch.dtype
) -> None:
    shape = {"heads": 4, "dim": 128, "dtype": dtype, "slots": len(SITUATIONS) + 1}
    every_situation(draw, Machine(device, few=few, **shape), Machine(device, **shape), each)


@pytest.mark.gpu
@pytest.mark.parametrize("lowest", [-5.0, None])
def test_true_dimensions(draw, device: str, lowest: float | None) -> None:
    heads, dim, chunk = 64, 128, 64
    one = rows(draw, 300, 0.3, heads, dim)
    shape = {"heads": heads, "dim": dim, "chunk": chunk, "dtype": torch.bfloat16}
    expected = Machine(device, lowest, **shape)
    [whole] = expected.step([(one, 0, 0, 300, 0, 256, (0, 1))])
    zero = torch.zeros(heads, dim, dim, device=device)
    recurrent, _ = kda_recurrent(one.q, one.k, one.v, one.g, one.beta, zero)
    torch.testing.assert_close(whole.float(), recurrent, rtol=5e-2, atol=2e-2)
    machine = Machine(device, lowest, **shape)
    machine.step([(one, 1, 0, 128, 0, 128, (0, 1))])
    for at in range(128, 240):
        advance, frames = (192, (1, 2)) if at == 200 else (0, (1, 0))
        anchor = 192 if at > 200 else 128
        frames = (2, 0) if at > 200 else frames
        [out] = machine.step([(one, 1, at, at + 1, anchor, advance, frames)])
        assert torch.equal(out, whole[at : at + 1]), at
    mates = [(one, slot, 192, 250, 192, 0, (2, 0)) for slot in range(3)]
    for out in machine.step(mates):
        assert torch.equal(out, whole[192:250])
