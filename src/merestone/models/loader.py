"""From a model directory to a model.

Knows which families there are and how each is put together from its files. Must not know the
files' formats (`config`, `checkpoint`) nor a family's arithmetic.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from merestone.layers.weights import Source, WeightError
from merestone.models.checkpoint import LoadError, read_weights
from merestone.models.config import (
    ConfigError,
    GenerationConfig,
    Glm5NextConfig,
    read_config,
    read_dtype,
    read_generation_config,
    read_model_type,
)
from merestone.models.dflash import DFlash
from merestone.models.dflash_config import read_dflash_config
from merestone.models.glm5_next import Glm5Next
from merestone.models.glm5_next_mtp import Glm5NextMtp
from merestone.models.interface import Model
from merestone.models.kimi_config import KimiLinearConfig, read_kimi_config
from merestone.models.kimi_linear import KimiLinear
from merestone.models.random_weights import RandomWeights
from merestone.parallel.world import SINGLE, World

__all__ = [
    "LOAD_FORMATS",
    "ConfigError",
    "GenerationConfig",
    "LoadError",
    "load_dflash",
    "load_model",
    "load_mtp",
    "read_generation_config",
]

log = logging.getLogger(__name__)

LOAD_FORMATS = ("auto", "random")
Config = Glm5NextConfig | KimiLinearConfig

_READERS: Mapping[str, Callable[[Path], Config]] = {
    "glm5_next": read_config,
    "glm5_next_text": read_config,
    "kimi_linear": read_kimi_config,
}


def load_model(
    directory: Path,
    dtype: torch.dtype | None = None,
    max_length: int | None = None,
    load_format: str = "auto",
    seed: int = 0,
    world: World = SINGLE,
) -> Model:
    """The model in ``directory``: config.json and model.safetensors, whole or in shards.

    ``dtype`` None computes in config.json's (or, if it names none, in the embedding's); float16 is
    computed in float32, which holds its values exactly. ``max_length`` shortens the model's own
    limit, in tokens. ``load_format`` "random" reads no weights: it makes every tensor that the
    model declares when the model takes it, from ``seed`` (with the slow decays of tiny models; in
    bfloat16 if no dtype is named). ``world``: the rank that loads its share.

    Raises:
        ConfigError: the configuration is incomplete or not supported.
        LoadError: the weights do not fit the configuration, or a file is missing or cut off.
    """
    assert load_format in LOAD_FORMATS, load_format
    model_type = read_model_type(directory)
    if model_type not in _READERS:
        known = ", ".join(sorted(_READERS))
        raise ConfigError(f"{directory}: model_type {model_type!r} is not one of {known}")
    config = _READERS[model_type](directory)
    if max_length is not None:
        if not 1 <= max_length <= config.max_length:
            raise ConfigError(
                f"{directory}: a length of {max_length} tokens is outside 1..{config.max_length}"
            )
        config = dataclasses.replace(config, max_length=max_length)
    weights: Mapping[str, Tensor] | Source
    if load_format == "random":
        weights, stored = RandomWeights(config, seed, device=world.device), torch.bfloat16
    else:
        weights, stored = _stored(directory, config)
    if dtype is None:
        dtype = read_dtype(directory) or stored
    if dtype == torch.float16:
        dtype = torch.float32
    try:
        return _build(config, weights, dtype, world)
    except WeightError as error:
        raise LoadError(f"{directory}: {error}") from None
    except ValueError as error:
        # A combination that only the model's own code can judge.
        raise ConfigError(f"{directory}: {error}") from None


def load_mtp(
    directory: Path,
    dtype: torch.dtype,
    load_format: str = "auto",
    seed: int = 0,
    world: World = SINGLE,
) -> Glm5NextMtp:
    """The MTP layer of the model in ``directory``, computed in ``dtype``; else as
    :func:`load_model`.

    Raises:
        ConfigError: there is none, there are several, or it is a variant that is not supported.
        LoadError: as :func:`load_model`.
    """
    assert load_format in LOAD_FORMATS, load_format
    config = _READERS[read_model_type(directory)](directory)
    if not isinstance(config, Glm5NextConfig) or config.mtp_layers != 1:
        count = config.mtp_layers if isinstance(config, Glm5NextConfig) else 0
        raise ConfigError(f"{directory}: drafting needs one MTP layer, the model has {count}")
    if not config.mtp_shares_index:
        raise ConfigError(
            f"{directory}: index_share_for_mtp_iteration = false is not supported for drafting"
        )
    weights: Mapping[str, Tensor] | Source = (
        RandomWeights(config, seed, device=world.device)
        if load_format == "random"
        else read_weights(directory, config, mtp=True).weights
    )
    try:
        return Glm5NextMtp(config, weights, dtype, world)
    except WeightError as error:
        raise LoadError(f"{directory}: {error}") from None


def load_dflash(directory: Path, dtype: torch.dtype) -> DFlash:
    """The DFlash or DFlash2 draft in ``directory``, computed in ``dtype``; every rank has it all.

    Raises:
        ConfigError: the configuration is incomplete or not supported.
        LoadError: the weights do not fit the configuration, or a file is missing or cut off.
    """
    config = read_dflash_config(directory)
    try:
        return DFlash(config, read_weights(directory, config).weights, dtype, config.target_layers)
    except WeightError as error:
        raise LoadError(f"{directory}: {error}") from None


def _stored(directory: Path, config: Config) -> tuple[Mapping[str, Tensor], torch.dtype]:
    """The directory's weights and the embedding's dtype."""
    loaded = read_weights(directory, config)
    if loaded.skipped:
        log.info("%s: %d tensors skipped: %s", directory, len(loaded.skipped), loaded.skipped[:8])
    embedding = loaded.weights.get("embed_tokens.weight")
    return loaded.weights, torch.float32 if embedding is None else embedding.dtype


def _build(
    config: Config, weights: Mapping[str, Tensor] | Source, dtype: torch.dtype, world: World
) -> Model:
    if isinstance(config, Glm5NextConfig):
        return Glm5Next(config, weights, dtype, world)
    return KimiLinear(config, weights, dtype, world)
