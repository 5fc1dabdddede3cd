"""DFlash and DFlash2 against the reference package, on tiny random drafts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from dflash.model import DFlash2DraftModel, DFlashDraftModel
from torch import Tensor
from transformers.models.qwen3 import Qwen3Config

from merestone.models.dflash import DFlash
from merestone.models.dflash_config import read_dflash_config
from merestone.models.loader import load_dflash
from merestone.spec.dflash import DFlashDrafter
from spec_models.drafting import Pages, make_text, step

TAPS, HIDDEN, VOCAB = (1, 3, 6), 64, 256


def reference(two: bool, window: int | None) -> DFlashDraftModel:
    """A random draft of the reference package; window None: full attention."""
    layers = 2
    config = Qwen3Config(
        architectures=["DFlash2DraftModel" if two else "DFlashDraftModel"],
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=4096,
        use_sliding_window=window is not None,
        sliding_window=window,
        layer_types=["full_attention" if window is None else "sliding_attention"] * layers,
        max_window_layers=layers,
    )
    config.is_causal = False
    config.num_target_layers = 8
    config.dflash_config = {
        "block_size": 8,
        "mask_token_id": 255,
        "target_layer_ids": list(TAPS),
    }
    if two:
        config.dflash_config |= {
            "conv_group_size": 16,
            "conv_kernel_size": 3,
            "selector_rank": 8,
            "selector_top_k": 4,
        }
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    model = (DFlash2DraftModel if two else DFlashDraftModel)(config)
    source = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=source)
            if weight.dim() == 1:
                weight.copy_(1.0 + 0.1 * noise)
            elif name.endswith("base_kernel"):
                weight.copy_(0.3 * noise)
                weight[:, 0] += 1.0
            else:
                weight.copy_(noise * weight.shape[-1] ** -0.5)
    return model.eval()


def saved(model: DFlashDraftModel, directory: Path) -> DFlash:
    """The draft through its published files: codebooks have no ``.weight`` there."""
    tensors = {
        name.removesuffix(".weight") if name.endswith("codebook.weight") else name: value
        for name, value in model.state_dict().items()
    }
    model.save_pretrained(directory, state_dict=tensors)
    return load_dflash(directory, torch.float32)


class Target:
    """Embeds and reads out, as a drafter's target does."""

    def __init__(self) -> None:
        source = torch.Generator().manual_seed(2)
        self.embedding = torch.randn(VOCAB, HIDDEN, generator=source)
        self.head = torch.nn.Linear(HIDDEN, VOCAB, bias=False)
        with torch.no_grad():
            self.head.weight.copy_(torch.randn(VOCAB, HIDDEN, generator=source) * 0.5)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.embedding[tokens]

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden).detach()


@pytest.mark.parametrize(
    ("two", "window"),
    [(False, None), (False, 32), (True, 32), (True, 4096)],
    ids=["v1-full", "v1-sliding", "v2-sliding", "v2-wide"],
)
@torch.no_grad()
def test_equals_the_reference(two: bool, window: int | None, tmp_path: Path) -> None:
    model, target = reference(two, window), Target()
    draft = saved(model, tmp_path)
    drafter = DFlashDrafter(draft, target)  # type: ignore[arg-type]
    for length in (1, 5, 31, 32, 33, 100):
        text = make_text(length, length, VOCAB, HIDDEN, len(TAPS) * HIDDEN, torch.float32)
        pages = Pages(drafter)
        drafts = step(drafter, pages, [(text, length, True)], 7)[0]
        ids = torch.tensor([[text.ids[length]] + [255] * 7])
        embedded = target.embed(ids)
        expected = model(
            position_ids=torch.arange(length + 8)[None],
            noise_embedding=embedded,
            target_hidden=text.features[None],
        )
        table = torch.tensor(text.tables["window"])
        blocks = draft.blocks(torch.tensor([length]), [table], pages.page("window"))
        got = draft.forward(embedded, blocks, pages)
        assert (got - expected).abs().max() < 1e-5 * expected.abs().max()
        if two:
            path = model.propose(expected[:, 1:], ids[:, 0], target.head, 0.0)[0]
        else:
            path = target.logits(expected[:, 1:]).argmax(-1)
        assert drafts == path[0].tolist()


def test_published_configuration_is_read(tmp_path: Path) -> None:
    saved(reference(True, 32), tmp_path)
    config = read_dflash_config(tmp_path)
    assert (config.windows, config.context, config.block) == ((32, 32), 31, 8)
    assert (config.taps, config.mask_id, config.target_layers) == (TAPS, 255, 8)
