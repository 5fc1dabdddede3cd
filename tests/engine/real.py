"""An engine over a real tiny model, stepped by hand, and its oracle."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import torch

from engine.harness import Reply
from merestone.core.audit import audit
from merestone.engine.api import Finished, GenerateRequest, TokenEvent
from merestone.engine.build import EngineOptions, assemble
from merestone.engine.engine import LocalEngine
from merestone.models.interface import Model
from merestone.models.loader import load_model
from merestone.models.tiny import write_tiny
from merestone.parallel.world import SINGLE, World
from merestone.sched.plan import SamplingParams
from merestone.spec.interface import Drafter
from models.plain_loop import PlainLoop


@cache
def tiny(dtype: str = "float32", index_topk: int = 512) -> Model:
    directory = Path(mkdtemp(prefix="merestone-tests-"))
    write_tiny(directory, index_topk=index_topk)
    return load_model(directory, getattr(torch, dtype), None)


@cache
def cold(model: Model, tokens: tuple[int, ...], count: int):
    """(ids, logits) of the plain loop."""
    return PlainLoop(model).generate(list(tokens), count)


def stream(count: int, key: int) -> tuple[int, ...]:
    """T(count, key) of `cases.md`: different keys share no first token."""
    generator = torch.Generator().manual_seed(key)
    rest = torch.randint(0, 256, (count - 1,), generator=generator).tolist()
    return (key % 256, *rest)


class Real:
    """``send`` queues, ``drain`` runs to rest with the audit after every step."""

    def __init__(
        self, model: Model, drafter: Drafter | None = None, world: World = SINGLE, **options
    ) -> None:
        options.setdefault("frames", 600)
        options.setdefault("poison", True)
        options = EngineOptions(**options)
        self.engine: LocalEngine = assemble(model, options, "tiny", drafter, world=world)
        self.model = model
        self.world = world
        self.count = 0
        self.segments = 0
        forward = model.forward

        def counted(batch, state):
            self.segments += len(batch.segments)
            return forward(batch, state)

        # The hook that counts layer passes: an exact hit must not reach it.
        self.engine.device.model = _Hooked(model, counted)

    def send(self, tokens, max_tokens=8, **options) -> Reply:
        self.count += 1
        reply = Reply()
        options.setdefault("params", SamplingParams(logprobs=5))
        name = options.pop("id", f"q{self.count}")
        request = GenerateRequest(name, tuple(tokens), max_tokens=max_tokens, **options)
        self.engine.submit(request, reply.sink)
        return reply

    def step(self) -> None:
        self.engine.take()
        self.engine.step()
        audit(self.engine.cache, [seq.lease for seq in self.engine.scheduler.running])

    def drain(self) -> None:
        while self.engine.scheduler.busy or self.engine.inbox:
            self.step()

    def ask(self, tokens, max_tokens=8, **options) -> Reply:
        reply = self.send(tokens, max_tokens, **options)
        self.drain()
        return reply

    def check(self, tokens, reply: Reply, choice: int = 0) -> Finished:
        """Ids and top-5 log probabilities are those of the plain loop, bit for bit."""
        end = reply.finished(choice)
        assert end is not None
        assert end.reason in ("length", "stop"), end
        events = [e for e in reply.events if isinstance(e, TokenEvent) and e.choice == choice]
        ids, logits = cold(self.model, tuple(tokens), len(events))
        assert [e.token for e in events] == list(ids)
        for event, row in zip(events, logits, strict=True):
            wanted = oracle_logprobs(row, event.token)
            assert event.logprob is not None
            assert (event.logprob.logprob, event.logprob.top) == wanted
        return end


class _Hooked:
    """A model whose forward is counted."""

    def __init__(self, model: Model, forward) -> None:
        self.info, self.forward, self.logits, self.fields = (
            model.info, forward, model.logits, model.fields,
        )  # fmt: skip


def oracle_logprobs(row: torch.Tensor, token: int, top: int = 5):
    """Log softmax in double, ties to the lowest id: written apart from the sampler."""
    shifted = (row - row.max()).double()
    logs = shifted - shifted.exp().sum().log()
    order = sorted(range(len(row)), key=lambda i: (-float(row[i]), i))[:top]
    return float(logs[token]), tuple((i, float(logs[i])) for i in order)
