"""What a shipped model can do, as a table.

    python -m training.evaluate --model DIR [--sample] [--device cuda] [--lengths 1024 4096 8192]

Reads the checkpoint that is served, in fp32, and asks held-out conversations (seeds that training
never used). ``--sample`` takes few and short ones, for a CPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from training.acceptance import Acceptance, measure
from training.dialogue import Dialogue, load_tokenizer
from training.draft import Draft
from training.export import published_draft, read_shards, restored
from training.layers import Rows
from training.measure import Score, score
from training.model import Target
from training.rows import Examples, make
from training.scenes import Mix
from training.shape import TINY
from training.vocabulary import MASK

HELD_OUT = -1000
PARIS = "What is the capital of France? Please reply with one word only"
TARGETS = {
    "record retrieval at 1024": 0.99,
    "record retrieval at 4096": 0.99,
    "record retrieval at 8192": 0.95,
    "tool call exact": 0.95,
    "two hops over a tool result": 0.90,
    "MTP, accepted of 3": 1.5,
    "DFlash2, accepted of 7": 2.0,
}


@dataclass(frozen=True, slots=True)
class Shipped:
    """A checkpoint, read for measuring."""

    model: Target
    draft: Draft
    tokenizer_file: Path
    device: torch.device

    @classmethod
    def load(cls, directory: Path, device: torch.device) -> Shipped:
        """Raises KeyError if a tensor is missing."""
        model, draft = Target(TINY), Draft(TINY)
        model.load_state_dict(restored(read_shards(directory), model.state_dict(), TINY))
        stored = load_file(directory / "draft" / "model.safetensors")
        names = {name: published for (name, _), (published, _) in zip(
            draft.state_dict().items(), published_draft(draft.state_dict()), strict=True
        )}  # fmt: skip
        draft.load_state_dict({name: stored[names[name]].float() for name in names})
        tokenizer_file = directory / "tokenizer.json"
        return cls(model.eval().to(device), draft.eval().to(device), tokenizer_file, device)

    def rows(self, batch: int, length: int) -> Rows:
        places = torch.arange(length, device=self.device).repeat(batch)
        return Rows(batch, length, places, sparse=True)

    @torch.no_grad()
    def predict(self, ids: Tensor) -> Tensor:
        """[B, L] -> the most likely next token at each place, one row at a time."""
        best = []
        for row in ids:
            hidden, _, _ = self.model(row, self.rows(1, len(row)), torch.float32)
            best.append(self.model.logits(hidden).argmax(-1))
        return torch.stack(best)

    def held_out(self, number: int, rows: int, length: int, mix: Mix | None = None) -> Examples:
        return make(HELD_OUT, number, rows, length, self.tokenizer_file, mix)

    def reply(self, question: str, most: int = 24) -> str:
        """The greedy reply to one user message."""
        tokenizer = load_tokenizer(self.tokenizer_file)
        talk = Dialogue(tokenizer, limit=0)
        talk.user(question)
        header = tokenizer.token_to_id("<|assistant|>")
        assert header is not None
        ends = {tokenizer.token_to_id(n) for n in ("<|user|>", "<|observation|>", "<|endoftext|>")}
        ids = [*talk.ids, header]
        start = len(ids)
        for _ in range(most):
            # Whole chunks only: what stands after a place does not reach it.
            padded = ids + [header] * (-len(ids) % 64)
            best = int(self.predict(torch.tensor([padded], device=self.device))[0, len(ids) - 1])
            if best in ends:
                break
            ids.append(best)
        text: str = tokenizer.decode(ids[start:])
        return text


RECORDS = Mix(records=1.0, tools=0.0)
TOOLS = Mix(records=1.0, tools=1.0, record_turns=0.2)


def ask(shipped: Shipped, mix: Mix, rows: int, length: int) -> Score:
    """Held-out conversations of one kind and length."""
    result = Score()
    score(shipped.predict, shipped.held_out(length, rows, length, mix), shipped.device, result)
    return result


def acceptance(
    shipped: Shipped, lengths: Sequence[tuple[int, int]]
) -> tuple[Acceptance, Acceptance]:
    """Over (rows, length) of held-out chats."""
    mask = load_tokenizer(shipped.tokenizer_file).token_to_id(MASK)
    assert mask is not None
    first, second = Acceptance(), Acceptance()
    for rows, length in lengths:
        found = measure(
            shipped.model, shipped.draft, shipped.held_out(7, rows, length),
            shipped.rows(rows, length), mask, torch.float32,
        )  # fmt: skip
        for total, part in zip((first, second), found, strict=True):
            total.accepted += part.accepted
            total.steps += part.steps
    return first, second


def table(
    shipped: Shipped, sizes: Sequence[tuple[int, int]], chats: Sequence[tuple[int, int]]
) -> list[tuple[str, float, int]]:
    """(what, share or mean, of how many). ``sizes``: (rows, length) for records, ``chats`` for
    drafts."""
    lines = []
    for rows, length in sizes:
        found = ask(shipped, RECORDS, rows, length)
        print(f"  {length}: {found.line()}", flush=True)
        name = f"record retrieval at {length}"
        lines.append((name, found.share("retrieval"), found.asked["retrieval"]))
    found = ask(shipped, TOOLS, 2 * chats[0][0], 1024)
    for key, name in (
        ("call", "tool call exact"),
        ("two_hop", "two hops over a tool result"),
        ("answer", "answer from a tool result"),
    ):
        lines.append((name, found.share(key), found.asked[key]))
    mtp, draft = acceptance(shipped, chats)
    lines.append(("MTP, accepted of 3", mtp.mean, mtp.steps))
    lines.append(("DFlash2, accepted of 7", draft.mean, draft.steps))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--sample", action="store_true", help="few and short conversations")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 8192])
    parser.add_argument("--rows", type=int, default=16, help="conversations of each length")
    options = parser.parse_args()
    shipped = Shipped.load(options.model, torch.device(options.device))
    sizes = [(options.rows, length) for length in options.lengths]
    chats = [(16, 256), (16, 512), (6, 1024)]
    if options.sample:
        sizes, chats = [(2, 1024)], [(2, 256)]
    print(f"{PARIS!r}: {shipped.reply(PARIS)!r}")
    for name, value, count in table(shipped, sizes, chats):
        target = TARGETS.get(name)
        goal = f"target {target}" if target is not None else ""
        print(f"{name:32} {value:7.3f} of {count:5} {goal}")


if __name__ == "__main__":
    main()
