"""Random caches: small pools, up to four groups of every geometry."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from merestone.core.cache import CacheSpec
from merestone.core.geometry import GroupSpec

# The same examples everywhere, and no clock: a failure on one machine is one on all.
settings.register_profile(
    "core",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
PROFILE = settings.get_profile("core")


@st.composite
def group_specs(draw: st.DrawFn, chunk: int, name: str) -> GroupSpec:
    opens = draw(st.booleans())
    page = draw(st.sampled_from([1, 2, 4] if opens else [1, 2, 4, 4, 8, 8]))
    shard = draw(st.sampled_from([1, 2] if opens and page * 2 <= chunk else [1, 2, 4]))
    if opens and chunk % (page * shard):
        shard = 1
    interleave = draw(st.sampled_from([n for n in (1, 2, 4) if page % n == 0]))
    window = draw(st.sampled_from([None, None, 1, 3, 6, 9]))
    lag = draw(st.sampled_from([0, 0, 1, 2]))
    return GroupSpec(name, page, shard, interleave, lag, window, opens)


@st.composite
def cache_specs(draw: st.DrawFn) -> CacheSpec:
    chunk = draw(st.sampled_from([4, 8]))
    count = draw(st.integers(1, 4))
    groups = tuple(draw(group_specs(chunk, f"g{number}")) for number in range(count))
    frames = draw(st.integers(14, 90))
    anchor_frames, hidden_rows = draw(st.integers(0, 2)), draw(st.integers(1, 3))
    drafts = draw(st.sampled_from([0, 1, 3]))
    return CacheSpec(frames, 64, groups, chunk, anchor_frames, hidden_rows, drafts)
