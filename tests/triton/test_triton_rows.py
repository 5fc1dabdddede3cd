"""Row invariance of every operator: a row has its bits alone, in any order, beside any mates.

One table of operators (`row_cases.py`), one property. What keeps state, or moves bytes only, has a
test of its own: the last test sees to it that no operator is without one.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from row_cases import FAMILIES, ROWS, Case, tokens
from torch import Tensor

import merestone.ops.triton as package

CUDA = torch.cuda.is_available()
# The interpreter truncates where it should round to bf16.
HALF = torch.bfloat16 if CUDA else torch.float16

ELSEWHERE = {
    "kda": "test_triton_kda.py::test_decode_is_prefill",
    "Copier": "test_triton_copy.py::test_many_orders_of_all_kinds",
    "write_pools": "test_triton_index.py::test_pools_from_anywhere",
    "write_ring": "test_triton_pages.py::test_hidden_rows_since_the_anchor_go_to_their_slots_rings",
    "write_tail": (
        "test_triton_pages.py::test_the_tail_before_an_anchor_comes_from_pages_and_new_rows"
    ),
    "set_entries": "test_triton_pages.py::test_entries_of_tables",
    "feed": "test_triton_pages.py::test_fed_ids_are_ids",
    "bad_anchors": "test_triton_judge.py::test_one_cell_spoils_its_anchor_alone",
    "wide_product": "test_triton_gemm.py::test_the_copy_engine_changes_no_bits",
}
"""Operators whose rows are not independent inputs, by the test that shows their bits."""


def spoiled(case: Case, rows: list[int]) -> tuple[Tensor, ...]:
    """All others' floating-point inputs are NaN."""
    others = [row for row in range(ROWS) if row not in rows]
    given = []
    for tensor in case.given:
        hurt = tensor.clone()
        if hurt.is_floating_point():
            hurt[others] = float("nan")
        given.append(hurt)
    return tuple(given)


def check(case: Case, source: torch.Generator) -> None:
    def some(count: int) -> list[int]:
        return torch.randperm(ROWS, generator=source)[:count].tolist()

    every = list(range(ROWS))
    expected = case.at(every)
    assert all(one.shape[0] == ROWS for one in expected)

    def same(found: tuple[Tensor, ...], rows: list[int]) -> None:
        for one, wanted in zip(found, expected, strict=True):
            assert torch.equal(one, wanted[rows]), rows

    cut, few = int(torch.randint(1, ROWS, (), generator=source)), some(6)
    # Alone, a few in another order and twice, and a part of any size.
    for rows in (some(1), few + few, every[cut:]):
        same(case.at(rows), rows)
    rows = some(5)
    found = case.at(every, spoiled(case, rows))
    same(tuple(one[rows] for one in found), rows)


# The interpreter's maxima, of mates that are not numbers.
@pytest.mark.filterwarnings("ignore:All-NaN:RuntimeWarning", "ignore:invalid:RuntimeWarning")
@pytest.mark.usefixtures("ordered_dot", "short_spans")
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        pytest.param(family, dtype, id=f"{family.__name__}-{name}")
        for family in FAMILIES
        for name, dtype in (("single", torch.float32), ("half", HALF))
        # One of them under the interpreter, to which it makes no difference.
        if (name == "single") == (family is tokens) or (CUDA and family is not tokens)
    ],
)
def test_a_row_is_its_own(draw, device: str, family: Callable, dtype: torch.dtype) -> None:
    source = torch.Generator().manual_seed(len(family.__name__))
    torch.manual_seed(0)
    for number, case in enumerate(family(draw, device, dtype)):
        try:
            check(case, source)
        except AssertionError as error:
            names = ", ".join(one.__name__ for one in case.of)
            raise AssertionError(f"{names}, case {number}: {error}") from error


# Definitions, arithmetic of sizes, and what the operators are made of.
NOT_OPERATORS = {
    "attend_naive", "conv_naive", "copy_naive", "linear_naive",
    "aligned", "blocks", "power_of_two", "fits", "outputs", "open_rows_shapes", "shape_of",
    "wide_tile", "segments", "tile_for",
}  # fmt: skip


def test_no_operator_is_without_a_test(draw, device: str) -> None:
    shown = {one.__name__ for f in FAMILIES for case in f(draw, device, HALF) for one in case.of}
    found = {"Copier"}
    for module in pkgutil.iter_modules(package.__path__):
        name = f"{package.__name__}.{module.name}"
        for function in vars(importlib.import_module(name)).values():
            if inspect.isfunction(function) and function.__module__ == name:
                found.add(function.__name__)
    found = {name for name in found if not name.startswith("_")} - NOT_OPERATORS
    assert found == shown | ELSEWHERE.keys()
    for place in ELSEWHERE.values():
        file, test = place.split("::")
        assert f"def {test}(" in (Path(__file__).parent / file).read_text(), place
