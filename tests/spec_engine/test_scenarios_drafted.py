"""The restore contract's scenarios once more, with drafts: they do not change what is reused."""

from __future__ import annotations

import inspect

import pytest

import engine.harness
import engine.test_scenarios as scenarios
from fake_device import FakeDevice, small_spec

ROWS_COUNTED = {
    "test_n_choices_fork_from_the_prompt_boundary",
    "test_decodes_go_on_beside_a_long_prefill",
    "test_priority_takes_a_slot_by_a_seal",
}
"""They count rows or steps, which drafts do change."""

CASES = [
    pytest.param(function, values, id=f"{name}{list(values)}")
    for name, function in inspect.getmembers(scenarios, inspect.isfunction)
    if name.startswith("test_") and name not in ROWS_COUNTED
    for mark in [next((m for m in getattr(function, "pytestmark", []) if m.args), None)]
    for values in (((value,) for value in mark.args[1]) if mark else [()])
]


@pytest.mark.parametrize(("scenario", "values"), CASES)
@pytest.mark.parametrize(("drafts", "accuracy"), [(1, 1.0), (3, 0.6)])
def test_drafted(scenario, values, drafts: int, accuracy: float, monkeypatch) -> None:
    def spec(frames: int = 64, **sizes):
        # Two more groups.
        return small_spec(3 * frames, drafts=drafts, **sizes)

    for module in (scenarios, engine.harness):
        monkeypatch.setattr(module, "small_spec", spec)
    monkeypatch.setattr(engine.harness, "FakeDevice", lambda s, _: FakeDevice(s, accuracy))
    scenario(*values)
