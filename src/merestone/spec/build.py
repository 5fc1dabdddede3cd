"""From ``--speculate`` and ``--draft`` to a drafter.

Knows the words of both options and which drafter needs which files. Must not know how drafts are
verified.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from merestone.models.dflash import DFlash
from merestone.models.interface import Model
from merestone.models.loader import load_dflash, load_mtp
from merestone.parallel.world import SINGLE, World
from merestone.spec.dflash import DFlashDrafter
from merestone.spec.interface import Drafter
from merestone.spec.mtp import MOST, MtpDrafter

WORDS = f"none, mtp:K (K from 1 to {MOST}), mtp:auto or dflash"
ACCEPT = ("exact", "rejection")
BUNDLED = "bundled"
"""``--draft bundled``: the folder ``draft`` of the model's own directory."""


@dataclass(frozen=True, slots=True)
class Speculation:
    """``kind`` "none", "mtp" or "dflash"; ``depth`` drafts a step at most, 0 for the drafter's own;
    ``adaptive``: as many as were accepted lately. ``rejecting``: at a temperature, drafts are
    accepted by their chances instead of by being what the target would draw."""

    kind: str = "none"
    depth: int = 0
    adaptive: bool = False
    rejecting: bool = False

    @property
    def gate(self) -> str:
        """The word that the retention gate has for it."""
        return "dynamic" if self.adaptive else self.kind


def parse_speculation(text: str, accept: str = "exact") -> Speculation:
    """What ``--speculate`` and ``--accept`` say.

    Raises:
        ValueError: they say nothing known.
    """
    if accept not in ACCEPT:
        raise ValueError(f"--accept: {accept!r} is not one of {', '.join(ACCEPT)}")
    rejecting = accept == "rejection"
    kind, _, depth = text.partition(":")
    if kind == "mtp" and depth == "auto":
        return Speculation("mtp", MOST, adaptive=True, rejecting=rejecting)
    if kind == "mtp" and depth.isdecimal() and 1 <= int(depth) <= MOST:
        return Speculation("mtp", int(depth), rejecting=rejecting)
    if text in ("none", "dflash"):
        return Speculation(text, rejecting=rejecting)
    raise ValueError(f"--speculate: {text!r} is not one of {WORDS}")


def draft_directory(draft: str | None, model: Path) -> Path:
    """Where the draft lies: ``--draft``, else beside the model's own files."""
    return model / "draft" if draft in (None, BUNDLED) else Path(draft)


def load_drafter(
    speculation: Speculation,
    draft: str | None,
    directory: Path,
    model: Model,
    load_format: str = "auto",
    world: World = SINGLE,
) -> Drafter | None:
    """The drafter for the ``model`` of ``directory``; None without speculation. ``draft`` as
    :func:`draft_directory` takes it.

    Raises:
        ValueError: the model has no MTP layer, there is no draft, or it is another model's.
    """
    if speculation.kind != "dflash" and draft is not None:
        raise ValueError("--draft is for --speculate dflash only")
    if speculation.kind == "none":
        if speculation.rejecting:
            raise ValueError("--accept rejection is for --speculate only")
        return None
    if speculation.kind == "mtp":
        layer = load_mtp(directory, model.info.dtype, load_format, world=world)
        return MtpDrafter(layer, model, speculation.depth, chances=speculation.rejecting)
    where = draft_directory(draft, directory)
    if not where.is_dir():
        raise ValueError(f"--draft: {where} is no directory")
    found = load_dflash(where, model.info.dtype)
    _check(found, where, model)
    return DFlashDrafter(found, model, chances=speculation.rejecting)


def _check(draft: DFlash, where: Path, model: Model) -> None:
    """Embedding, head and features are the model's: the draft must have been made for it."""
    config, info = draft.config, model.info
    pairs = {
        "vocab_size": (config.vocab_size, info.vocab_size),
        "hidden_size": (config.hidden_size, info.hidden_size),
        "num_target_layers": (config.target_layers, info.num_layers),
    }
    for name, (theirs, ours) in pairs.items():
        if theirs != ours:
            raise ValueError(f"--draft: {where} has {name} {theirs}, the model {ours}")
