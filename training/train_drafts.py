"""Trains both drafters, MTP and DFlash2, on a finished target.

The target runs forward only; what the drafters learn is its own greedy choice at every place.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.curriculum import rate
from training.draft import Draft, draft_loss
from training.layers import Rows
from training.model import Target
from training.rows import Examples, Supply
from training.train import Report, optimizer_of

LENGTHS = {512: 0.35, 1024: 0.35, 2048: 0.2, 4096: 0.1}
PASSES = 3
PEAK = 2e-3
AHEAD = 16  # batches made before they are needed
KEEP_EVERY = 20.0  # seconds


@dataclass(frozen=True, slots=True)
class Lesson:
    """What the target says of a batch, [B, L, ...]: hidden rows, features, its choice of the next
    token; the tokens themselves; 1 where the next token belongs to a reply."""

    hidden: Tensor
    features: Tensor
    best: Tensor
    ids: Tensor
    inside: Tensor


@torch.no_grad()
def look(model: Target, examples: Examples, rows: Rows, dtype: torch.dtype) -> Lesson:
    device = rows.places.device
    ids = torch.from_numpy(examples.ids.astype(np.int64)).to(device)
    inside = torch.from_numpy(examples.weights == 1.0).to(device)
    cut = (rows.batch, rows.length)
    hidden, _, taps = model(ids[:, :-1].flatten(), rows, dtype, model.shape.draft_taps)
    best = model.logits(hidden).argmax(-1)
    return Lesson(hidden, torch.cat(taps, -1).view(*cut, -1), best.view(cut), ids, inside)


def mtp_loss(model: Target, lesson: Lesson, rows: Rows, dtype: torch.dtype) -> Tensor:
    """`PASSES` passes of the MTP layer, each on the hidden rows of the one before, moved by one
    token as drafting moves them, and the index's loss of the first."""
    following = lesson.ids[:, 1:]
    embedded = model.embed(following.flatten(), dtype)
    labels = torch.roll(lesson.best, -1, dims=1).flatten()
    counts = torch.roll(lesson.inside, -1, dims=1).float() + 0.02
    counts[:, -1] = 0.0
    weights = counts.flatten()
    hidden, total = lesson.hidden, torch.zeros((), device=weights.device)
    for number in range(PASSES):
        now = rows if number == 0 else Rows(rows.batch, rows.length, rows.places, None, rows.sparse)
        out, taught = model.mtp(embedded, hidden, now)
        losses = F.cross_entropy(model.logits(out).float(), labels, reduction="none")
        total = total + (losses * weights).sum() / weights.sum()
        if taught is not None:
            total = total + taught
        moved = torch.roll(out.view(rows.batch, rows.length, -1), 1, dims=1)
        hidden = moved.flatten(0, 1)
    return total


def blocks_of(
    lesson: Lesson, count: int, size: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Rows and anchors [N] of blocks whose first draft belongs to a reply."""
    whole = lesson.inside[:, : lesson.inside.shape[1] - size]
    places = whole.nonzero()
    chosen = torch.randint(len(places), (count,), generator=generator).to(places.device)
    rows, anchors = places[chosen].unbind(1)
    return rows, anchors


def block_loss(
    model: Target, draft: Draft, lesson: Lesson, picked: tuple[Tensor, Tensor], mask: int,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    rows, anchors = picked
    size = draft.shape.draft_block
    steps = torch.arange(size - 1, device=anchors.device)
    at = anchors[:, None] + steps
    labels = lesson.best[rows[:, None], at]
    previous = lesson.ids[rows[:, None], at]
    counts = lesson.inside[rows[:, None], at].float().cumprod(1)
    hidden = draft(
        lesson.features, embed_blocks(model, previous[:, 0], size, mask, dtype), rows, anchors
    )
    hidden = hidden[:, 1:]
    return draft_loss(draft, hidden, model.logits(hidden), labels, previous, counts)


def embed_blocks(
    model: Target, anchors: Tensor, size: int, mask: int, dtype: torch.dtype
) -> Tensor:
    """Anchor ids [N] -> [N, S, D]."""
    ids = torch.full((len(anchors), size), mask, device=anchors.device)
    ids[:, 0] = anchors
    return model.embed(ids, dtype).detach()


@dataclass(slots=True)
class Learner:
    """One drafter's parameters and optimiser."""

    parameters: list[nn.Parameter]
    optimizer: torch.optim.AdamW

    def step(self, loss: Tensor, learning_rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()


def train(
    model: Target,
    draft: Draft,
    supply: Supply,
    options: argparse.Namespace,
    end: float,
    mask: int,
    keep: Callable[[], None],
) -> None:
    """Train both until the monotonic time ``end``; ``keep`` writes what there is."""
    device = model.norm.device
    dtype = torch.float32 if options.smoke else torch.bfloat16
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("mtp."))
    model.eval()
    model.mtp.train()
    mtp = Learner(list(model.mtp.parameters()), optimizer_of(model, "mtp.", PEAK))
    block = Learner(list(draft.parameters()), optimizer_of(draft, "", PEAK))
    generator = torch.Generator().manual_seed(options.seed)
    report = Report(options.say_every, options.draft_tokens)
    start = kept = time.monotonic()
    step = asked = 0
    while (now := time.monotonic()) < end:
        while supply.waiting < AHEAD:
            chosen = Random(f"draft:{options.seed}:{asked}")
            length = min(chosen.choices(list(LENGTHS), list(LENGTHS.values()))[0], options.longest)
            supply.ask(options.draft_tokens // length, length)
            asked += 1
        examples = supply.take()
        batch, length = examples.weights.shape
        places = torch.arange(length, device=device).repeat(batch)
        probes = torch.from_numpy(examples.probes).to(device)
        lesson = look(model, examples, Rows(batch, length, places, sparse=True), dtype)
        if not lesson.inside[:, : length - draft.shape.draft_block].any():
            continue  # one long text and no reply
        share = (now - start) / (end - start)
        learning_rate = rate(share, step, PEAK)
        first = mtp_loss(model, lesson, Rows(batch, length, places, probes, sparse=True), dtype)
        mtp.step(first, learning_rate)
        picked = blocks_of(lesson, options.blocks, draft.shape.draft_block, generator)
        second = block_loss(model, draft, lesson, picked, mask, dtype)
        block.step(second, learning_rate)
        model.mtp.mlp.balance(1e-3)
        step += 1
        report(now, step, share, {"mtp": first, "draft": second})
        if now - kept > KEEP_EVERY:
            keep()
            kept = now
    keep()
