"""What figures belong to, and how they are written down."""

from __future__ import annotations

import json
import platform
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from merestone import __version__


def about(threads: int, model: str, device: str = "cpu") -> dict[str, Any]:
    """The machine, the model and the versions."""
    return {
        "device": device_name(device),
        "threads": threads,
        "model": model,
        "dtype": "float32",
        "began": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(),
    }


def heading(bench: str, model: Path, device: str) -> dict[str, Any]:
    """How the report of a bench begins that runs a model's directory over ranks."""
    return {
        "bench": bench,
        "began": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": __version__,
        "model": model.name,
        "device": device_name(device),
        "gpus": torch.cuda.device_count(),
        "versions": versions(),
    }


def device_name(device: str) -> str:
    """The GPU's name, or the processor's."""
    return torch.cuda.get_device_name() if device.startswith("cuda") else _processor()


def versions() -> dict[str, str]:
    """Of what figures depend on."""
    found = {name: _version(name) for name in ("merestone", "torch", "transformers")}
    return {**found, "python": platform.python_version()}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "source"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]} x {len(names)}" if names else platform.machine()


def rounded(value: Any) -> Any:
    """Four digits are enough, and more than were measured."""
    if isinstance(value, dict):
        return {key: rounded(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [rounded(entry) for entry in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def publish(report: dict[str, Any], file: Path | None) -> None:
    """Print a finished report as one line, and write it to ``file`` if there is one."""
    keep(report, file)
    print(json.dumps(report))


def keep(report: dict[str, Any], file: Path | None) -> None:
    """Write a report, finished or as far as it is, to ``file`` if there is one."""
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(report, indent=1) + "\n")
