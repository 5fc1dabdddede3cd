"""Targets and their drafters: small ones whose index is soon sparse, and the bundled model."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import torch
from torch import Tensor

import merestone
from layers.configs import GLM
from merestone.models.dflash import DFlash
from merestone.models.dflash_config import DFlashConfig, SelectorConfig
from merestone.models.interface import Model
from merestone.models.loader import load_model
from merestone.models.tiny import write_tiny
from merestone.spec.build import load_drafter, parse_speculation
from merestone.spec.dflash import DFlashDrafter
from merestone.spec.interface import Drafter

CONFIG = dataclasses.replace(
    GLM,
    num_layers=4,
    layer_types=("kda", "kda", "kda", "mla"),
    mlp_types=("dense", "dense", "dense", "moe"),
    indexer_types=("full",) * 4,
    mtp_layers=1,
    mtp_shares_index=True,
)


BUNDLED = Path(merestone.__file__).parent / "assets" / "merestone-tiny"


@cache
def target(name: str) -> tuple[Path, Model]:
    """A model and its directory: "bundled", or a random one, "dense" or "sparse" from 36 tokens."""
    if name == "bundled":
        return BUNDLED, load_model(BUNDLED, torch.float32)
    directory = Path(mkdtemp(prefix="merestone-tests-"))
    write_tiny(directory, layers=4, index_topk=512 if name == "dense" else 32)
    return directory, load_model(directory)


def drafter_of(name: str, kind: str) -> Drafter:
    """The drafter that ``--speculate kind`` gives the target ``name``, which may be random."""
    directory, model = target(name)
    if kind == "dflash" and name != "bundled":
        return DFlashDrafter(DFlash(DRAFT, RandomDraft(), torch.float32, 4), model)
    found = load_drafter(parse_speculation(kind), None, directory, model)
    assert found is not None
    return found


class RandomDraft:
    """A source of weights."""

    def __init__(self) -> None:
        self._source = torch.Generator().manual_seed(4)

    def draw(self, name: str, shape: tuple[int, ...]) -> Tensor:
        noise = torch.randn(shape, generator=self._source)
        return 1 + 0.1 * noise if len(shape) == 1 else noise * shape[-1] ** -0.5


DRAFT = DFlashConfig(
    vocab_size=320,
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=128,
    rms_eps=1e-5,
    rope_theta=10000.0,
    windows=(40, 40),
    block=8,
    mask_id=319,
    taps=(1, 3),
    target_layers=4,
    embedding_scale=1.0,
    logit_scale=1.0,
    selector=SelectorConfig(conv_kernel=2, conv_group=16, selector_rank=8, selector_topk=4),
)
