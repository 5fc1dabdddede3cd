"""Trains the target.

    python -m training.train --tokenizer DIR --out DIR --minutes 20

One GPU with fla-core; ``--smoke`` runs a small shape on a CPU. The learning rate and the lengths
follow the share of ``--minutes`` that has passed. Every few minutes the weights go to ``--out``
(fp32, in shards); ``--start DIR`` continues from such weights with a fresh optimiser, and
``--from-share`` tells where in the curriculum that is.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.curriculum import draw_length, rate, stage_at
from training.export import read_shards, write_shards
from training.layers import Index, Rows, fast
from training.measure import Score, score
from training.model import Target
from training.rows import Examples, Supply, make
from training.scenes import Mix
from training.shape import SMOKE, TINY

WARM_UP = 3  # steps that count as compilation
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


def _send(array: np.ndarray, device: torch.device) -> Tensor:  # type: ignore[type-arg]
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def optimizer_of(model: nn.Module, names: str, peak: float) -> torch.optim.AdamW:
    """AdamW over the parameters whose name begins with one of ``names`` ("" for all but MTP's);
    only matrices decay."""
    decayed, plain = [], []
    for name, parameter in model.named_parameters():
        if name.startswith("mtp.") if names == "" else not name.startswith(names):
            continue
        small = parameter.ndim < 2 or "hc_" in name or "ape" in name or ".conv" in name
        (plain if small else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": 0.05}, {"params": plain, "weight_decay": 0.0}]
    fused = next(model.parameters()).is_cuda
    return torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95), eps=1e-10, fused=fused)


def save(model: nn.Module, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.detach().float().cpu() for name, tensor in model.state_dict().items()}
    write_shards(state, directory)


def train(
    run: Run, supply: Supply, options: argparse.Namespace, keep: Callable[[], None]
) -> None:
    """``keep`` writes what there is; it is called now and then, and at the end."""
    model = run.model
    taught = {p for m in model.modules() if isinstance(m, Index) for p in m.parameters()}
    optimizer = optimizer_of(model, "", options.peak)
    learned = [p for group in optimizer.param_groups for p in group["params"]]
    trunk, index = [p for p in learned if p not in taught], [p for p in learned if p in taught]
    start = said = saved = measured = time.monotonic()
    end = options.began + options.minutes * 60
    step = tokens = asked = 0
    model.train()
    while True:
        now = time.monotonic()
        if step == WARM_UP:  # kernels are compiled: the run begins here
            start = saved = measured = now
        passed = (now - start) / max(end - start, 1e-9) if step >= WARM_UP else 0.0
        share = options.from_share + (1 - options.from_share) * passed
        if share >= options.to_share:
            break
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
        tokens += run.tokens
        if now - said > options.say_every:
            rate_now = run.tokens * 1e-6 * (step - options.said_step) / (now - said)
            print(
                f"{now - start:6.0f}s step {step:6} share {share:.3f} {tokens / 1e6:7.1f}M tokens "
                f"{rate_now:.2f}M/s loss {loss.item():.4f} replies {replies.item():.4f} "
                f"index {lessons.item():.4f}",
                flush=True,
            )
            said, options.said_step = now, step
        if now - measured > options.measure_every:
            reached = tuple(n for n in EVALUATED if n <= max(stage.lengths) * 2)
            run.evaluate(tuple(n for n in reached if n <= options.longest), stage.sparse)
            measured = time.monotonic()
        if now - saved > 100:
            keep()
            saved = time.monotonic()
    keep()
    while supply.waiting:
        supply.take()
    run.evaluate(tuple(n for n in EVALUATED if n <= options.longest), sparse=True)


def parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--start", type=Path)
    parser.add_argument("--from-share", type=float, default=0.0)
    parser.add_argument("--to-share", type=float, default=1.0)
    parser.add_argument("--peak", type=float, default=2e-3)
    parser.add_argument("--tokens", type=int, default=65536, help="of one batch")
    parser.add_argument("--longest", type=int, default=8192)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--measure-every", type=float, default=60.0)
    parser.add_argument("--say-every", type=float, default=5.0)
    parser.add_argument("--smoke", action="store_true", help="a small shape on the CPU")
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    return parser


def main() -> None:
    options = parser(__doc__).parse_args()
    options.said_step, options.began = 0, time.monotonic()
    tokenizer_file = options.tokenizer / "tokenizer.json"
    with Supply(options.seed, tokenizer_file, options.workers) as supply:
        device = torch.device("cpu" if options.smoke else "cuda")
        if options.smoke:
            torch.set_num_threads(1)
        torch.manual_seed(options.seed)
        model = Target(SMOKE if options.smoke else TINY).to(device)
        if options.start is not None:
            model.load_state_dict(read_shards(options.start))
        if not (options.smoke or options.eager):
            fast.compile()
        count = sum(p.numel() for p in model.parameters())
        print(f"{count / 1e6:.2f}M parameters on {device}", flush=True)
        dtype = torch.float32 if options.smoke else torch.bfloat16
        run = Run(model, device, dtype, options.tokens, options.seed, tokenizer_file)
        train(run, supply, options, lambda: save(model, options.out))


if __name__ == "__main__":
    main()
