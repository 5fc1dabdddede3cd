"""Prometheus metrics, in a registry of their own.

What a request saw (hits, latencies, tokens) is counted here from its events; what the engine
holds is read from ``Engine.stats`` at every scrape.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from merestone.engine.api import CacheReport, Engine, Finished, GenerateRequest

LATENCIES = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)

ENGINE_COUNTERS = {
    "checkpoints_sealed": ("kind", "Checkpoints made of running requests"),
    "checkpoints_published": ("kind", "Checkpoints made visible to lookups"),
    "checkpoints_discarded": ("kind reason", "Checkpoints refused or dropped, not for room"),
    "checkpoints_restored": ("kind", "Checkpoints that a request resumed from"),
    "checkpoints_evicted": ("kind", "Checkpoints dropped for their frames"),
    "saved_tokens": ("kind", "Tokens of the checkpoints that requests resumed from"),
    "states_not_finite": (None, "Requests whose state was not finite"),
    "states_changed": (None, "Restored checkpoints with other bytes than when sealed (--verify)"),
    "tokens_computed": (None, "Token rows computed, recomputed ones included"),
    "steps": (None, "Steps run"),
    "draft_steps": (None, "Works that verified drafts"),
    "drafts_verified": ("place", "Drafts verified, by place behind the newest token"),
    "drafts_accepted": ("place", "Drafts that were what the model drew"),
    "preemptions": (None, "Requests that lost their slot or their frames"),
    "store_written": ("tier", "Checkpoints written to a store"),
    "store_written_bytes": ("tier", "Bytes of segments written, shared ones once"),
    "store_not_written": ("reason", "Checkpoints that a store did not take"),
    "store_evicted": ("tier", "Checkpoints a store dropped for its budget"),
    "store_imported": (None, "Checkpoints that came back from a store"),
    "store_imported_tokens": (None, "Tokens of those"),
    "store_missed": ("reason", "Look-ups and reads of stores that came to nothing"),
}
"""Engine statistics that are counters: name, its labels (None: a plain number), help."""

ENGINE_GAUGES = {
    "requests_running": (None, "Requests with a slot"),
    "requests_waiting": (None, "Requests without a slot"),
    "checkpoints": ("kind", "Checkpoints that can be resumed from"),
    "checkpoint_bytes": ("kind", "Bytes that only one checkpoint holds"),
    "checkpoints_spared": (None, "Checkpoints that a time to live spares from eviction"),
    "frames_total": (None, "Frames of the pool"),
    "frames_used": (None, "Frames that something refers to"),
    "frames_free": (None, "Frames that nothing refers to"),
    "frames_anchors": (None, "Frames held by recurrent anchors"),
    "store_checkpoints": ("tier", "Checkpoints in a store, or known to be in a shared one"),
    "store_bytes": ("tier", "Bytes of those"),
    "store_waiting": ("tier", "Checkpoints that wait to be written"),
    "store_failing": ("tier", "1 while a store is left alone because it failed"),
}
"""Engine statistics that are gauges. Other plain numbers are exported as gauges as well."""


class Metrics:
    """All metrics of a server."""

    def __init__(self, engine: Engine) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self._requests = Counter(
            "merestone_requests", "Requests by how they ended", ["reason"], registry=registry
        )
        self._refused = Counter(
            "merestone_refused", "HTTP calls answered with an error", ["status"], registry=registry
        )
        self._prompt = Counter(
            "merestone_prompt_tokens", "Prompt tokens of started requests", registry=registry
        )
        self._restored = Counter(
            "merestone_restored_tokens", "Prompt tokens restored", registry=registry
        )
        self._generated = Counter(
            "merestone_generated_tokens", "Tokens generated", registry=registry
        )
        self._lookups = Counter(
            "merestone_lookups",
            "Started requests by what the cache had: exact, partial, no_boundary (known tokens, "
            "nothing to resume from), miss (unknown tokens) or not_eligible (not looked up)",
            ["outcome"],
            registry=registry,
        )
        self._lost = Counter(
            "merestone_reuse_lost_tokens",
            "Tokens that matched and were not restored, by reason",
            ["reason"],
            registry=registry,
        )
        self._first = Histogram(
            "merestone_time_to_first_token_seconds",
            "From submission to the first token",
            buckets=LATENCIES,
            registry=registry,
        )
        self._between = Histogram(
            "merestone_inter_token_seconds",
            "Between steps that gave tokens of a choice",
            buckets=LATENCIES,
            registry=registry,
        )
        smallest = Gauge(
            "merestone_smallest_reusable_tokens",
            "The shortest prompt that can be restored",
            registry=registry,
        )
        smallest.set(engine.info.smallest_reusable)
        registry.register(_EngineCollector(engine))

    def started(self, request: GenerateRequest, cache: CacheReport) -> None:
        """The first choice of a request has begun."""
        self._prompt.inc(len(request.tokens))
        self._restored.inc(cache.restored)
        self._lookups.labels(outcome(request, cache)).inc()
        if cache.matched > cache.restored:
            self._lost.labels(cache.lost or "unknown").inc(cache.matched - cache.restored)

    def token(self, gap: float | None) -> None:
        """A token; ``gap`` in seconds since the choice's last step, if it had one."""
        self._generated.inc()
        if gap is not None:
            self._between.observe(gap)

    def finished(self, end: Finished) -> None:
        """A choice has ended."""
        self._requests.labels(end.reason).inc()
        if end.timing.first_token_s is not None:
            self._first.observe(end.timing.first_token_s)

    def left(self, choices: int, reason: str) -> None:
        """Nobody waits for these choices any more: the client is gone, or was told an error."""
        self._requests.labels(reason).inc(choices)

    def refused(self, status: int) -> None:
        """A call was answered with an error."""
        self._refused.labels(str(status)).inc()

    def render(self) -> bytes:
        """The text format of Prometheus."""
        return generate_latest(self.registry)


def outcome(request: GenerateRequest, cache: CacheReport) -> str:
    """What a lookup found, in one word."""
    if not request.cache or request.prompt_logprobs is not None:
        return "not_eligible"
    if cache.restored == len(request.tokens):
        return "exact"
    if cache.restored:
        return "partial"
    return "no_boundary" if cache.matched else "miss"


class _EngineCollector(Collector):
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterable[Metric]:
        stats = self._engine.stats()
        for name, (label, text) in ENGINE_COUNTERS.items():
            if name in stats:
                counter = CounterMetricFamily(f"merestone_{name}", text, labels=_labels(label))
                yield _fill(counter, stats[name], label)
        for name, (label, text) in ENGINE_GAUGES.items():
            if name in stats:
                gauge = GaugeMetricFamily(f"merestone_{name}", text, labels=_labels(label))
                yield _fill(gauge, stats[name], label)
        for name, value in stats.items():
            if name in ENGINE_COUNTERS or name in ENGINE_GAUGES or isinstance(value, Mapping):
                continue
            other = GaugeMetricFamily(f"merestone_engine_{name}", "Reported by the engine")
            yield _fill(other, value, None)

    def describe(self) -> Iterable[Metric]:
        return []  # the names depend on the engine


def _labels(label: str | None) -> list[str]:
    return [] if label is None else label.split()


def _fill(
    family: CounterMetricFamily | GaugeMetricFamily,
    value: float | Mapping[str, float],
    label: str | None,
) -> Metric:
    if label is None:
        assert not isinstance(value, Mapping), f"{family.name} has no label"
        family.add_metric([], value)
        return family
    assert isinstance(value, Mapping), f"{family.name} needs a count for each {label}"
    for key, count in value.items():
        family.add_metric(key.split(), count)
    return family
