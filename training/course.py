"""Trains merestone-tiny: the target, then both drafters.

    python -m training.course --tokenizer DIR --out DIR --minutes 8 --draft-minutes 3

One GPU with fla-core; ``--smoke`` runs a small shape on a CPU. ``--minutes`` counts from the start
of the process, ``--draft-minutes`` from the end of the target's. Every minute or two ``--out``
receives everything in bf16 shards (vectors stay fp32): the target with its MTP layer, and the
draft under ``draft.``. ``--start DIR`` goes on from such a directory with a fresh optimiser, and
``--from-share`` says from where in the curriculum; with ``--minutes 0`` only the drafters learn.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from training import train, train_drafts
from training.dialogue import load_tokenizer
from training.draft import Draft
from training.export import read_shards, split_draft, write_shards
from training.layers import fast
from training.model import Target
from training.rows import Supply
from training.shape import SMOKE, TINY
from training.vocabulary import MASK


def trim_autotuning(most: int = 2) -> None:
    """Try few configurations of each Triton kernel: all of fla-core's compile for minutes."""
    from triton.runtime.autotuner import Autotuner

    whole = Autotuner.__init__

    def plainness(config: Any) -> int:
        blocks: int = sum(
            abs(size - 32) for size in config.kwargs.values() if isinstance(size, int)
        )
        waste: int = abs(config.num_warps - 4) + abs(config.num_stages - 3)
        return 1000 * waste + blocks

    def init(self: Any, fn: Any, names: Any, configs: list[Any], *rest: Any, **named: Any) -> None:
        whole(self, fn, names, sorted(configs, key=plainness)[:most], *rest, **named)

    Autotuner.__init__ = init


def compact(prefix: str, module: nn.Module) -> dict[str, Tensor]:
    return {
        prefix + name: (tensor.bfloat16() if tensor.dim() > 1 else tensor.float()).detach().cpu()
        for name, tensor in module.state_dict().items()
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--start", type=Path)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--draft-minutes", type=float, default=3.0)
    parser.add_argument("--from-share", type=float, default=0.0)
    parser.add_argument("--peak", type=float, default=2.5e-3, help="learning rate of the target")
    parser.add_argument("--tokens", type=int, default=131072, help="of one batch")
    parser.add_argument("--draft-tokens", type=int, default=65536, help="of one drafters' batch")
    parser.add_argument("--blocks", type=int, default=2048, help="of one drafters' batch")
    parser.add_argument("--longest", type=int, default=8192, help="row, in tokens")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--measure-every", type=float, default=120.0, help="seconds")
    parser.add_argument("--say-every", type=float, default=5.0, help="seconds")
    parser.add_argument("--smoke", action="store_true", help="a small shape on the CPU")
    return parser.parse_args()


def main() -> None:
    options = parse()
    began = time.monotonic()
    tokenizer_file = options.tokenizer / "tokenizer.json"
    with Supply(options.seed, tokenizer_file, options.workers) as supply:
        if options.smoke:
            torch.set_num_threads(1)
        else:
            trim_autotuning()
            fast.compile()
        torch.manual_seed(options.seed)
        device = torch.device("cpu" if options.smoke else "cuda")
        dtype = torch.float32 if options.smoke else torch.bfloat16
        shape = SMOKE if options.smoke else TINY
        model, draft = Target(shape).to(device), Draft(shape).to(device)
        if options.start is not None:
            target, drafted = split_draft(read_shards(options.start))
            model.load_state_dict(target)
            draft.load_state_dict(drafted)

        def keep() -> None:
            options.out.mkdir(parents=True, exist_ok=True)
            write_shards(compact("", model) | compact("draft.", draft), options.out)

        if options.minutes > 0:
            run = train.Run(model, device, dtype, options.tokens, options.seed, tokenizer_file)
            train.train(run, supply, options, began + 60 * options.minutes, keep)
        if options.draft_minutes > 0:
            mask = load_tokenizer(tokenizer_file).token_to_id(MASK)
            assert mask is not None
            end = time.monotonic() + 60 * options.draft_minutes
            train_drafts.train(model, draft, supply, options, end, mask, keep)


if __name__ == "__main__":
    main()
