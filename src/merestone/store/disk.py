"""The disk tier: one file a segment, one file a manifest, in a directory that one engine owns.

    DIR/lock                      held while the process lives
    DIR/tmp/                      files being written; emptied at start
    DIR/segments/ab/abcd....0     a segment's bytes on rank 0
    DIR/manifests/ab/abcd....m    a manifest

A file appears under its name complete and synced, or not at all; a manifest is written after the
segments it names. So whatever a crash leaves is whole, and what no manifest names is garbage.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from merestone.store.manifest import StoreFault

BLOCK = 4096
"""What a file system gives to a file is a multiple of this many bytes."""
REASONS = {
    errno.ENOSPC: "full",
    errno.EDQUOT: "full",
    errno.EFBIG: "full",
    errno.EROFS: "read_only",
    errno.EACCES: "read_only",
    errno.EPERM: "read_only",
}


class DiskTier:
    """Implements ``tier.Tier`` and ``tier.Recovered``.

    ``owner``: whether this is the process that decides what is kept; ranks only read and write.

    Raises:
        ValueError: the directory cannot be used, or another engine uses it.
    """

    name = "disk"
    boundaries = True

    def __init__(self, directory: Path, owner: bool = True) -> None:
        self.directory = directory
        self._numbers = iter(range(2**62))
        try:
            for folder in ("tmp", "segments", "manifests"):
                (directory / folder).mkdir(parents=True, exist_ok=True)
            (directory / "lock").touch()
            # For reading: nothing keeps the file system from being made read-only meanwhile.
            self._lock = open(directory / "lock", "rb")  # noqa: SIM115 - held for life
        except OSError as error:
            raise ValueError(f"--store disk:{directory}: {error.strerror}") from error
        if not owner:
            return
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise ValueError(f"--store disk:{directory} is in use by another engine") from error
        for left in (directory / "tmp").iterdir():
            with suppress(OSError):
                left.unlink()

    def room(self, size: int) -> None:
        return None

    def put(self, name: str, data: bytes | memoryview) -> None:
        path = self._path(name)
        with _faults():
            temporary = self.directory / "tmp" / f"{os.getpid()}-{next(self._numbers)}"
            try:
                _write(temporary, data)
                if not path.parent.exists():
                    path.parent.mkdir(exist_ok=True)
                    _sync(path.parent.parent)
                os.replace(temporary, path)
            except OSError:
                with suppress(OSError):
                    temporary.unlink()
                raise
            _sync(path.parent)

    def get(self, name: str) -> bytes | None:
        with _faults():
            try:
                return self._path(name).read_bytes()
            except FileNotFoundError:
                return None

    def has(self, names: Sequence[str]) -> list[bool]:
        return [self._path(name).exists() for name in names]

    def erase(self, names: Sequence[str]) -> None:
        # Not synced: a file that comes back after a crash is garbage, and collected as such.
        with _faults():
            for name in names:
                self._path(name).unlink(missing_ok=True)

    def close(self) -> None:
        self._lock.close()

    # -- what was there -------------------------------------------------------------------------

    def manifests(self) -> Iterator[tuple[str, bytes]]:
        found = [(path.stat().st_mtime_ns, path) for path in self._files("manifests")]
        for _, path in sorted(found):
            with suppress(OSError):
                yield path.stem, path.read_bytes()

    def segments(self) -> dict[str, int]:
        return {path.name: path.stat().st_size for path in self._files("segments")}

    def _files(self, folder: str) -> Iterator[Path]:
        """Files at the places of their names; any others are removed."""
        for path in list(self.directory.glob(f"{folder}/*/*")):
            if path == self._path(path.name):
                yield path
            else:
                with suppress(OSError):
                    path.unlink()

    def touch(self, address: str) -> None:
        with suppress(OSError):
            os.utime(self._path(f"{address}.m"))

    def _path(self, name: str) -> Path:
        folder = "manifests" if name.endswith(".m") else "segments"
        return self.directory / folder / name[:2] / name


def _write(path: Path, data: bytes | memoryview) -> None:
    """Write and sync a new file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _faults() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = REASONS.get(error.errno or 0, "failed")
        raise StoreFault(reason, str(error)) from error
