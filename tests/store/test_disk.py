"""The disk store under a real tiny model: damage, faults, crashes, budgets, and what is written."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import merestone.store.disk as disk
from engine.real import stream, tiny
from merestone.core.checkpoint import Checkpoint
from merestone.core.orders import Segment
from merestone.device.porter import segment_spans
from merestone.store.catalog import Catalog
from merestone.store.chain import parts_of, place
from merestone.store.disk import DiskTier
from merestone.store.manifest import Manifest, encode
from merestone.store.recovery import recover
from store.stored import Stored
from store.storing import audit_catalog


def files(directory: Path) -> list[Path]:
    return sorted(directory.glob("segments/*/*"))


def allocated(path: Path) -> int:
    return -(-path.stat().st_size // disk.BLOCK) * disk.BLOCK


def audit_disk(engine: Stored, directory: Path) -> None:
    """Files on disk = files referenced, byte for byte as many."""
    (catalog,) = (desk.catalog for desk in engine.outside.desks if desk.name == "disk")
    audit_catalog(catalog)
    assert {p.name: p.stat().st_size for p in files(directory)} == {
        f"{address}.0": held.size for address, held in catalog.segments.items()
    }
    manifests = sorted(directory.glob("manifests/*/*"))
    assert [p.stem for p in manifests] == sorted(catalog.stored)
    assert not list((directory / "tmp").iterdir())
    kept = [*files(directory), *manifests]
    assert sum(allocated(p) for p in kept) == catalog.total


def store(directory: Path, size: str = "1GiB") -> str:
    return f"disk:{directory}:{size}"


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, list[int]]:
    """A store that holds a prompt of 130 tokens."""
    prompt = list(stream(130, 1))
    engine = Stored(store(tmp_path))
    engine.served(prompt, 4)
    audit_disk(engine, tmp_path)
    engine.stop()
    return tmp_path, prompt


@pytest.mark.parametrize("how", ["truncate", "flip", "delete", "swap", "empty", "grow"])
def test_damaged_segments_are_misses(written: tuple[Path, list[int]], how: str) -> None:
    directory, prompt = written
    engine = Stored(store(directory))  # it took stock before the damage
    paths = files(directory)
    contents = [path.read_bytes() for path in paths]
    for number, (path, data) in enumerate(zip(paths, contents, strict=True)):
        match how:
            case "truncate":
                path.write_bytes(data[: len(data) // 2])
            case "flip":
                path.write_bytes(bytes([data[0] ^ 4]) + data[1:])
            case "delete":
                path.unlink()
            case "swap":
                path.write_bytes(contents[number - 1])
            case "empty":
                path.write_bytes(b"")
            case "grow":
                path.write_bytes(data + b"\0")
    reply = engine.served(prompt, 4)
    reason = "missing" if how == "delete" else "damaged"
    assert (reply.restored, reply.finished().cache.lost) == (0, f"store_{reason}")
    assert engine.stat("store_missed")[reason] >= 1
    audit_disk(engine, directory)
    engine.stop()
    mended = Stored(store(directory))
    assert mended.served(prompt, 4).restored == 130
    mended.stop()


@pytest.mark.parametrize("how", ["truncate", "flip", "rename", "segments"])
def test_a_start_over_damage_takes_stock_and_cleans_up(
    written: tuple[Path, list[int]], how: str
) -> None:
    directory, prompt = written
    (directory / "tmp" / "left").write_bytes(b"half of a segment")
    (directory / "segments" / "ab").mkdir(exist_ok=True)
    (directory / "segments" / "ab" / ("ab" * 16 + ".0")).write_bytes(b"nobody's")
    for path in sorted(directory.glob("manifests/*/*")):
        data = path.read_bytes()
        match how:
            case "truncate":
                path.write_bytes(data[:40])
            case "flip":
                path.write_bytes(data[:50] + bytes([data[50] ^ 1]) + data[51:])
            case "rename":
                path.rename(path.with_name("f" * 32 + ".m"))
    if how == "segments":
        for path in files(directory)[::2]:
            path.unlink()
    engine = Stored(store(directory))
    audit_disk(engine, directory)
    assert engine.served(prompt, 4).restored == 0
    audit_disk(engine, directory)
    engine.stop()


def test_other_models_and_layouts_share_a_directory_and_nothing_else(tmp_path: Path) -> None:
    prompt = list(stream(130, 2))
    sets = {
        "plain": {},
        "page": {"page": 64},
        "dtype": {"model": tiny("bfloat16")},
    }
    for options in sets.values():
        engine = Stored(store(tmp_path), **options)
        assert engine.served(prompt, 2).restored == 0
        audit_disk(engine, tmp_path)
        engine.stop()
    for options in sets.values():
        engine = Stored(store(tmp_path), **options)
        assert engine.served(prompt, 2).restored == 130
        engine.stop()


def test_files_of_another_store_under_our_names_are_misses(tmp_path: Path) -> None:
    prompt = list(stream(130, 3))
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for directory, options in ((ours, {}), (theirs, {"page": 64})):
        engine = Stored(store(directory), **options)
        engine.served(prompt, 2)
        engine.stop()
    for mine, other in zip(files(ours), files(theirs), strict=False):
        shutil.copy(other, mine)
    for mine, other in zip(
        sorted(ours.glob("manifests/*/*")), sorted(theirs.glob("manifests/*/*")), strict=True
    ):
        shutil.copy(other, mine)
    engine = Stored(store(ours))
    assert engine.served(prompt, 2).restored == 0
    audit_disk(engine, ours)
    engine.stop()


@pytest.mark.parametrize(
    ("code", "reason"),
    [(errno.ENOSPC, "full"), (errno.EROFS, "read_only"), (errno.EIO, "failed")],
)
def test_a_disk_that_takes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, reason: str
) -> None:
    """It fails in the middle of a segment; nothing is left of it, and answers are as ever."""
    engine = Stored(store(tmp_path))
    kept = list(stream(70, 4))
    engine.served(kept, 2)
    real, budget = os.write, [3000]

    def write(descriptor: int, data) -> int:
        if budget[0] <= 0:
            raise OSError(code, os.strerror(code))
        count = real(descriptor, data[: budget[0]])
        budget[0] -= count
        return count

    monkeypatch.setattr(disk.os, "write", write)
    prompt = list(stream(130, 5))
    engine.served(prompt, 2)
    assert engine.stat("store_not_written")[reason] >= 1
    audit_disk(engine, tmp_path)
    assert engine.served(prompt, 2).restored == 130
    monkeypatch.undo()
    engine.stop()
    again = Stored(store(tmp_path))
    assert again.served(kept, 2).restored == 70
    again.stop()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("file systems cannot be mounted here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_real_disk_fills_up_and_turns_read_only(small_disk: Path) -> None:
    engine = Stored(store(small_disk))  # the budget is larger than the disk
    prompts = [list(stream(100, key)) for key in range(4)]
    for prompt in prompts:
        engine.served(prompt, 1)
        engine.outside.desks[0].writes.note("", 0.0)
        engine.drain()
        audit_disk(engine, small_disk)
    assert engine.stat("store_not_written")["full"] >= 1
    assert engine.stat("store_written")["disk"] >= 1
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    engine.outside.desks[0].writes.note("", 0.0)
    engine.served(list(stream(30, 9)), 1)
    assert engine.stat("store_not_written")["read_only"] >= 1
    engine.engine.cache.reset()
    assert engine.served(prompts[0], 1).restored == 100
    engine.stop()


def test_a_state_that_is_not_finite_is_refused_whatever_its_checksum(tmp_path: Path) -> None:
    """As if a broken device had stored it: intact, and useless."""
    prompt = list(stream(130, 6))
    for part in ("hidden", "anchor", "open", "full"):
        directory = tmp_path / part
        engine = Stored(store(directory))
        desk = engine.outside.desks[0]
        desk.writes.note("failed", 1e9)  # nothing is written before the state is broken
        engine.served(prompt, 1)
        arena = engine.engine.device.arena
        for checkpoint in engine.engine.cache.checkpoints():
            segment = next(s for s in segments(engine, checkpoint) if s.part == part)
            span = segment_spans(arena, segment)[-1]
            arena.memory[segment.frame, span.offset : span.offset + span.size] = 0xFF
        desk.writes.note("", 0.0)
        engine.drain()
        assert engine.stat("store_written")["disk"] >= 1
        engine.stop()
        again = Stored(store(directory))
        reply = again.served(prompt, 1)
        assert (reply.restored, reply.finished().cache.lost) == (0, "store_not_finite"), part
        again.stop()


def segments(engine: Stored, checkpoint: Checkpoint) -> list[Segment]:
    parts = parts_of(engine.engine.cache.spec, checkpoint.at, checkpoint.anchor)
    return [place(part, "", checkpoint) for part in parts]


def test_two_engines_do_not_share_a_directory(tmp_path: Path) -> None:
    first = Stored(store(tmp_path))
    with pytest.raises(ValueError, match="in use by another engine"):
        Stored(store(tmp_path))
    first.stop()
    Stored(store(tmp_path)).stop()


@pytest.mark.parametrize("length", [255, 256, 257, 512, 513])
def test_full_hits_around_chunk_edges(tmp_path: Path, length: int) -> None:
    """Restored from disk, a state has the bits of a computed one: the next turn's do, too."""
    prompt = list(stream(length, length))
    first = Stored(store(tmp_path), token_budget=256)
    reply = first.served(prompt, 4)
    longer = [*prompt, *reply.ids(), 7, 8, 9]
    first.stop()
    second = Stored(store(tmp_path), token_budget=256)
    assert second.served(prompt, 4).restored == length
    assert second.served(longer, 3).restored == length + 3
    second.stop()


def test_a_local_prefix_with_a_stored_tail(tmp_path: Path) -> None:
    """Memory has the instructions and the disk the rest: only the rest is read."""
    shared, tail = list(stream(200, 1)), list(stream(90, 2))
    first = Stored(store(tmp_path))
    first.served([*shared, *tail], 2, boundaries=((200, "instruction"),))
    stored = first.outside.desks[0].catalog.stored.values()
    whole = sum(e.size for e in max(stored, key=lambda manifest: manifest.at).segments)
    first.stop()
    second = Stored(store(tmp_path))
    second.served([*shared, *stream(40, 3)], 2, boundaries=((200, "instruction"),))
    reads = []
    tier = second.outside.desks[0].clerk.tier
    get = tier.get
    tier.get = lambda name: reads.append(get(name)) or reads[-1]
    assert second.served([*shared, *tail], 2).restored == 290
    pages = 192 * whole_row_bytes(second)
    assert 0 < sum(map(len, reads)) <= whole - pages
    audit_disk(second, tmp_path)
    second.stop()


def whole_row_bytes(engine: Stored) -> int:
    """Bytes of a token in the pages of the full group."""
    return engine.engine.device.arena.layout.row_bytes["full"]


def test_replays_write_nothing_and_a_chat_writes_what_is_new(tmp_path: Path) -> None:
    engine = Stored(store(tmp_path))
    prompt = list(stream(100, 6))
    engine.served(prompt, 5)
    before = engine.stat("store_written_bytes")["disk"]
    stamps = {p: p.stat().st_mtime_ns for p in files(tmp_path)}
    for _ in range(10):
        assert engine.served(prompt, 5).restored == 100
    assert engine.stat("store_written_bytes")["disk"] == before
    assert {p: p.stat().st_mtime_ns for p in files(tmp_path)} == stamps
    # Ten turns: never again what an earlier turn wrote.
    for turn in range(10):
        reply = engine.served(prompt, 5)
        prompt = [*prompt, *reply.ids(), *stream(60, 40 + turn)]
    written = engine.stat("store_written_bytes")["disk"]
    catalog = engine.outside.desks[0].catalog
    assert written == sum(held.size for held in catalog.segments.values())
    audit_disk(engine, tmp_path)
    engine.stop()


def test_budgets_hold_in_memory_and_on_disk(tmp_path: Path) -> None:
    budget = 800_000
    engine = Stored(f"memory:{budget}", store(tmp_path, str(budget)), token_budget=256)
    memory, on_disk = engine.outside.desks
    rng = random.Random(0)
    for chat in range(20):
        engine.ask(list(stream(rng.randrange(20, 100), 10 + chat)), rng.randrange(1, 3))
        used = sum(allocated(path) for path in tmp_path.glob("*/*/*"))
        assert used <= budget * 1.05
        kept = sum(map(len, memory.clerk.tier.kept.values()))
        assert kept <= budget * 1.05
    assert min(memory.catalog.evicted, on_disk.catalog.evicted) > 5
    assert min(memory.catalog.total, on_disk.catalog.total) > budget * 0.5
    audit_disk(engine, tmp_path)
    engine.stop()
    smaller = Stored(store(tmp_path, str(budget // 2)))
    assert smaller.outside.desks[0].catalog.total <= budget // 2
    audit_disk(smaller, tmp_path)
    smaller.stop()


CRASH = """
import sys
sys.path[:0] = ["tests", "."]
from store.stored import Stored
from engine.real import stream
import torch
torch.set_num_threads(1)
engine = Stored(sys.argv[1])
for key in range(1000):
    engine.ask(list(stream(130, key)), 4)
    print(key, flush=True)
"""


def test_kill_at_any_moment_leaves_a_store_that_serves(tmp_path: Path) -> None:
    rng = random.Random(1)
    for _ in range(2):
        process = subprocess.Popen(
            [sys.executable, "-c", CRASH, store(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        for _ in range(rng.randrange(2, 6)):
            said = process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        engine = Stored(store(tmp_path))
        audit_disk(engine, tmp_path)
        prompt = list(stream(130, int(said)))
        assert engine.served(prompt, 4).restored == 130
        engine.stop()


def test_recovery_keeps_the_order_of_use(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path)
    for number, at in enumerate((3, 1, 2)):
        name = f"{at:032x}"
        manifest = Manifest(1, name, name, "who", "", at, 0, "prompt", 1, ())
        tier.put(f"{name}.m", encode(manifest))
        os.utime(tmp_path / "manifests" / name[:2] / f"{name}.m", (number, number))
    tier.touch(f"{3:032x}")
    catalog = Catalog()
    recover(catalog, tier, tier)
    assert [manifest.at for manifest in catalog.stored.values()] == [1, 2, 3]
    tier.close()


def test_spans_never_cover_what_was_not_written() -> None:
    """Frames are poisoned; whatever a segment of a real checkpoint covers is finite."""
    engine = Stored("memory:1GiB")
    engine.served(list(stream(150, 9)), 3)
    arena, seen = engine.engine.device.arena, set()
    for checkpoint in engine.engine.cache.checkpoints():
        for segment in segments(engine, checkpoint):
            for span in segment_spans(arena, segment):
                data = arena.memory[segment.frame, span.offset : span.offset + span.size]
                numbers = data.clone().view(span.dtype)
                assert torch.isfinite(numbers).all(), segment
                seen.add(segment.part)
    assert seen == {"full", "open", "anchor", "hidden"}
