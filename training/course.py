"""The whole course in one process: the target, then both drafters.

    python -m training.course --tokenizer DIR --out DIR --minutes 20 --draft-minutes 5

What was compiled for the target serves the drafters. ``--out`` receives bf16 shards (vectors stay
fp32) of everything: the target with its MTP layer, and the draft under ``draft.``.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from training import train, train_drafts
from training.dialogue import load_tokenizer
from training.draft import Draft
from training.export import write_shards
from training.layers import fast
from training.model import Target
from training.rows import Supply
from training.shape import SMOKE, TINY


def trim_autotuning(most: int = 2) -> None:
    """Try few configurations of each Triton kernel: fla-core's own lists compile for minutes."""
    from triton.runtime.autotuner import Autotuner

    whole = Autotuner.__init__

    def plainness(config: Any) -> int:
        blocks = sum(abs(size - 32) for size in config.kwargs.values() if isinstance(size, int))
        return 1000 * (abs(config.num_warps - 4) + abs(config.num_stages - 3)) + blocks

    def init(
        self: Any, fn: Any, names: Any, configs: list[Any], *rest: Any, **named: Any
    ) -> None:
        whole(self, fn, names, sorted(configs, key=plainness)[:most], *rest, **named)

    Autotuner.__init__ = init  # type: ignore[method-assign]


def compact(prefix: str, module: nn.Module) -> dict[str, Tensor]:
    return {
        prefix + name: (tensor.bfloat16() if tensor.dim() > 1 else tensor.float()).detach().cpu()
        for name, tensor in module.state_dict().items()
    }


def write(out: Path, model: Target, draft: Draft) -> None:
    out.mkdir(parents=True, exist_ok=True)
    write_shards(compact("", model) | compact("draft.", draft), out)


def main() -> None:
    parser = train.parser(__doc__)
    parser.add_argument("--draft-minutes", type=float, default=5.0)
    parser.add_argument("--draft-tokens", type=int, default=65536)
    parser.add_argument("--blocks", type=int, default=train_drafts.BLOCKS)
    options: argparse.Namespace = parser.parse_args()
    options.said_step, options.began = 0, time.monotonic()
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
        run = train.Run(model, device, dtype, options.tokens, options.seed, tokenizer_file)

        def keep() -> None:
            write(options.out, model, draft)

        train.train(run, supply, options, keep)
        options.minutes, options.tokens = options.draft_minutes, options.draft_tokens
        mask = load_tokenizer(tokenizer_file).token_to_id(train_drafts.MASK)
        assert mask is not None
        train_drafts.train(model, draft, supply, options, mask, keep)


if __name__ == "__main__":
    main()
