"""The device path against the CPU, and warm = cold: under the interpreter a thin thread of it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from engine.real import stream
from gpu.machine import DEVICE, GpuReal
from layers.test_glm5_next import CONFIG, build
from layers.test_kimi_linear_rows import CONFIG as KIMI
from layers.test_kimi_linear_rows import build as build_kimi
from merestone.device import gpu_tables
from merestone.engine.api import TokenEvent
from merestone.layers.gpu import mla
from merestone.models.gpu import on_gpu
from merestone.ops.triton import attention, attention_wide
from models.plain_loop import PlainLoop

LAYERS = {
    "num_layers": 2,
    "layer_types": ("kda", "mla"),
    "mlp_types": ("dense", "moe"),
    "vocab_size": 64,
}
SPARSE = dataclasses.replace(CONFIG, indexer_types=("full",) * 2, index_topk=8, **LAYERS)
DENSE = dataclasses.replace(SPARSE, gate_lower_bound=None, index_topk=512)
KIMI = dataclasses.replace(KIMI, qk_rope_head_dim=32, **LAYERS)
CASES = {
    "sparse": lambda: build(SPARSE),
    "softplus": lambda: build(DENSE),
    "kimi": lambda: build_kimi(KIMI),
}


def prompt(count: int, key: int) -> tuple[int, ...]:
    return tuple(token % 64 for token in stream(count, key))


@pytest.mark.parametrize(
    ("case", "length"),
    [
        ("sparse", 14),
        ("kimi", 9),
        *(pytest.param(case, 200, marks=pytest.mark.gpu) for case in CASES),
    ],
)
def test_the_cpus_answer_cold_and_restored(case: str, length: int) -> None:
    """Greedy tokens and their log probabilities, in fp32; a replay and a continuation beside a
    mate have the bits of the cold answer."""
    model = CASES[case]()
    ids = prompt(length, 3)
    expected = PlainLoop(model).generate(list(ids), 2)
    real = GpuReal(on_gpu(model, DEVICE), frames=300, max_running=2, token_budget=256)
    cold = real.ask(ids, 2)
    for (token, entry), wanted, row in zip(answer(cold), *expected, strict=True):
        assert token == wanted
        logs = row.double().log_softmax(0)
        for other, value in entry.top:
            torch.testing.assert_close(value, float(logs[other]), rtol=1e-3, atol=1e-3)
    replies = [real.send(ids, 2), real.send(prompt(3, 7), 1)]
    real.drain()
    assert replies[0].restored == length
    assert answer(replies[0]) == answer(cold)


def test_many_rows_and_few_have_the_same_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefills by wide items, decoding by narrow ones, and no wide ones at all."""
    for name, value in (("TILE", 16), ("SPAN", 32)):
        monkeypatch.setattr(attention, name, value)
    monkeypatch.setattr(gpu_tables, "SPLIT_ROWS", 4)
    model, widths = on_gpu(CASES["kimi"](), DEVICE), []

    def counted(*args, **options):
        widths.append(args[0].shape[0])
        return attention_wide.attend_wide(*args, **options)

    monkeypatch.setattr(mla, "attend_wide", counted)
    answers = []
    for fit in (False, True):
        monkeypatch.setattr(mla, "fits", lambda pages, fit=fit: fit)
        real = GpuReal(model, frames=300, max_running=2, token_budget=256)
        answers.append(answer(real.ask(prompt(19, 3), 2)))
        assert widths == [19] * fit
    assert answers[0] == answers[1]


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_a_long_pass_from_inside_a_chunk(case: str) -> None:
    """A boundary inside a chunk, continued by a pass of more than two chunks."""
    model = on_gpu(CASES[case](), DEVICE)
    head, tail = prompt(75, 5), prompt(190, 6)
    cold = GpuReal(model, frames=800, max_running=2, token_budget=320).ask(head + tail, 2)
    real = GpuReal(model, frames=800, max_running=2, token_budget=320)
    real.ask(head, 2)
    replies = [real.send(head + tail, 2), real.send(prompt(9, 7), 3)]
    real.drain()
    assert replies[0].restored == 75
    assert answer(replies[0]) == answer(cold)


def answer(reply) -> list:
    return [(e.token, e.logprob) for e in reply.events if isinstance(e, TokenEvent)]
