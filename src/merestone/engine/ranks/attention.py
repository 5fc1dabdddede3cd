"""How long somebody has been silent, to one who may have stood still himself.

Must not know who listens to whom.
"""

from __future__ import annotations

import time

PULSES = 5
"""Signs of life within the time after which a rank counts as lost."""


class Attention:
    """A clock that runs while its owner listens, and looks at it at least every ``most_s``.

    Whoever was stopped for longer (by a debugger, a busy machine, a pause of all of it) has not
    heard what was sent meanwhile, and may wake before it can be read: of such a gap only ``most_s``
    count.
    """

    def __init__(self, most_s: float) -> None:
        self.now = 0.0
        """Seconds of listening, as of the last look."""
        self._most_s = most_s
        self._looked = time.monotonic()

    def look(self) -> float:
        """Seconds of listening so far."""
        before, self._looked = self._looked, time.monotonic()
        self.now += min(self._looked - before, self._most_s)
        return self.now
