"""Trains the target.

The learning rate and the lengths follow the share of the given minutes that has passed. Knows one
batch and one step; what is kept, and where, is the caller's business.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from training.curriculum import draw_length, rate, stage_at
from training.layers import Index, Rows
from training.measure import Score, score
from training.model import Target
from training.rows import Examples, Supply, make
from training.scenes import Mix

WARM_UP = 3  # steps that count as compilation
KEEP_EVERY = 100.0  # seconds
AHEAD = 24  # batches made before they are needed
EVALUATED = (256, 1024, 4096, 8192)


@dataclass(slots=True)
class Run:
    """What one run holds. ``tokens``: of one batch."""

    model: Target
    device: torch.device
    dtype: torch.dtype
    tokens: int
    seed: int
    tokenizer_file: Path

    def rows(self, length: int, probes: Tensor | None, sparse: bool) -> Rows:
        batch = self.tokens // length
        places = torch.arange(length, device=self.device).repeat(batch)
        return Rows(batch, length, places, probes, sparse)

    def loss(self, examples: Examples, sparse: bool) -> tuple[Tensor, Tensor, Tensor]:
        """The loss to minimise; of it, the replies' mean; the index's."""
        length = examples.weights.shape[1]
        ids = _send(examples.ids.astype(np.int64), self.device)
        weights = _send(examples.weights, self.device).flatten()
        rows = self.rows(length, _send(examples.probes, self.device), sparse)
        hidden, lessons, _ = self.model(ids[:, :-1].flatten(), rows, self.dtype)
        logits = self.model.logits(hidden).float()
        losses = F.cross_entropy(logits, ids[:, 1:].flatten(), reduction="none")
        loss = (losses * weights).sum() / weights.sum()
        inside = weights == 1.0
        replies = (losses.detach() * inside).sum() / inside.sum().clamp(min=1)
        return loss + lessons, replies, lessons.detach()

    @torch.no_grad()
    def evaluate(self, lengths: tuple[int, ...], sparse: bool) -> None:
        self.model.eval()

        def predict(ids: Tensor) -> Tensor:
            rows = self.rows(ids.shape[1], None, sparse)
            hidden, _, _ = self.model(ids.flatten(), rows, self.dtype)
            return self.model.logits(hidden).argmax(-1).view_as(ids)

        for length in lengths:
            held_out = make(
                -1 - self.seed, length, self.tokens // length, length, self.tokenizer_file,
                Mix(records=0.9),
            )  # fmt: skip
            result = Score()
            score(predict, held_out, self.device, result)
            print(f"  held out {length:6} {'sparse' if sparse else 'dense'}: {result.line()}")
        self.model.train()


def _send(array: NDArray[Any], device: torch.device) -> Tensor:
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def optimizer_of(model: nn.Module, names: str, peak: float) -> torch.optim.AdamW:
    """AdamW over the parameters whose name begins with one of ``names`` ("" for all but MTP's);
    only matrices decay."""
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if name.startswith("mtp.") if names == "" else not name.startswith(names):
            continue
        small = parameter.ndim < 2 or "hc_" in name or "ape" in name or ".conv" in name
        (plain if small else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": 0.05}, {"params": plain, "weight_decay": 0.0}]
    fused = next(model.parameters()).is_cuda
    return torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95), eps=1e-10, fused=fused)


@dataclass(slots=True)
class Report:
    """Says every few seconds how it goes. Times in seconds."""

    every: float
    tokens: int
    said: float = 0.0
    said_step: int = 0

    def __call__(self, now: float, step: int, share: float, losses: dict[str, Tensor]) -> None:
        if now - self.said < self.every:
            return
        speed = self.tokens * 1e-6 * (step - self.said_step) / max(now - self.said, 1e-9)
        values = " ".join(f"{name} {value.item():.4f}" for name, value in losses.items())
        seen = self.tokens * step / 1e6
        print(
            f"step {step:6} share {share:.3f} {seen:7.1f}M tokens {speed:.2f}M/s {values}",
            flush=True,
        )
        self.said, self.said_step = now, step


def train(
    run: Run,
    supply: Supply,
    options: argparse.Namespace,
    end: float,
    keep: Callable[[], None],
) -> None:
    """Train until the monotonic time ``end``. ``keep`` writes what there is; it is called now and
    then, and at the end."""
    model = run.model
    taught = {p for m in model.modules() if isinstance(m, Index) for p in m.parameters()}
    optimizer = optimizer_of(model, "", options.peak)
    learned = [p for group in optimizer.param_groups for p in group["params"]]
    trunk, index = [p for p in learned if p not in taught], [p for p in learned if p in taught]
    lengths = tuple(n for n in EVALUATED if n <= options.longest)
    report = Report(options.say_every, run.tokens)
    start = kept = measured = time.monotonic()
    step = asked = 0
    model.train()
    while (now := time.monotonic()) < end:
        if step == WARM_UP:  # kernels are compiled: the run begins here
            start = kept = measured = now
        passed = (now - start) / (end - start) if step >= WARM_UP else 0.0
        share = options.from_share + (1 - options.from_share) * passed
        stage = stage_at(share)
        while supply.waiting < AHEAD:
            length = min(draw_length(stage, run.seed, asked), options.longest)
            supply.ask(run.tokens // length, length)
            asked += 1
        for group in optimizer.param_groups:
            group["lr"] = rate(share, step, options.peak)
        loss, replies, lessons = run.loss(supply.take(), stage.sparse)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(trunk, 1.0)
        nn.utils.clip_grad_norm_(index, 1.0)
        optimizer.step()
        model.balance(1e-3)
        step += 1
        report(now, step, share, {"loss": loss, "replies": replies, "index": lessons})
        if now - measured > options.measure_every:
            run.evaluate(lengths, stage.sparse)
            measured = time.monotonic()
        if now - kept > KEEP_EVERY:
            keep()
            kept = time.monotonic()
    keep()
    while supply.waiting:
        supply.take()
    run.evaluate(lengths, sparse=True)
