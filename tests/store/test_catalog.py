"""The catalog and chains, without an engine."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_device import small_spec
from merestone.store.catalog import Catalog, blank
from merestone.store.chain import Chain, parts_of
from merestone.store.manifest import FORMAT, Manifest, StoreFault, decode, encode
from store.storing import audit_catalog

CHUNK = 8
SPEC = small_spec(chunk=CHUNK, drafts=3)


def chain(tokens, root=("", ""), identity="one") -> Chain:
    return Chain(identity, root, np.array(tokens, np.int32), CHUNK)


def draft(tokens, size: int = 100) -> Manifest:
    links = chain(tokens)
    at, anchor = len(tokens), len(tokens) // CHUNK * CHUNK
    parts = [part.address(links) for part in parts_of(SPEC, at, anchor)]
    return Manifest(
        FORMAT, links.at(at), links.at(anchor), "one", "a test", at, anchor, "prompt", 1,
        blank([(address, size) for address in parts], 1),
    )  # fmt: skip


TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=40)


@given(TOKENS, TOKENS)
def test_addresses_are_those_of_the_tokens_alone(left, right) -> None:
    one, other = chain(left), chain(right)
    for at in range(1, min(len(left), len(right)) + 1):
        assert (one.at(at) == other.at(at)) == (left[:at] == right[:at])
        assert one.at(at) != chain(left, ("", "salt")).at(at)
        assert one.at(at) != chain(left, identity="two").at(at)


@given(TOKENS)
def test_what_two_boundaries_share_has_one_address(tokens) -> None:
    """Complete pages, and the anchor of one chunk; never a part-filled page or a hidden row."""
    longer = chain([*tokens, 1])
    at = len(tokens)
    mine = {p.address(longer): p for p in parts_of(SPEC, at, at // CHUNK * CHUNK)}
    theirs = {p.address(longer): p for p in parts_of(SPEC, at + 1, (at + 1) // CHUNK * CHUNK)}
    for address in mine.keys() & theirs.keys():
        assert mine[address] == theirs[address]
        if mine[address].name not in ("anchor", "hidden"):
            (group,) = [g for g in SPEC.groups if g.name == mine[address].name]
            assert mine[address].last == group.span
    hidden = [p.name for a, p in mine.items() if a not in theirs]
    assert "hidden" in hidden


@given(st.lists(st.tuples(TOKENS, st.sampled_from(["write", "fail", "remove", "lose", "find"])),
                max_size=40), st.sampled_from([None, 2500, 6000]))  # fmt: skip
@settings(max_examples=150)
def test_every_count_is_right_whatever_happens(actions, budget) -> None:
    catalog, kept, disk = Catalog(budget), {}, set()
    for tokens, action in actions:
        manifest = draft(tokens)
        if action == "find":
            links = chain(tokens)
            there = [at for at in range(len(tokens) + 1) if links.at(at) in kept]
            for above in (0, len(tokens) // 2, *(at + more for at in there for more in (-1, 0))):
                deeper = [(at, links.at(at)) for at in reversed(there) if at > above]
                assert list(catalog.boundaries(links, above)) == deeper
                found = catalog.find(links, above)
                assert (found.at if found else 0) == max((at for at, _ in deeper), default=0)
        elif action == "remove" and manifest.address in kept:
            disk -= set(catalog.remove(manifest.address))
            del kept[manifest.address]
        elif action == "lose" and manifest.segments[0].address in catalog.segments:
            waste = catalog.lose([manifest.segments[0].address])
            disk -= set(waste.segments)
            assert manifest.segments[0].address not in catalog.segments
            for address in waste.manifests:
                del kept[address]
        elif action in ("write", "fail") and manifest.address not in catalog:
            begun = catalog.begin(manifest)
            if begun is None:
                continue
            missing, waste = begun
            assert missing.isdisjoint(disk - set(waste.segments))
            disk -= set(waste.segments)
            for address in waste.manifests:
                del kept[address]
            if action == "fail":
                disk -= set(catalog.cancel(manifest.address))
            else:
                disk |= missing
                catalog.complete(manifest, {a: (90, (bytes(16),)) for a in missing})
                catalog.commit(manifest.address)
                kept[manifest.address] = manifest
        audit_catalog(catalog)
        assert set(catalog.stored) == set(kept)
        assert set(catalog.segments) == disk
        assert budget is None or catalog.total <= budget


def test_the_least_recently_used_goes_first() -> None:
    catalog = Catalog(4000)
    one, two, three = ([k] * 6 for k in range(3))
    for tokens in (one, two):
        catalog.begin(draft(tokens))
        catalog.commit(draft(tokens).address)
    catalog.touch(draft(one).address)
    size = catalog.total // 2
    catalog.budget = 2 * size + size // 2
    missing_waste = catalog.begin(draft(three))
    assert missing_waste is not None
    assert missing_waste[1].manifests == [draft(two).address]
    catalog.budget = 10
    assert catalog.begin(draft([5] * 6)) is None


def test_a_longer_one_of_the_same_chunk_is_not_found() -> None:
    catalog = Catalog()
    for size in (3, 5):
        catalog.add(draft([1] * size))
    assert list(catalog.boundaries(chain([1] * 3), 0)) == [(3, chain([1] * 3).at(3))]
    assert list(catalog.boundaries(chain([1] * 4), 0)) == [(3, chain([1] * 3).at(3))]


def test_a_budget_may_be_used_to_its_last_byte() -> None:
    one, two, three = (draft([key] * 6) for key in range(3))
    size = Catalog()
    size.add(one)
    catalog = Catalog(2 * size.total)
    for manifest in (one, two):
        begun = catalog.begin(manifest)
        assert begun is not None
        assert begun[1].manifests == []
        catalog.commit(manifest.address)
    catalog.budget = size.total
    begun = catalog.begin(three)
    assert begun is not None
    assert begun[1].manifests == [one.address, two.address]


def test_what_is_being_written_makes_no_room() -> None:
    one, two = draft([1] * 6), draft([2] * 6)
    size = Catalog()
    size.add(one)
    catalog = Catalog(2 * size.total - 1)
    assert catalog.begin(one) is not None
    assert catalog.begin(two) is None
    catalog.commit(one.address)
    assert catalog.begin(two) is not None


def test_written_sizes_replace_the_estimates() -> None:
    """In the bytes of the manifest, too."""
    catalog, manifest = Catalog(), draft([1] * 6, size=70_000)
    begun = catalog.begin(manifest)
    assert begun is not None
    catalog.complete(manifest, {address: (90, (bytes(16),)) for address in begun[0]})
    audit_catalog(catalog)


def test_manifests_are_strict() -> None:
    manifest = draft([1, 2, 3])
    data = encode(manifest)
    assert decode(data, manifest.address) == manifest
    for position in range(0, len(data), 7):
        broken = data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]
        with pytest.raises(StoreFault) as caught:
            decode(broken, manifest.address)
        assert caught.value.reason == "damaged"
    with pytest.raises(StoreFault) as caught:
        decode(data, "another")
    assert caught.value.reason == "foreign"
    for end in (0, 3, 16, len(data) - 1):
        with pytest.raises(StoreFault):
            decode(data[:end], manifest.address)
