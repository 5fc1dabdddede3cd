"""The host waits once a step, where it lands: launching one, seals and restores included, does not
wait for anything that runs on the device."""

from __future__ import annotations

import pytest
import torch

from engine.real import stream
from gpu.machine import GpuReal, tiny
from gpu.test_speculation import bundled
from merestone.device.gpu_drafting import GpuMtpDrafter
from merestone.models.glm5_next_mtp import GROUP
from merestone.sched.plan import SamplingParams
from merestone.spec.interface import DraftGroup

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]

DRAWN = SamplingParams(temperature=0.9, top_p=0.9, seed=5)


def watched(real: GpuReal) -> list[tuple[int, int, int]]:
    """Let every wait inside a launch be an error. What is returned counts for each plan its copies
    before the rows and seals behind them, and its rows."""
    runner, plans = real.engine.device, []
    launch = runner.launch

    def strict(plan):
        torch.cuda.set_sync_debug_mode("error")
        try:
            landing = launch(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        rows = sum(work.end - work.start for work in plan.works)
        plans.append((len(plan.before), len(plan.saves) + len(plan.after), rows))
        return landing

    runner.launch = strict
    return plans


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("drafts", [0, 3])
def test_no_launch_waits(drafts: int, graphs: bool) -> None:
    """Prefills, decoding, a replay, a turn from inside a chunk, drawn and greedy, two at once."""
    options = {"frames": 4000, "max_running": 2, "token_budget": 256, "graphs": graphs}
    if drafts:
        model, layer = bundled(torch.bfloat16)
        groups = (DraftGroup(GROUP, multiple=model.pool, dealt=True),)
        real = GpuReal(model, GpuMtpDrafter(layer, drafts, groups), **options)
    else:
        real = GpuReal(tiny("bfloat16", family="bundled"), **options)
    plans = watched(real)
    head = tuple(token % 3000 for token in stream(300, 4))
    for params in (SamplingParams(), DRAWN):
        first = real.ask(head, 20, params=params)
        turn = (*head, *first.ids(), 9, 8)
        replies = [real.send(ids, 20, params=params) for ids in (head, turn)]
        real.drain()
        assert [reply.restored for reply in replies] == [300, 319]
    copies, seals, rows = (sum(plan[part] for plan in plans) for part in range(3))
    assert copies > 0
    assert seals > 4
    assert rows > 300
