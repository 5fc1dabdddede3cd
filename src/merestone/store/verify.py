"""Verification: the bytes of every checkpoint are summed when it is sealed and when it is restored.

Decides only: it orders digests with the plan that seals or restores, and compares what the ranks
report in that plan's own result. Imported checkpoints were checked by their store; they are summed
when they are first restored.
"""

from __future__ import annotations

from merestone.core.cache import CacheSpec
from merestone.core.checkpoint import Checkpoint
from merestone.core.orders import Digest
from merestone.sched.flight import Flight
from merestone.sched.plan import StepResult
from merestone.store.chain import parts_of, place


class StateVerifier:
    """Implements ``sched.outside.Verifier``. Tickets are negative: stores count upwards."""

    def __init__(self, spec: CacheSpec) -> None:
        self.spec = spec

    def orders(self, flight: Flight) -> None:
        """A digest of each checkpoint that the plan seals or restores, taken at its end: until
        then nothing below a boundary changes."""
        for checkpoint in _subjects(flight).values():
            parts = parts_of(self.spec, checkpoint.at, checkpoint.anchor)
            segments = tuple(place(part, "", checkpoint) for part in parts)
            flight.stores.append(Digest(-checkpoint.id, segments))

    def judge(self, flight: Flight, result: StepResult) -> dict[int, str]:
        """See ``Verifier``: "checksum" for other bytes than before, "not_finite" for no number."""
        sums: dict[int, tuple[bytes, ...]] = {}
        wrong: dict[int, str] = {}
        for report in result.reports:  # in the order of ranks
            if report.ticket < 0:
                sums[-report.ticket] = sums.get(-report.ticket, ()) + report.sums
                if report.error:
                    wrong[-report.ticket] = report.error
        for key, checkpoint in _subjects(flight).items():
            assert key in sums, f"nobody has looked at checkpoint {key}"
            if not checkpoint.digest:
                checkpoint.digest = sums[key]
            elif checkpoint.digest != sums[key]:
                wrong.setdefault(key, "checksum")
        return wrong


def _subjects(flight: Flight) -> dict[int, Checkpoint]:
    return {checkpoint.id: checkpoint for _, checkpoint in (*flight.sealed, *flight.restored)}
