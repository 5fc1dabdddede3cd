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

from merestone.layers.weights import WeightError
from merestone.models.checkpoint import LoadError, read_weights
from merestone.models.config import (
    ConfigError,
    GenerationConfig,
    read_config,
    read_dtype,
    read_generation_config,
    read_model_type,
)
from merestone.models.glm5_next import Glm5Next
from merestone.models.interface import Model

__all__ = [
    "ConfigError",
    "GenerationConfig",
    "LoadError",
    "load_model",
    "read_generation_config",
]

log = logging.getLogger(__name__)


def load_model(
    directory: Path, dtype: torch.dtype | None = None, max_length: int | None = None
) -> Model:
    """The model in ``directory``: config.json and model.safetensors, whole or in shards.

    ``dtype`` None computes in config.json's (or, if it names none, in the embedding's); float16 is
    computed in float32, which holds its values exactly. ``max_length`` shortens the model's own
    limit, in tokens.

    Raises:
        ConfigError: the configuration is incomplete or not supported.
        LoadError: the weights do not fit the configuration, or a file is missing or cut off.
    """
    model_type = read_model_type(directory)
    if model_type not in _FAMILIES:
        known = ", ".join(sorted(_FAMILIES))
        raise ConfigError(f"{directory}: model_type {model_type!r} is not one of {known}")
    return _FAMILIES[model_type](directory, dtype, max_length)


def _load_glm5_next(directory: Path, dtype: torch.dtype | None, max_length: int | None) -> Model:
    config = read_config(directory)
    if max_length is not None:
        if not 1 <= max_length <= config.max_length:
            raise ConfigError(
                f"{directory}: a length of {max_length} tokens is outside 1..{config.max_length}"
            )
        config = dataclasses.replace(config, max_length=max_length)
    loaded = read_weights(directory, config)
    if loaded.skipped:
        log.info("%s: %d tensors skipped: %s", directory, len(loaded.skipped), loaded.skipped[:8])
    if dtype is None:
        embedding = loaded.weights.get("embed_tokens.weight")
        dtype = read_dtype(directory) or (torch.float32 if embedding is None else embedding.dtype)
    if dtype == torch.float16:
        dtype = torch.float32
    try:
        return Glm5Next(config, loaded.weights, dtype)
    except WeightError as error:
        raise LoadError(f"{directory}: {error}") from None
    except ValueError as error:
        # A combination that only the model's own code can judge.
        raise ConfigError(f"{directory}: {error}") from None


_FAMILIES: Mapping[str, Callable[[Path, torch.dtype | None, int | None], Model]] = {
    "glm5_next": _load_glm5_next,
    "glm5_next_text": _load_glm5_next,
}
