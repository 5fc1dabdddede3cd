"""Engines over the device path, stepped by hand, and their oracle: a cold request, alone."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import torch

from engine.harness import Reply
from engine.real import Real
from merestone.engine.api import Finished, GenerateRequest, TokenEvent
from merestone.engine.build import EngineOptions, engine_over
from merestone.engine.gpu import gpu_rank
from merestone.models.gpu import GpuModel, on_gpu
from merestone.models.loader import load_model
from merestone.models.tiny import write_tiny, write_tiny_kimi
from merestone.sched.plan import SamplingParams

BUNDLED = Path(__file__).parents[2] / "src" / "merestone" / "assets" / "merestone-tiny"
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"


@cache
def tiny(dtype: str = "float32", index_topk: int = 512, family: str = "glm5_next") -> GpuModel:
    """A tiny random model on the device; ``family`` "bundled" is the one that comes along."""
    directory = BUNDLED
    if family != "bundled":
        directory = Path(mkdtemp(prefix="merestone-tests-"))
        if family == "glm5_next":
            write_tiny(directory, index_topk=index_topk)
        else:
            write_tiny_kimi(directory, shared_dim=32)
    return on_gpu(load_model(directory, getattr(torch, dtype), None), DEVICE)


class GpuReal(Real):
    """As :class:`engine.real.Real`, over the device path; answers are compared with a cold run."""

    def __init__(self, model: GpuModel, drafter=None, **options) -> None:
        options.setdefault("frames", 600)
        options.setdefault("poison", True)
        options.setdefault("graphs", False)
        chosen = EngineOptions(**options)
        device = model.world.device if model.world.tp > 1 else DEVICE
        runner, facts = gpu_rank(model, chosen, device, drafter)
        self.engine = engine_over(runner, facts, chosen, "tiny")
        self.model = model
        self.count = 0
        self.segments = 0
        forward = runner.passes.forward

        def counted(works, *fed):
            self.segments += len(works)
            return forward(works, *fed)

        runner.passes.forward = counted

    def step(self) -> None:
        """The audit walks over all frames: of long runs it sees one step in sixteen."""
        if self.engine.scheduler.step % 16 == 0:
            super().step()
        else:
            self.engine.take()
            self.engine.step()

    def check(self, tokens, reply: Reply, choice: int = 0) -> Finished:
        end = reply.finished(choice)
        assert end is not None
        assert end.reason in ("length", "stop"), end
        events = [e for e in reply.events if isinstance(e, TokenEvent) and e.choice == choice]
        wanted = cold(self.model, tuple(tokens), len(events))
        assert [(e.token, e.logprob) for e in events] == wanted
        return end


@cache
def _alone(model: GpuModel) -> GpuReal:
    """One request at a time, no graphs, the largest passes."""
    page = 128
    return GpuReal(model, frames=page * 60, max_running=1, token_budget=4096)


_COLD: dict[tuple[GpuModel, tuple[int, ...]], list] = {}


def cold(model: GpuModel, tokens: tuple[int, ...], count: int) -> list:
    """(id, log probabilities) of the first ``count`` greedy tokens, nothing restored."""
    known = _COLD.get((model, tokens), [])
    if len(known) < count:
        alone = _alone(model)
        params = SamplingParams(logprobs=5)
        reply = alone.ask(tokens, count, params=params, cache=False)
        assert reply.restored == 0
        known = [(e.token, e.logprob) for e in reply.events if isinstance(e, TokenEvent)]
        assert len(known) == count
        _COLD[model, tokens] = known
    return known[:count]


def request(name: str, tokens, count: int, **options) -> GenerateRequest:
    options.setdefault("params", SamplingParams(logprobs=5))
    return GenerateRequest(name, tuple(tokens), max_tokens=count, **options)
