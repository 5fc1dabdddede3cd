"""``--verify``: every checkpoint's bytes are summed at its seal and at each restore."""

from __future__ import annotations

import math

import pytest

from engine.real import Real, stream, tiny
from merestone.core.checkpoint import Checkpoint
from merestone.core.orders import Digest

PROMPT = stream(150, 3)


def deepest(real: Real, at: int) -> Checkpoint:
    return next(c for c in real.engine.cache.checkpoints() if c.at == at)


def metric(real: Real, name: str) -> float:
    value = real.engine.stats()[name]
    assert isinstance(value, float)
    return value


@pytest.mark.parametrize("where", ["anchor", "full", "open", "hidden"])
@pytest.mark.parametrize("exact", [True, False])
def test_a_changed_byte_is_a_miss_with_a_reason(where: str, exact: bool) -> None:
    real = Real(tiny(), verify=True)
    real.check(PROMPT, real.ask(PROMPT, 3))
    checkpoint, arena = deepest(real, 150), real.engine.device.arena
    match where:
        case "hidden":
            arena.hidden[checkpoint.hidden][0] += 1
        case "anchor":
            run = next(iter(arena.layout.cells.values()))[0]
            arena.memory[checkpoint.anchor_frames[run.frame], run.offset] ^= 1
        case _:
            key = next(key for key, spec in arena.fields.items() if spec.home == where)
            arena.memory[int(checkpoint.pages[where][1][0]), arena.layout.offsets[key]] ^= 1
    tokens = PROMPT if exact else PROMPT + stream(9, 4)
    end = real.check(tokens, real.ask(tokens, 4))
    assert (end.cache.restored, end.cache.lost) == (0, "checksum")
    assert metric(real, "states_changed") == 1
    again = real.check(tokens, real.ask(tokens, 4))
    assert again.cache.restored == len(tokens)
    assert metric(real, "states_changed") == 1


def test_what_is_no_number_is_refused_at_the_restore() -> None:
    """In a row that the layers would read only later: the digest looks at all of them."""
    real = Real(tiny(), verify=True)
    real.check(PROMPT, real.ask(PROMPT, 3))
    arena = real.engine.device.arena
    key = next(key for key, spec in arena.fields.items() if spec.name == "latent")
    arena.rows(*key)[int(deepest(real, 150).pages["full"][1][0]), 0] = math.nan
    end = real.check(PROMPT, real.ask(PROMPT, 1))
    assert (end.cache.restored, end.cache.lost) == (0, "not_finite")
    assert metric(real, "states_not_finite") == 1


def test_nothing_changes_where_nothing_changed() -> None:
    """Turns, forks, choices and evictions: what was sealed is what is restored."""
    real = Real(tiny(), verify=True, frames=260)
    history = stream(70, 1)
    for turn in range(4):
        end = real.check(history, reply := real.ask(history, 12, n=2), 0)
        history = history + tuple(reply.ids(0)) + stream(9, 5 + turn)
        real.ask(stream(90, 20 + turn), 2)
    assert end.cache.restored > 70
    assert metric(real, "states_changed") == 0 == metric(real, "states_not_finite")
    assert all(len(c.digest) == 1 for c in real.engine.cache.checkpoints())


def test_a_request_without_rows_in_the_step_of_its_restore() -> None:
    real = Real(tiny(), verify=True, token_budget=16, max_running=2)
    real.check(PROMPT, real.ask(PROMPT, 1))
    arena = real.engine.device.arena
    arena.hidden[deepest(real, 150).hidden][0] += 1
    mate = real.send(stream(200, 9), 2)
    real.step()
    tokens = PROMPT + stream(9, 4)
    late = real.send(tokens, 3)
    real.drain()
    assert real.check(tokens, late).cache.lost == "checksum"
    real.check(stream(200, 9), mate)


def test_without_the_option_nothing_is_summed() -> None:
    real = Real(tiny())
    plans = []
    run = real.engine.device.run
    real.engine.device.run = lambda plan: plans.append(plan) or run(plan)
    real.check(PROMPT, real.ask(PROMPT, 2))
    assert not any(isinstance(order, Digest) for plan in plans for order in plan.stores)
