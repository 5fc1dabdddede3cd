"""How many drafted tokens the target accepts, counted over replies of held-out conversations.

Simulated from one pass over the true tokens: after a known token, drafts are accepted up to the
first that is wrong; the next step begins after them and the token that the target adds. Only
replies that the target gets right count, so that the true tokens are its own output.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from training.draft import Draft
from training.kernels import attend
from training.layers import Mla, Rows, matmul, rms
from training.model import Mtp, Target
from training.rows import Examples
from training.train_drafts import Lesson, embed_blocks, look


@dataclass(slots=True)
class Acceptance:
    """``accepted`` drafts in ``steps`` verification steps."""

    accepted: int = 0
    steps: int = 0

    @property
    def mean(self) -> float:
        return self.accepted / max(self.steps, 1)

    def walk(self, good: Tensor, first: int, end: int) -> None:
        """``good`` [L, K]: whether draft k after the token at a place is right. The reply's first
        token, at ``first``, came from the prefill; its end token stands at ``end``."""
        place = first
        while place < end:
            run = int(good[place].long().cumprod(0).sum())
            taken = min(run, end - place)
            self.accepted += taken
            self.steps += 1
            place += taken + 1


class _Passes:
    """MTP's attention while it drafts: pass j stands one row after pass j - 1 and sees the rows of
    pass 1 before the first draft, then one row of each pass. The selection is that of pass 1."""

    def __init__(self, layer: Mla, rows: Rows) -> None:
        self.layer, self.rows = layer, rows
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.chosen: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        layer, rows, c = self.layer, self.rows, self.layer.shape
        qr = rms(matmul(x, layer.q_a_proj), layer.q_a_layernorm, c.eps)
        latent = rms(matmul(x, layer.kv_a_proj_with_mqa), layer.kv_a_layernorm, c.eps)
        q = rows.split(matmul(qr, layer.q_b_proj), c.heads)
        kv = rows.split(matmul(latent, layer.kv_b_proj), c.heads)
        k, v = torch.split(kv, [c.qk_size, c.v_size], dim=-1)
        if self.chosen is None:
            self.chosen = layer.indexer.select(x, qr, rows)
        self.keys.append(k)
        self.values.append(v)
        count = len(self.keys)
        # Row r of pass j began as row r - (j - 1) of pass 1.
        masks = [torch.roll(self.chosen, count - 1, dims=1)]
        place = torch.arange(rows.length, device=x.device)
        for number in range(1, count):
            one = place[:, None] - place == count - 1 - number
            masks.append(one.expand(rows.batch, -1, -1))
        out = attend(q, torch.cat(self.keys, 2), torch.cat(self.values, 2), torch.cat(masks, 2))
        return matmul(rows.join(out), layer.o_proj)


def _mtp_row(mtp: Mtp, attention: _Passes, embedded: Tensor, hidden: Tensor) -> Tensor:
    eps = mtp.shape.eps
    both = torch.cat([rms(embedded, mtp.enorm, eps), rms(hidden, mtp.hnorm, eps)], dim=-1)
    x = matmul(both, mtp.eh_proj)
    x = x + attention(rms(x, mtp.input_layernorm, eps))
    x = x + mtp.mlp(rms(x, mtp.post_attention_layernorm, eps))
    return rms(x, mtp.norm, eps)


@torch.no_grad()
def mtp_good(model: Target, lesson: Lesson, rows: Rows, passes: int, dtype: torch.dtype) -> Tensor:
    """[B, L, passes] bool: whether the draft of each pass is right, the ones before it being so.

    With the last known token at p, pass j (from 1) drafts the token at p + j from row p + j - 2.
    """
    embedded = model.embed(lesson.ids[:, 1:].flatten(), dtype)
    hidden, attention, found = lesson.hidden, _Passes(model.mtp.self_attn, rows), []
    for number in range(passes):
        out = _mtp_row(model.mtp, attention, embedded, hidden)
        drafted = model.logits(out).argmax(-1).view(rows.batch, rows.length)
        right = drafted[:, :-1] == lesson.ids[:, 2:]  # row r drafts the token at r + 2
        place = torch.zeros_like(lesson.inside)
        moved = right[:, max(number - 1, 0) :]
        start = 1 if number == 0 else 0
        place[:, start : start + moved.shape[1]] = moved
        found.append(place)
        hidden = torch.roll(out.view(rows.batch, rows.length, -1), 1, dims=1).flatten(0, 1)
    return torch.stack(found, dim=-1)


@torch.no_grad()
def draft_good(
    model: Target, draft: Draft, lesson: Lesson, places: Tensor, mask: int, dtype: torch.dtype
) -> Tensor:
    """[B, L, K] bool, right only at ``places`` [N, 2] (row, place of the last known token)."""
    size = draft.shape.draft_block
    good = torch.zeros(*lesson.inside.shape, size - 1, dtype=torch.bool, device=places.device)
    for part in torch.split(places, 512):
        rows, anchors = part.unbind(1)
        known = lesson.ids[rows, anchors]
        hidden = draft(
            lesson.features, embed_blocks(model, known, size, mask, dtype), rows, anchors
        )
        proposed = draft.propose(hidden, model.logits(hidden), known)
        at = anchors[:, None] + torch.arange(1, size, device=places.device)
        inside = at < lesson.ids.shape[1]
        true = lesson.ids[rows[:, None], at.clamp(max=lesson.ids.shape[1] - 1)]
        good[rows, anchors] = (proposed == true) & inside
    return good


def measure(
    model: Target, draft: Draft, examples: Examples, rows: Rows, mask: int, dtype: torch.dtype
) -> tuple[Acceptance, Acceptance]:
    """Acceptance of MTP with 3 passes and of the draft's whole block, over one batch."""
    lesson = look(model, examples, rows, dtype)
    right = lesson.best == lesson.ids[:, 1:]
    replies = [
        (row, span.start, span.end)
        for row, spans in enumerate(examples.spans)
        for span in spans
        # Up to the control token that ends it, which any of the three may be.
        if span.end < rows.length and bool(right[row, span.start - 1 : span.end].all())
    ]
    places = [(row, place) for row, start, end in replies for place in range(start, end)]
    mtp = mtp_good(model, lesson, rows, 3, dtype).cpu()
    block = draft_good(
        model, draft, lesson, torch.tensor(places).to(rows.places.device), mask, dtype
    )
    block = block.cpu()
    first, second = Acceptance(), Acceptance()
    for row, start, end in replies:
        first.walk(mtp[row], start, end)
        second.walk(block[row], start, end)
    return first, second
