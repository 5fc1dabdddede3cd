"""Trains both drafters, MTP and DFlash2, on a finished target.

    python -m training.train_drafts --tokenizer DIR --start DIR --out DIR --minutes 5

The target runs forward only; what the drafters learn is its own greedy choice at every place.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.curriculum import rate
from training.dialogue import load_tokenizer
from training.draft import Draft, draft_loss
from training.export import read_shards
from training.layers import Rows, fast
from training.model import Target
from training.rows import Examples, Supply
from training.shape import SMOKE, TINY
from training.train import Run, optimizer_of, save

LENGTHS = {512: 0.35, 1024: 0.35, 2048: 0.2, 4096: 0.1}
PASSES = 3
BLOCKS = 2048
MASK = "<|mask|>"


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


def blocks_of(lesson: Lesson, count: int, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
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
    hidden = draft(lesson.features, embed_blocks(model, previous[:, 0], size, mask, dtype), rows, anchors)
    hidden = hidden[:, 1:]
    return draft_loss(draft, hidden, model.logits(hidden), labels, previous, counts)


def embed_blocks(
    model: Target, anchors: Tensor, size: int, mask: int, dtype: torch.dtype
) -> Tensor:
    """Anchor ids [N] -> [N, S, D]."""
    ids = torch.full((len(anchors), size), mask, device=anchors.device)
    ids[:, 0] = anchors
    return model.embed(ids, dtype).detach()


def train(
    model: Target,
    draft: Draft,
    supply: Supply,
    options: argparse.Namespace,
    mask: int,
    keep: Callable[[], None],
) -> None:
    device = model.norm.device
    dtype = torch.float32 if options.smoke else torch.bfloat16
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("mtp."))
    model.eval()
    model.mtp.train()
    optimizers = [optimizer_of(model, "mtp.", options.peak), optimizer_of(draft, "", options.peak)]
    learned = [list(model.mtp.parameters()), list(draft.parameters())]
    generator = torch.Generator().manual_seed(options.seed)
    start = said = saved = time.monotonic()
    step = asked = 0
    while (share := (time.monotonic() - start) / (60 * options.minutes)) < 1.0:
        while supply.waiting < 16:
            chosen = Random(f"draft:{options.seed}:{asked}")
            length = min(chosen.choices(list(LENGTHS), list(LENGTHS.values()))[0], options.longest)
            supply.ask(options.tokens // length, length)
            asked += 1
        examples = supply.take()
        batch, length = examples.weights.shape
        places = torch.arange(length, device=device).repeat(batch)
        probes = torch.from_numpy(examples.probes).to(device)
        rows = Rows(batch, length, places, probes, sparse=True)
        plain = Rows(batch, length, places, None, sparse=True)
        lesson = look(model, examples, plain, dtype)
        first = mtp_loss(model, lesson, rows, dtype)
        picked = blocks_of(lesson, options.blocks, draft.shape.draft_block, generator)
        second = block_loss(model, draft, lesson, picked, mask, dtype)
        for loss, optimizer, parameters in zip((first, second), optimizers, learned, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate(share, step, options.peak)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
        model.mtp.mlp.balance(1e-3)
        step += 1
        now = time.monotonic()
        if now - said > options.say_every:
            print(
                f"{now - start:6.0f}s step {step} mtp {first.item():.4f} draft {second.item():.4f}",
                flush=True,
            )
            said = now
        if now - saved > 20:
            keep()
            saved = now
    keep()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--start", type=Path, required=True, help="the target's weights")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--peak", type=float, default=2e-3)
    parser.add_argument("--tokens", type=int, default=131072, help="of one batch")
    parser.add_argument("--blocks", type=int, default=BLOCKS, help="of one batch")
    parser.add_argument("--longest", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--say-every", type=float, default=5.0)
    parser.add_argument("--smoke", action="store_true", help="a small shape on the CPU")
    options = parser.parse_args()
    tokenizer_file = options.tokenizer / "tokenizer.json"
    with Supply(options.seed, tokenizer_file, options.workers) as supply:
        if options.smoke:
            torch.set_num_threads(1)
        torch.manual_seed(options.seed)
        device = torch.device("cpu" if options.smoke else "cuda")
        shape = SMOKE if options.smoke else TINY
        model, draft = Target(shape).to(device), Draft(shape).to(device)
        model.load_state_dict(read_shards(options.start))
        if not options.smoke:
            fast.compile()
        mask = load_tokenizer(tokenizer_file).token_to_id(MASK)
        assert mask is not None
        if not options.smoke:
            run = Run(model, device, torch.bfloat16, options.tokens, 0, tokenizer_file)
            run.evaluate((256, 1024, 4096, 8192), sparse=True)

        def keep() -> None:
            save(model.mtp, options.out / "mtp")
            save(draft, options.out / "draft")

        train(model, draft, supply, options, mask, keep)


if __name__ == "__main__":
    main()
