"""An engine over the processes of several ranks that run the device double."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from engine.harness import Reply
from fake_device import VOCAB
from merestone.core.audit import audit
from merestone.core.cache import Cache
from merestone.engine.api import EngineInfo, Finished, GenerateRequest
from merestone.engine.engine import LocalEngine
from merestone.engine.ranks.device import Ranks
from merestone.engine.ranks.messages import RankOptions
from merestone.sched.plan import SamplingParams
from merestone.sched.scheduler import Scheduler
from processes.fake_rank import SPEC

LONG_S = 120.0
"""How long to wait for what takes a second, or ten to start, on a machine that has other work."""
COMMAND = (sys.executable, str(Path(__file__).with_name("fake_rank.py")))


class Waiting(Reply):
    """A reply that can be waited for."""

    def __init__(self, engine: LocalEngine) -> None:
        super().__init__()
        self.engine = engine
        self.ended = threading.Event()
        self.status = ""
        """The word of ``/health`` at the moment of the end."""

    def sink(self, events) -> None:
        super().sink(events)
        if any(isinstance(event, Finished) for event in events):
            self.status = str(self.engine.health()["status"])
            self.ended.set()

    def wait(self, seconds: float = LONG_S) -> Finished:
        assert self.ended.wait(seconds), "a request hangs"
        end = self.finished()
        assert end is not None
        return end


class Ranked:
    """Engine, ranks and faults; a context that starts and stops them."""

    def __init__(self, directory: Path, tp: int = 2, start: bool = True, **options) -> None:
        self.directory = directory
        options = {"step_s": LONG_S, "start_s": LONG_S, **options}
        self.ranks = Ranks(RankOptions(tp=tp, **options), directory, b"{}", command=COMMAND)
        self.count = 0
        if start:
            self.start()

    def start(self) -> None:
        facts = self.ranks.start()
        self.cache = Cache(SPEC)
        self.scheduler = Scheduler(self.cache, slots=4, token_budget=32)
        info = EngineInfo("fake", 400, VOCAB, (), "boundaries")
        assert facts.frames == SPEC.frames
        self.engine = LocalEngine(info, self.cache, self.scheduler, self.ranks)
        self.engine.attendant = self.ranks
        self.ranks.listen(self.engine.device_lost, self.engine.device_back)
        self.engine.start()

    def __enter__(self) -> Ranked:
        return self

    def __exit__(self, *_: object) -> None:
        engine = getattr(self, "engine", None)
        if engine is None:
            self.ranks.close()
        else:
            engine.stop()

    def pids(self) -> dict[int, int]:
        processes = self.ranks.processes
        return {} if processes is None else {r: p.pid for r, p in processes.running.items()}

    def strike(self, rank: int, fault: str) -> None:
        """Order a fault, once the last answer's boundary is published and nothing runs."""
        while "engine" in vars(self) and self.engine.ask(lambda: self.scheduler.busy):
            time.sleep(0.005)
        (self.directory / f"{rank}.{fault}").touch()

    def send(self, tokens, max_tokens: int = 8, **options) -> Waiting:
        self.count += 1
        reply = Waiting(self.engine)
        request = GenerateRequest(
            f"r{self.count}", tuple(tokens), SamplingParams(), max_tokens, **options
        )
        self.engine.submit(request, reply.sink)
        return reply

    def ask(self, tokens, max_tokens: int = 8, **options) -> Waiting:
        reply = self.send(tokens, max_tokens, **options)
        reply.wait()
        return reply

    def send_all(self, prompts, max_tokens: int) -> list[Waiting]:
        """Requests that the engine finds together: none comes when it is lost already."""
        with self.engine.wake:
            return [self.send(tokens, max_tokens) for tokens in prompts]

    def audit(self) -> None:
        self.engine.ask(lambda: audit(self.cache, [seq.lease for seq in self.scheduler.running]))

    def until(self, status: str, seconds: float = LONG_S) -> dict[str, object]:
        """Wait for a word of ``/health`` that stays."""
        eventually(lambda: self.engine.health()["status"] == status, seconds)
        return self.engine.health()

    def until_back(self, losses: int, seconds: float) -> None:
        """Wait for so many losses, all told, and the return after the last of them."""
        eventually(lambda: self.engine.stats()["devices_lost"] == losses, seconds)
        self.until("ok", seconds)


def eventually(happens: Callable[[], object], seconds: float = LONG_S) -> None:
    """Wait for it."""
    end = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.01)
