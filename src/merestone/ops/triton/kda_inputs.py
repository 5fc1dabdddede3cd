# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""What the recurrence is given, in one launch: the short causal convolution, normalised q and k,
log decays, write strengths; and the raw rows that all of it was made of, into open pages.

Knows rows, heads and positions. Must not know requests. A program takes some heads of one row, as
many as follow from the head's width; a head is reduced on its own. Taps are added from the oldest
to the newest, in fp32; what is convolved is rounded once, after the SiLU, as transformers does.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from merestone.ops.triton.elementwise import sigmoid, silu, softplus
from merestone.ops.triton.launch import aligned, blocks, power_of_two
from merestone.ops.triton.rows import Cells, Sequences

# Elements of q that a program takes, and its warps: a vector of 16-bit values a thread.
_ELEMENTS, _WARPS = 512, 2


@triton.jit
def _unit(x, eps, scale):
    """scale x / |x| over the last axis of x [HEADS, DIM] fp32."""
    return x / tl.sqrt(tl.sum(x * x, 1) + eps)[:, None] * scale


@triton.jit
def _raw_row(
    at, start, base, new, pages, memory, places, open_pages, anchor_frames,
    new_row, page_frame, memory_frame, width, PAGE: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """Where the raw row of position ``at`` lies, and whether it exists: among the step's rows from
    ``start`` on (``new`` is the first), in open pages from ``base`` on, in the anchor's tail. The
    tables are the sequence's."""
    exists = True
    if at >= start:
        source = new + (at - start).to(tl.int64) * new_row
    elif at >= base:
        frame = tl.load(open_pages + at // PAGE).to(tl.int64)
        source = pages + frame * page_frame + (at % PAGE) * width
    else:
        cell = places + (at - base + (TAPS - 1)) * 2
        frame = tl.load(anchor_frames + tl.load(cell)).to(tl.int64)
        exists = frame >= 0
        source = memory + frame * memory_frame + tl.multiple_of(tl.load(cell + 1), 8)
    return source, exists


@triton.jit(do_not_specialize=["page_entries"])
def _kda_inputs(
    new, gate, strength, pages, gate_pages, strength_pages, memory, places, weight, bias, rate,
    q, k, v, g, beta,
    row_sequence, row_position, first, row, anchor, open_pages, anchor_frames, floor,
    page_entries, new_row, gate_row, strength_row, page_frame, memory_frame,
    eps, scale, lowest, heads,
    ANCHOR_FRAMES: tl.constexpr, PAGE: tl.constexpr, TAPS: tl.constexpr, DIM: tl.constexpr,
    HEADS: tl.constexpr, BOUNDED: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """Grid: (rows, blocks of heads)."""
    output = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    at = head[:, None] * DIM + tl.arange(0, DIM)[None, :]
    inside = head[:, None] < heads
    width = heads * DIM
    sequence = tl.load(row_sequence + output).to(tl.int64)
    position = tl.load(row_position + output)
    start, base = tl.load(first + sequence), tl.load(anchor + sequence)
    begin = new + tl.load(row + sequence).to(tl.int64) * new_row
    open_pages += sequence * page_entries
    anchor_frames += sequence * ANCHOR_FRAMES
    query = tl.zeros((HEADS, DIM), tl.float32)
    key = tl.zeros((HEADS, DIM), tl.float32)
    value = tl.zeros((HEADS, DIM), tl.float32)
    for tap in tl.static_range(TAPS):
        source, exists = _raw_row(
            position - (TAPS - 1) + tap, start, base, begin, pages, memory, places, open_pages,
            anchor_frames, new_row, page_frame, memory_frame, 3 * width, PAGE, TAPS,
        )  # fmt: skip
        source += at
        factor = weight + tap * 3 * width + at
        taken = inside & exists
        raw = tl.load(source, mask=taken, other=0.0).to(tl.float32)
        query += raw * tl.load(factor, mask=inside, other=0.0)
        raw = tl.load(source + width, mask=taken, other=0.0).to(tl.float32)
        key += raw * tl.load(factor + width, mask=inside, other=0.0)
        raw = tl.load(source + 2 * width, mask=taken, other=0.0).to(tl.float32)
        value += raw * tl.load(factor + 2 * width, mask=inside, other=0.0)
    dtype = q.dtype.element_ty
    query, key = silu(query).to(dtype).to(tl.float32), silu(key).to(dtype).to(tl.float32)
    to = output * width + at
    tl.store(q + to, _unit(query, eps, scale).to(dtype), mask=inside)
    tl.store(k + to, _unit(key, eps, 1.0).to(dtype), mask=inside)
    tl.store(v + to, silu(value).to(dtype), mask=inside)
    raw_gate = tl.load(gate + output * gate_row + at, mask=inside, other=0.0)
    z = raw_gate.to(tl.float32) + tl.load(bias + at, mask=inside, other=0.0)
    speed = tl.load(rate + head, mask=head < heads, other=0.0)[:, None]
    decay = sigmoid(z * speed) * lowest if BOUNDED else softplus(z) * -speed
    tl.store(g + to, decay, mask=inside)
    raw_strength = tl.load(strength + output * strength_row + head, mask=head < heads, other=0.0)
    tl.store(beta + output * heads + head, sigmoid(raw_strength.to(tl.float32)), mask=head < heads)
    if KEPT:
        lowest_kept = tl.load(floor + sequence)
        if position >= lowest_kept:
            frame = tl.load(open_pages + position // PAGE).to(tl.int64)
            place = position % PAGE
            own = new + output * new_row + at
            to_row = pages + frame * page_frame + place * 3 * width + at
            for part in tl.static_range(3):
                copied = tl.load(own + part * width, mask=inside)
                tl.store(to_row + part * width, copied, mask=inside)
            tl.store(gate_pages + frame * page_frame + place * width + at, raw_gate, mask=inside)
            to_strength = strength_pages + frame * page_frame + place * heads + head
            tl.store(to_strength, raw_strength, mask=head < heads)


@dataclass(frozen=True, slots=True)
class Raw:
    """A layer's raw rows, in one dtype: ``r`` [.., 3 H K] before the convolution, gates ``gate``
    [.., H K] and write strengths ``beta`` [.., H]. Of a step [N, ..], of pages [frames, page, ..].
    """

    r: Tensor
    gate: Tensor
    beta: Tensor


def kda_inputs(
    rows: Raw,
    pages: Raw,
    tail: Cells,
    weight: Tensor,
    bias: Tensor,
    rate: Tensor,
    row_sequence: Tensor,
    row_position: Tensor,
    sequences: Sequences,
    *,
    eps: float,
    lowest: float | None,
    floor: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k, v [R, H, K] in the rows' dtype, log decays g [R, H, K] and strengths [R, H] fp32, of R
    rows anywhere at or after their anchors.

    Args:
        rows: ``r`` of all the step's rows, ``gate`` and ``beta`` of the rows wanted. They may be
            strided.
        pages: views into the arena. tail: the rows before each anchor, [taps - 1, 3 H K] as cells
            that start at multiples of eight elements.
        weight: [taps, 3 H K], oldest tap first, bias: [H K], rate: [H], fp32 (the rate's
            exponential taken already).
        row_sequence, row_position: [R] int32, the rows wanted.
        eps: of the norms; q is scaled by K ** -0.5 besides.
        lowest: g = lowest sigmoid(rate (gate + bias)), or None: -rate softplus(gate + bias).
        floor: [S] int32; the step's rows, which must be those wanted, are kept in ``pages`` from
            this position on. None: they are not kept.
    """
    (count, heads), taps = rows.beta.shape, weight.shape[0]
    dim = bias.shape[0] // heads
    _check(rows, pages, tail, weight, heads, dim)
    assert row_sequence.dtype == row_position.dtype == torch.int32
    assert row_sequence.shape == row_position.shape == (count,)
    assert bias.dtype == rate.dtype == torch.float32
    assert sequences.anchor_frames.shape[1] > 0, "the zero state is a frame of -1, not none"
    assert floor is None or (floor.dtype == torch.int32 and rows.r.shape[0] == count)
    shape, dtype = (count, heads, dim), rows.r.dtype
    q, k, v = (torch.empty(shape, dtype=dtype, device=weight.device) for _ in "qkv")
    g = torch.empty(shape, dtype=torch.float32, device=weight.device)
    beta = torch.empty(count, heads, dtype=torch.float32, device=weight.device)
    aligned(*_tensors(rows), *_tensors(pages), tail.memory, weight, bias, rate)
    if count:
        some = min(max(_ELEMENTS // dim, 1), power_of_two(heads))
        _kda_inputs[(count, blocks(heads, some))](
            *_tensors(rows), *_tensors(pages), tail.memory, tail.places, weight, bias, rate,
            q, k, v, g, beta, row_sequence, row_position, sequences.first, sequences.row,
            sequences.anchor, sequences.open_pages, sequences.anchor_frames,
            row_sequence if floor is None else floor, sequences.open_pages.shape[1],
            *(x.stride(0) for x in _tensors(rows)), pages.r.stride(0), tail.memory.stride(0),
            float(eps), dim**-0.5, 0.0 if lowest is None else float(lowest), heads,
            ANCHOR_FRAMES=sequences.anchor_frames.shape[1], PAGE=pages.r.shape[1], TAPS=taps,
            DIM=dim, HEADS=some, BOUNDED=lowest is not None, KEPT=floor is not None,
            num_warps=_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return q, k, v, g, beta


def _tensors(raw: Raw) -> tuple[Tensor, Tensor, Tensor]:
    return raw.r, raw.gate, raw.beta


def _check(rows: Raw, pages: Raw, tail: Cells, weight: Tensor, heads: int, dim: int) -> None:
    assert dim & (dim - 1) == 0, dim
    assert weight.shape[1] % 8 == 0, "a cell starts off the vector grid"
    assert weight.shape[1] == 3 * heads * dim, (weight.shape, heads, dim)
    assert tail.places.shape == (weight.shape[0] - 1, 2), tail.places.shape
    for some, kept, width in zip(
        _tensors(rows), _tensors(pages), (3 * heads * dim, heads * dim, heads), strict=True
    ):
        assert some.shape[1] == kept.shape[2] == kept.stride(1) == width, (some.shape, kept.shape)
        assert some.dtype == kept.dtype == tail.memory.dtype
        # Pages of one group, seen in one dtype.
        assert kept.shape[:2] == pages.r.shape[:2]
        assert kept.stride(0) == pages.r.stride(0)


def conv_naive(rows: Tensor, weight: Tensor) -> Tensor:
    """The convolution's definition for one sequence from its zero state: rows [T, W] -> [T, W]
    fp32."""
    taps = weight.shape[0]
    padded = torch.nn.functional.pad(rows.float(), (0, 0, taps - 1, 0))
    total = sum(padded[i : i + rows.shape[0]] * weight[i] for i in range(taps))
    assert isinstance(total, Tensor)
    return torch.nn.functional.silu(total)
