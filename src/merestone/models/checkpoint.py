"""The weight files of a model directory: read, rename, split, and account for every tensor.

Knows safetensors files, their index and the spellings of tensor names. Must not know what a model
does with its tensors: each family takes its own, by name and shape, and refuses leftovers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from merestone.models.config import WEIGHT_FILE, WEIGHT_INDEX_FILE
from merestone.models.strict_json import Section, read_object

# The text model's prefix: of the published multimodal checkpoint, and of a text-only one.
_TEXT_PREFIXES = ("model.language_model.", "language_model.", "model.")
_VISION_PREFIXES = ("model.visual.", "visual.")
# transformers' module paths -> published names, where a plain substitution does it. Saving a
# Kimi-Linear model also renames its dense layers as if they had experts.
_RENAMES = (
    (".self_attn.forget_gate.", ".self_attn."),
    (".attn_hc.", ".hc_attn_"),
    (".ffn_hc.", ".hc_ffn_"),
    *((f".block_sparse_moe.{part}_proj.", f".mlp.{part}_proj.") for part in ("gate", "up", "down")),
)


class LoadError(ValueError):
    """Tensors that cannot be served: missing, left over, misshapen or cut off. Names them."""


class TextConfig(Protocol):
    """What reading needs to know of any family's configuration."""

    @property
    def num_layers(self) -> int: ...

    @property
    def tie_embeddings(self) -> bool: ...


@dataclass(slots=True)
class LoadedWeights:
    """``weights`` by published name relative to the text model, in their stored dtypes, mapped
    from the files and not copied; ``skipped``: names in the files that no part of ours uses."""

    weights: dict[str, Tensor] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)


def read_weights(directory: Path, config: TextConfig, *, mtp: bool = False) -> LoadedWeights:
    """All tensors of the text model in ``directory``, or of its MTP layer alone, under their
    published names.

    Tensors that transformers fuses (``conv1d`` of q, k and v; ``experts.gate_up_proj`` with the
    gate's rows first; ``experts.down_proj``) come back as views of their parts. Skipped by name:
    the vision tower, the other part (the MTP layer has the index ``num_layers`` and an
    ``eh_proj``), and the MTP layer's copies of the target's embedding and head.

    Raises:
        LoadError: no weights, an index that does not match its files, a file that is cut off, a
            dtype that is no plain float, or two tensors for one name.
    """
    loaded = LoadedWeights()
    shards = _shards(directory)
    layer = f"layers.{config.num_layers}."
    has_mtp = any(layer + "eh_proj." in name for names in shards.values() for name in names)
    copies = (f"{layer}embed_tokens.", f"{layer}shared_head.head.")
    for path, names in shards.items():
        with _open(path) as file:
            for stored in names:
                relative = _relative(stored)
                other = (has_mtp and relative.startswith(layer)) != mtp
                if other or relative.startswith(copies) or stored.startswith(_VISION_PREFIXES):
                    loaded.skipped.append(stored)
                    continue
                tensor = file.get_tensor(stored)
                if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
                    raise LoadError(f"{path}: {stored} is {tensor.dtype}, not a plain float")
                for name, part in _published(stored, tensor, path):
                    if name in loaded.weights:
                        raise LoadError(f"{path}: {stored} is a second tensor for {name}")
                    loaded.weights[name] = part
    if not mtp:
        _settle_head(loaded, config, directory)
    return loaded


def _shards(directory: Path) -> dict[Path, list[str]]:
    """Every weight file and the names in it, checked against the index if there is one."""
    single, index = directory / WEIGHT_FILE, directory / WEIGHT_INDEX_FILE
    if not index.exists():
        if not single.exists():
            raise LoadError(f"{directory}: neither {WEIGHT_FILE} nor {WEIGHT_INDEX_FILE}")
        with _open(single) as file:
            return {single: list(file.keys())}
    if single.exists():
        raise LoadError(
            f"{directory}: both {WEIGHT_FILE} and {WEIGHT_INDEX_FILE}; which one counts?"
        )
    promised: dict[str, set[str]] = {}
    weight_map = Section(read_object(index), str(index)).section("weight_map")
    for name in weight_map.unread():
        file_name = weight_map.text(name)
        if Path(file_name).name != file_name:
            raise LoadError(f"{index}: {name} lies in {file_name!r}, outside the directory")
        promised.setdefault(file_name, set()).add(name)
    shards = {}
    for file_name in sorted(promised):
        path = directory / file_name
        with _open(path) as file:
            names = list(file.keys())
        if absent := promised[file_name] - set(names):
            raise LoadError(f"{path}: missing {_some(sorted(absent))}, which the index promises")
        if extra := set(names) - promised[file_name]:
            raise LoadError(f"{path}: {_some(sorted(extra))} not placed here by the index")
        shards[path] = names
    return shards


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    """A safetensors file, whose absence or damage is told as a LoadError."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except FileNotFoundError:
        raise LoadError(f"{path}: no such file") from None
    except (SafetensorError, OSError) as error:
        raise LoadError(f"{path}: damaged or cut off ({error})") from None


def _relative(stored: str) -> str:
    for prefix in _TEXT_PREFIXES:
        if stored.startswith(prefix):
            return stored.removeprefix(prefix)
    return stored


def _published(stored: str, tensor: Tensor, path: Path) -> Iterator[tuple[str, Tensor]]:
    """The published name and tensor, or those of the parts, as views, that transformers fuses."""
    name = _relative(stored)
    for theirs, published in _RENAMES:
        name = name.replace(theirs, published)
    layer, _, rest = name.partition(".self_attn.")
    if rest == "conv1d.weight":
        if tensor.shape[0] % 3:
            raise LoadError(f"{path}: {stored} {tuple(tensor.shape)} is not q, k and v in one")
        for part, rows in zip("qkv", tensor.chunk(3), strict=True):
            yield f"{layer}.self_attn.{part}_conv1d.weight", rows
        return
    block, _, rest = name.partition(".mlp.experts.")
    if rest not in ("gate_up_proj", "down_proj"):
        yield name, tensor
        return
    if tensor.dim() != 3 or (rest == "gate_up_proj" and tensor.shape[1] % 2):
        raise LoadError(f"{path}: {stored} {tuple(tensor.shape)} is not one matrix an expert")
    for expert, matrix in enumerate(tensor):
        prefix = f"{block}.mlp.experts.{expert}."
        if rest == "down_proj":
            yield prefix + "down_proj.weight", matrix
        else:
            gate, up = matrix.chunk(2)
            yield prefix + "gate_proj.weight", gate
            yield prefix + "up_proj.weight", up


def _settle_head(loaded: LoadedWeights, config: TextConfig, directory: Path) -> None:
    """A tied head is the embedding; a stored copy of it must say the same."""
    if not config.tie_embeddings or "embed_tokens.weight" not in loaded.weights:
        return
    embedding = loaded.weights["embed_tokens.weight"]
    head = loaded.weights.pop("lm_head.weight", embedding)
    if head is not embedding and not torch.equal(head, embedding):
        raise LoadError(f"{directory}: tied embeddings, but lm_head.weight differs")


def _some(names: list[str], limit: int = 5) -> str:
    rest = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {rest} more" if rest > 0 else "")
