"""What a tier claims to hold is only fetched if this very configuration would have written it."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from core.small_caches import tokens
from engine.test_queue import sequence
from fake_device import small_spec
from merestone.store.catalog import blank
from merestone.store.chain import Chain, parts_of
from merestone.store.manifest import Entry, Manifest
from store.storing import StoringHarness, Vault

ROOT = ("", "")
SPEC = small_spec(80)


def chain() -> Chain:
    return Chain("test 1", ROOT, tokens(40), SPEC.chunk)


def anchored_at(anchor: int) -> tuple[Entry, ...]:
    return blank([(part.address(chain()), 100) for part in parts_of(SPEC, 40, anchor)], 1)


@pytest.mark.parametrize(
    ("change", "good"),
    [
        ({}, True),
        ({"identity": "test 2"}, False),
        ({"address": "00" * 16}, False),
        ({"ranks": 2}, False),
        ({"kind": "nonsense"}, False),
        ({"anchor": 24, "segments": anchored_at(24)}, False),
        ({"anchor": 36, "segments": anchored_at(36)}, False),
        ({"segments": anchored_at(40)[:-1]}, False),
        ({"segments": anchored_at(40)[::-1]}, False),
        ({"segments": (*anchored_at(40), *anchored_at(24)[:1])}, False),
        ({"segments": blank([(e.address, e.size) for e in anchored_at(40)], 2)}, False),
    ],
)
def test_what_no_one_here_would_have_written(change: dict[str, object], good: bool) -> None:
    """It is fetched by nobody, and the tier has it no longer."""
    vault = Vault("disk")
    h = StoringHarness(SPEC, [vault])
    h.ask(tokens(40).tolist(), 4)
    (desk,), fetches = h.desks, h.stores.fetches
    manifest: Manifest = desk.catalog.stored[chain().at(40)]
    seq = sequence(np.append(tokens(40), 7).astype(np.int32), root=ROOT)
    found = fetches.fetch(seq, chain(), desk, msgspec.structs.replace(manifest, **change), None)
    assert (found is not None) == good == (fetches.missed["foreign"] == 0) == fetches.pending
    if good:
        return
    kept = "address" in change  # which names nothing that is there
    assert (manifest.address in vault.manifests) == kept
    h.drain()
    h.check_vaults()


def test_what_has_a_higher_anchor_in_memory_is_no_base() -> None:
    """Accepted drafts ran past the one and not past the other: an anchor never goes back."""
    spec = small_spec(160, drafts=3)
    h = StoringHarness(spec, [Vault("disk")])
    h.ask(tokens(40).tolist(), 4)
    base = h.cache.match(ROOT, tokens(40)).checkpoint
    assert base is not None
    assert base.anchor == 40
    low = blank([(part.address(chain()), 100) for part in parts_of(spec, 40, 32)], 1)
    stored = h.desks[0].catalog.stored[chain().at(40)]
    manifest = msgspec.structs.replace(stored, anchor=32, segments=low)
    seq = sequence(np.append(tokens(40), 7).astype(np.int32), root=ROOT)
    found = h.stores.fetches.fetch(seq, chain(), h.desks[0], manifest, base)
    assert found is not None
    assert found.base is None
    assert list(found.parts) == [entry.address for entry in low]
