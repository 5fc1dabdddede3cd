"""What ranks do in the tests of models: any schedule has the bits of one pass, in every layout."""

from __future__ import annotations

import dataclasses
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from layers import configs
from layers.arena_double import Arena, Sequence, fork, step
from layers.schedules import Make, cuts, in_company, in_parts, text, whole
from merestone.models.config import Glm5NextConfig
from merestone.models.dflash import DFlash
from merestone.models.dflash_config import DFlashConfig, SelectorConfig
from merestone.models.glm5_next import Glm5Next
from merestone.models.glm5_next_mtp import Glm5NextMtp
from merestone.models.interface import Model
from merestone.models.kimi_linear import KimiLinear
from merestone.models.loader import load_model
from merestone.models.tiny_weights import draw
from merestone.parallel.world import SINGLE, World

# Four heads, and otherwise multiples of as little as the family allows.
GLM = dataclasses.replace(
    configs.GLM,
    vocab_size=322,
    hidden_size=48,
    num_layers=4,
    layer_types=("kda", "mla", "kda", "mla"),
    mlp_types=("dense", "moe", "moe", "moe"),
    indexer_types=("full",) * 4,
    intermediate_size=90,
    moe_intermediate_size=30,
    num_experts=5,
    q_lora_rank=40,
    kv_lora_rank=24,
    qk_nope_head_dim=12,
    v_head_dim=20,
    mtp_layers=1,
    mtp_shares_index=True,
)
KIMI = dataclasses.replace(
    configs.KIMI,
    vocab_size=322,
    hidden_size=48,
    num_layers=3,
    layer_types=("kda", "mla", "mla"),
    mlp_types=("dense", "moe", "moe"),
    intermediate_size=90,
    moe_intermediate_size=30,
    num_experts=5,
    kv_lora_rank=24,
    qk_nope_head_dim=12,
    v_head_dim=20,
    tie_embeddings=True,
)
CASES = {
    "glm": (GLM, torch.float32),
    "glm bf16": (GLM, torch.bfloat16),
    "glm dense": (dataclasses.replace(GLM, index_topk=512), torch.float32),
    "kimi": (KIMI, torch.float32),
}


DRAFT = DFlashConfig(
    vocab_size=322,
    hidden_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=96,
    rms_eps=1e-5,
    rope_theta=10000.0,
    windows=(32, 32),
    block=4,
    mask_id=321,
    taps=(0, 2),
    target_layers=4,
    embedding_scale=1.0,
    logit_scale=1.0,
    selector=SelectorConfig(conv_kernel=2, conv_group=16, selector_rank=8, selector_topk=4),
)


@cache
def weights(case: str) -> dict[str, Tensor]:
    return dict(draw(CASES[case][0], 0))


def of_mtp(name: str) -> bool:
    return name.startswith(f"layers.{GLM.num_layers}.")


def build(case: str, world: World = SINGLE) -> Glm5Next | KimiLinear:
    config, dtype = CASES[case]
    if isinstance(config, Glm5NextConfig):
        own = {name: tensor for name, tensor in weights(case).items() if not of_mtp(name)}
        return Glm5Next(config, own, dtype, world)
    return KimiLinear(config, weights(case), dtype, world)


def mtp(world: World) -> Glm5NextMtp:
    own = {name: tensor for name, tensor in weights("glm").items() if of_mtp(name)}
    return Glm5NextMtp(GLM, own, torch.float32, world)


class Noise:
    """A source of a draft's weights."""

    def __init__(self) -> None:
        self._source = torch.Generator().manual_seed(3)

    def draw(self, name: str, shape: tuple[int, ...]) -> Tensor:
        noise = torch.randn(shape, generator=self._source)
        return 1 + 0.1 * noise if len(shape) == 1 else noise * shape[-1] ** -0.5


def dflash() -> DFlash:
    return DFlash(DRAFT, Noise(), torch.float32, GLM.num_layers)


def maker(world: World) -> Make:
    return partial(Arena, ranks=world.dcp, rank=world.neighbours.rank)


def run(model: Model, world: World, ids: list[int]) -> tuple[Tensor, Tensor]:
    """Hidden rows and logits of one pass."""
    hidden = whole(model, ids, maker(world))
    return hidden, model.logits(hidden)


def logits(world: World, case: str, count: int) -> tuple[Tensor, Tensor]:
    return run(build(case, world), world, text(count, 1))


def loaded(world: World, directory: Path) -> tuple[Tensor, Tensor]:
    return run(load_model(directory, world=world), world, text(90, 1))


def schedules(world: World, case: str) -> None:
    """Splits, single tokens, changing batch mates and late anchors: one pass's bits."""
    model, make = build(case, world), maker(world)
    ids = text(150, 1)
    expected = whole(model, ids, make)
    assert torch.isfinite(expected).all()
    for seed, most in ((1, 70), (2, 20)):
        assert torch.equal(in_parts(model, ids, cuts(150, most, seed), seed, make), expected)
    single = [61, *[1] * 9, 80]
    assert torch.equal(in_parts(model, ids, single, 1, make), expected)
    texts = [text(n, 10 + n) for n in (1, 5, 64, 130)]
    for own, got in zip(texts, in_company(model, texts, make=make), strict=True):
        assert torch.equal(got, whole(model, own, make))
    scores = model.logits(expected)
    assert torch.equal(model.logits(expected[5:22]), scores[5:22])


def forks(world: World, case: str) -> None:
    """Two continuations share pages with their parent up to a boundary inside a run of tokens and a
    pool; whoever writes copies its rank's part first."""
    model, make = build(case, world), maker(world)
    head = text(101, 4)
    texts = [head + text(40, 5 + i) for i in range(3)]
    arena = make(model.fields(), 100)
    parent = Sequence(texts[0])
    step(model, arena, [(parent, 101)])
    children = [fork(parent, ids) for ids in texts[1:]]
    outs = step(model, arena, [(parent, 40)])
    outs += step(model, arena, [(child, 40) for child in children])
    for ids, out in zip(texts, outs, strict=True):
        assert torch.equal(out, whole(model, ids, make)[101:])


def broken(world: World) -> None:
    """A key that is no number, on one rank, reaches its own sequence on all ranks, and no other."""
    model, make = build("glm", world), maker(world)
    texts = [text(120, seed) for seed in (40, 41)]
    arena = make(model.fields(), 64)
    sequences = [Sequence(ids) for ids in texts]
    step(model, arena, [(s, 100) for s in sequences])
    if world.rank == 0:
        arena.rows(1, "pool")[sequences[1].pages["full"][0], 0] = float("nan")
    outs = step(model, arena, [(s, 20) for s in sequences])
    assert outs[1].isnan().all()
    assert torch.equal(outs[0], whole(model, texts[0], make)[100:])
