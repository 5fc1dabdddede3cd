"""Ranks that fail, die or freeze: every request ends, nothing poisoned is found, nobody is left.

Real processes with the device double, so that a start takes a fraction of a second.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace

import pytest
import zmq

from fake_device import VOCAB, oracle
from merestone.engine.device import DeviceLost
from merestone.engine.facts import Facts
from merestone.engine.ranks import device as ranks_device
from merestone.engine.ranks.device import Ranks, hold
from merestone.engine.ranks.messages import FromRank, RankOptions
from merestone.engine.ranks.node import keep_ranks
from merestone.sched.plan import StepPlan, StepResult
from processes.ranked import COMMAND, LONG_S, Ranked, eventually

PROMPT = [i % VOCAB for i in range(100)]
SILENCE_S = 6.0
"""Where a silence is to be noticed: more than a busy machine lets a healthy rank wait."""
BOUND_S = 60.0
"""The longest that anything may take after a fault, with that silence, on a machine that is busy
with other things: most of it is the start of processes."""


def alive(pid: int) -> bool:
    """Whether a process still runs (one that has ended, but was not waited for, does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # it ended before, or while it was read
        return False


def gone(pids: list[int], seconds: float) -> bool:
    until = time.monotonic() + seconds
    while any(alive(pid) for pid in pids):
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def test_ranks_obey_the_plans_of_one_engine(tmp_path: Path) -> None:
    with Ranked(tmp_path, tp=4) as r:
        first = r.ask(PROMPT)
        assert first.ids() == oracle(PROMPT, 8)
        assert r.ask(PROMPT).restored == len(PROMPT)
        longer = [*PROMPT, *first.ids(), 1, 2]
        assert r.ask(longer).restored == len(PROMPT) + 7
        many = [r.send([k, *PROMPT], 12) for k in range(8)]
        for k, reply in enumerate(many):
            reply.wait()
            assert reply.ids() == oracle([k, *PROMPT], 12)
        health = r.engine.health()
        assert (health["status"], health["tp"]) == ("ok", 4)
        pids = list(r.pids().values())
    assert gone(pids, 0)


@pytest.mark.parametrize("fault", ["fail", "fail-in-seal"])
def test_a_step_that_fails_on_one_rank_fails_on_all(tmp_path: Path, fault: str) -> None:
    with Ranked(tmp_path) as r:
        r.ask([1, *PROMPT])
        r.strike(1, fault)
        end = r.ask(PROMPT).wait()
        assert end.reason == "error"
        assert end.error is not None
        assert end.error.startswith("a step failed: StepFailed: rank 1: RuntimeError: injected")
        r.audit()
        again = r.ask(PROMPT)
        assert (again.restored, again.ids()) == (0, oracle(PROMPT, 8))
        kept = r.ask([1, *PROMPT])
        assert (kept.restored, kept.ids()) == (101, oracle([1, *PROMPT], 8))
        assert r.engine.health()["sessions"] == 1


def test_a_part_that_is_not_finite_on_one_rank_is_not_published(tmp_path: Path) -> None:
    with Ranked(tmp_path) as r:
        r.strike(1, "bad-seal")
        assert r.ask(PROMPT).ids() == oracle(PROMPT, 8)
        again = r.ask(PROMPT)
        assert again.ids() == oracle(PROMPT, 8)
        assert again.restored == 0


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("kill-in-prefill", "was ended by SIGKILL"),
        ("kill-in-decode", "was ended by SIGKILL"),
        ("kill-in-seal", "was ended by SIGKILL"),
        ("freeze-in-step", "was silent for 6 s"),
        ("fail-before-collective", "injected, between two collectives"),
        ("other-token", "ranks 0 and 1 disagree about slot"),
    ],
)
def test_a_lost_rank_ends_running_requests_and_the_engine(
    tmp_path: Path, fault: str, says: str
) -> None:
    with Ranked(tmp_path, silence_s=SILENCE_S) as r:
        assert r.ask([1, *PROMPT]).restored == 0
        pids = list(r.pids().values())
        r.strike(1, fault)
        begun = time.monotonic()
        replies = r.send_all(([k, *PROMPT] for k in range(6)), 40)  # more than run at once
        for reply in replies:
            end = reply.wait(BOUND_S)
            assert end.reason == "error"
            assert end.error is not None
            assert says in end.error
            assert reply.status == "lost"  # whoever is told an error may ask at once
        health = r.until("lost", BOUND_S)
        assert time.monotonic() - begun < BOUND_S
        assert says in str(health["reason"])
        assert gone(pids, BOUND_S)


@pytest.mark.parametrize(
    "fault", ["kill-in-prefill", "kill-in-decode", "kill-in-seal", "freeze-in-step"]
)
def test_ranks_begin_anew_with_an_empty_cache(tmp_path: Path, fault: str) -> None:
    with Ranked(tmp_path, on_loss="restart", silence_s=SILENCE_S) as r:
        r.ask([1, *PROMPT])
        old = list(r.pids().values())
        r.strike(1, fault)
        replies = r.send_all(([k, *PROMPT] for k in range(6)), 40)
        for k, reply in enumerate(replies):
            end = reply.wait(2 * BOUND_S)
            if end.reason == "error":
                assert "rank 1" in str(end.error)
                assert reply.status == "restarting"
            else:  # it waited for its turn, which came after the loss
                assert reply.ids() == oracle([k, *PROMPT], 40)
        assert replies[0].wait().reason == "error"
        assert replies[5].wait().reason == "length"
        r.until_back(1, BOUND_S)
        r.audit()
        assert gone(old, 0)
        fresh = r.ask([1, 2, *PROMPT])
        assert (fresh.restored, fresh.ids()) == (0, oracle([1, 2, *PROMPT], 8))
        assert r.ask([1, 2, *PROMPT]).restored == 102
        assert r.engine.health()["sessions"] == 2


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_lost_while_idle(tmp_path: Path, sent: signal.Signals) -> None:
    with Ranked(tmp_path, on_loss="restart", silence_s=SILENCE_S) as r:
        r.ask(PROMPT)
        os.kill(r.pids()[0], sent)
        r.until_back(1, BOUND_S)
        again = r.ask(PROMPT)
        assert (again.restored, again.ids()) == (0, oracle(PROMPT, 8))


@pytest.fixture
def _over_for_rank_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time is over as soon as rank 0 has done its part, which takes what it takes."""
    receive = Ranks._receive

    def hurried(self: Ranks, until: float, failing: str, came: Collection[int]) -> FromRank:
        assert until <= time.monotonic() + LONG_S
        hangs = failing != "did not report" and 0 in came
        return receive(self, 0.0 if hangs else until, failing, came)

    monkeypatch.setattr(Ranks, "_receive", hurried)


@pytest.mark.usefixtures("_over_for_rank_1")
def test_a_step_that_takes_too_long_is_a_loss(tmp_path: Path) -> None:
    with Ranked(tmp_path) as r:
        r.strike(1, "hang-in-step")
        end = r.ask(PROMPT).wait(BOUND_S)
        assert "rank 1 did not finish step" in str(end.error)
        r.until("lost", BOUND_S)


def test_a_restart_that_fails_is_the_end(tmp_path: Path) -> None:
    with Ranked(tmp_path, on_loss="restart") as r:
        r.ask(PROMPT)
        r.strike(0, "crash-at-start")
        os.kill(r.pids()[1], signal.SIGKILL)
        health = r.until("lost", BOUND_S)
        assert "could not be started again: rank 0" in str(health["reason"])


@pytest.mark.parametrize(
    ("fault", "error", "says"),
    [
        ("other-version", ValueError, "rank 1 on .* differs from rank 0 on .* in merestone: 0.9"),
        ("refuse", ValueError, "^--memory is too small$"),
        ("fewer-frames", ValueError, "rank 1 differs from rank 0 in frames: 127, not 128"),
        ("crash-at-start", DeviceLost, r"rank 1 \(process .*\) was ended by SIGKILL"),
    ],
)
def test_a_start_that_fails_says_why(
    tmp_path: Path, fault: str, error: type[Exception], says: str
) -> None:
    with Ranked(tmp_path, start=False, start_s=BOUND_S) as r:
        r.strike(1, fault)
        with pytest.raises(error, match=says):
            r.start()
        assert not r.pids()


@pytest.mark.usefixtures("_over_for_rank_1")
def test_a_start_that_takes_too_long_says_who_did(tmp_path: Path) -> None:
    with Ranked(tmp_path, start=False) as r:
        r.strike(1, "hang-at-start")
        with pytest.raises(DeviceLost, match="rank 1 was not ready in time"):
            r.start()
        assert not r.pids()


def test_the_last_words_of_a_rank_count_whenever_they_are_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poll, stood = zmq.Socket.poll, []
    with Ranked(tmp_path, start=False) as r:

        def stands_still(self: zmq.Socket[bytes], *how: int) -> int:
            if self is r.ranks.socket and r.ranks.hellos and not stood:
                stood.append("when nothing had come, until the rank has ended")
                eventually(lambda: r.ranks.watch.lost)
                return 0
            return poll(self, *how)

        monkeypatch.setattr(zmq.Socket, "poll", stands_still)
        r.strike(1, "refuse")
        with pytest.raises(ValueError, match=r"^--memory is too small$"):
            r.start()
        assert stood


def test_results_that_came_while_we_stood_still_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poll, now, stood = zmq.Socket.poll, time.monotonic, []
    clock = SimpleNamespace(monotonic=lambda: now() + 1000 * len(stood), sleep=time.sleep)
    with Ranked(tmp_path, tp=1) as r:

        def stands_still(self: zmq.Socket[bytes], *how: int) -> int:
            if self is r.ranks.socket and not stood:
                stood.append("when nothing had come, for longer than a step may take")
                eventually(lambda: poll(self, 0))  # meanwhile it does
                return 0
            return poll(self, *how)

        monkeypatch.setattr(ranks_device, "time", clock)
        monkeypatch.setattr(zmq.Socket, "poll", stands_still)
        assert r.ask(PROMPT).ids() == oracle(PROMPT, 8)
        assert stood


def test_ranks_come_back_with_the_pool_that_they_had(tmp_path: Path) -> None:
    """A GPU may have a little more or less to spare the second time."""
    with Ranked(tmp_path, start=False, on_loss="restart") as r:
        for rank in (0, 1):
            r.strike(rank, "fewer-frames")
        assert r.ranks.start().frames == 127
        os.kill(r.pids()[1], signal.SIGKILL)
        eventually(lambda: r.ranks.sessions == 2 and r.ranks.up)
        assert r.ranks.facts is not None
        assert r.ranks.facts.frames == 127
        r.ranks.listen(lambda *_: None, lambda _: None)
        assert r.ranks.run(StepPlan(1)).step == 1  # whoever listens now has planned for no others


def test_another_machine_starts_its_ranks_again_too(tmp_path: Path) -> None:
    """It may do so before node 0 has noticed anything; what it says then is said again."""
    held = hold("127.0.0.1")
    master = f"127.0.0.1:{held.getsockname()[1]}"
    shared = {"nodes": 2, "master": master, "on_loss": "restart", "silence_s": SILENCE_S}
    theirs = RankOptions(tp=2, node=1, **shared)
    ended: list[str | None] = []
    lender = threading.Thread(
        target=lambda: ended.append(keep_ranks(theirs, tmp_path, b"{}", command=COMMAND))
    )
    lender.start()
    with Ranked(tmp_path, **shared) as r:
        assert r.ask(PROMPT).ids() == oracle(PROMPT, 8)
        os.kill(r.ranks.hellos[1].process, signal.SIGKILL)
        r.until_back(1, BOUND_S)
        again = r.ask(PROMPT)
        assert (again.restored, again.ids()) == (0, oracle(PROMPT, 8))
    lender.join(BOUND_S)
    assert ended == [None]
    held.close()


def test_a_loss_before_anybody_listens_is_told_to_who_does(tmp_path: Path) -> None:
    said: list[str] = []
    with Ranked(tmp_path, start=False) as r:
        r.ranks.start()
        os.kill(r.pids()[1], signal.SIGKILL)
        eventually(lambda: r.ranks.told)
        r.ranks.listen(lambda reason, _: said.append(reason), lambda _: said.append("back"))
    assert len(said) == 1
    assert "rank 1" in said[0]


def test_a_plan_for_ranks_that_are_gone_is_not_sent_to_their_successors(tmp_path: Path) -> None:
    """It is about to be sent when the ranks are lost, and still is when others have come."""
    with Ranked(tmp_path, on_loss="restart") as r:
        r.ask(PROMPT)
        r.strike(0, "nothing")  # at rest
        run = r.ranks.run

        def stands_still(plan: StepPlan) -> StepResult:
            if r.ranks.sessions == 1:
                os.kill(r.pids()[1], signal.SIGKILL)
                eventually(lambda: r.ranks.sessions == 2 and r.ranks.up)
            return run(plan)

        r.ranks.run = stands_still  # type: ignore[method-assign]
        end = r.ask(PROMPT).wait()
        assert (end.reason, "was ended by SIGKILL" in str(end.error)) == ("error", True)
        r.until_back(1, BOUND_S)
        assert r.engine.stats()["failed_steps"] == 0
        again = r.ask(PROMPT)
        assert (again.restored, again.ids()) == (0, oracle(PROMPT, 8))


def test_a_plan_that_comes_while_ranks_begin_anew_is_told_why_they_do(tmp_path: Path) -> None:
    """The engine may have been about to send it when they were lost."""
    with Ranked(tmp_path, start=False, on_loss="restart") as r:
        r.ranks.start()
        r.strike(0, "hang-at-start")
        os.kill(r.pids()[1], signal.SIGKILL)
        eventually(lambda: r.ranks.sessions == 2 and r.ranks.watch.lost is None)
        with pytest.raises(DeviceLost, match=r"rank 1 .* was ended by SIGKILL") as lost:
            r.ranks.run(StepPlan(1))
        assert lost.value.returns


@pytest.mark.parametrize("late", [False, True])
def test_ranks_lost_again_before_they_are_said_to_be_back(tmp_path: Path, late: bool) -> None:
    """Whoever is told of a return last would plan for ranks that are gone. ``late``: the first
    return is about to be said when the second loss is over, too."""
    said: list[str] = []
    with Ranked(tmp_path, start=False, on_loss="restart") as r:
        start = r.ranks.start
        start()
        r.ranks.listen(lambda *_: said.append("lost"), lambda _: said.append("back"))

        def struck_again() -> Facts:
            facts = start()
            if len(said) == 1:
                os.kill(r.pids()[1], signal.SIGKILL)
                eventually(lambda: len(said) == 2)
                eventually(lambda: not late or (r.ranks.sessions == 3 and r.ranks.up))
            return facts

        r.ranks.start = struck_again  # type: ignore[method-assign]
        os.kill(r.pids()[1], signal.SIGKILL)
        eventually(lambda: r.ranks.sessions == 3 and r.ranks.up)
        for thread in threading.enumerate():
            if thread.name == "merestone-anew":
                thread.join(BOUND_S)
        assert said == ["lost", "lost", "back"]


STARTER = """
import sys, threading
from pathlib import Path
from processes.ranked import Ranked
print(*Ranked(Path(sys.argv[1])).pids().values(), flush=True)
threading.Event().wait()
"""


def test_ranks_end_with_whoever_started_them(tmp_path: Path) -> None:
    """No orphans, also after kill -9 of the deciding process."""
    path = os.pathsep.join(sys.path)
    child = subprocess.Popen(
        [sys.executable, "-c", STARTER, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    )
    with child:
        assert child.stdout is not None
        pids = [int(pid) for pid in child.stdout.readline().split()]
        child.kill()
    assert len(pids) == 2
    assert gone(pids, BOUND_S)
