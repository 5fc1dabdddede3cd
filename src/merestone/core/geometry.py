"""Geometry: token counts to pages, under decode context parallelism, lag and windows.

Knows groups and page sizes. Must not know frames' contents, requests or ranks' devices.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """Layers that share a page table.

    ``page``: tokens of one page on one rank (a power of two). ``shard``: ranks over which tokens
    are dealt (DCP) in runs of ``interleave`` tokens; a page then covers ``page * shard`` tokens.
    ``lag``: rows missing below a boundary (an MTP layer's row p needs token p + 1, so 1).
    ``window``: only the last ``window`` rows are ever read. ``open``: rows exist only since the
    anchor.
    """

    name: str
    page: int
    shard: int = 1
    interleave: int = 1
    lag: int = 0
    window: int | None = None
    open: bool = False

    def __post_init__(self) -> None:
        if self.page < 1 or self.page & (self.page - 1):
            raise ValueError(f"group {self.name}: page of {self.page} tokens is no power of two")
        if self.page % self.interleave:
            raise ValueError(
                f"group {self.name}: interleave {self.interleave} does not divide page"
            )
        if self.window is not None and self.window < 1:
            raise ValueError(f"group {self.name}: window of {self.window} rows")

    @property
    def span(self) -> int:
        """Tokens that one page covers over all ranks."""
        return self.page * self.shard

    def rows(self, at: int, anchor: int = 0) -> tuple[int, int]:
        """Rows [first, last) that a checkpoint at ``at`` tokens needs (``anchor``: its anchor)."""
        last = max(0, at - self.lag)
        first = anchor if self.open else 0
        if self.window is not None:
            first = max(first, last - self.window)
        return min(first, last), last

    def floor(self, anchor: int) -> int:
        """The lowest row that any boundary at or above ``anchor`` needs.

        A holder whose anchor is at ``anchor`` keeps (and a pass writes) rows from here on: so every
        boundary of the open chunk finds its whole window.
        """
        first = anchor if self.open else 0
        if self.window is not None:
            first = max(first, anchor - self.lag - self.window)
        return first

    def reach(self, rows: int, drafts: int, proposes: bool) -> int:
        """Where the rows end that a step may write: it verifies ``drafts`` beyond its ``rows``
        tokens. To propose more it draws one, so that a row need not lag for the lack of it."""
        return max(0, rows + drafts - (0 if proposes else self.lag))

    def pages(self, first: int, last: int) -> tuple[int, int]:
        """Page numbers [begin, end) that hold rows [first, last)."""
        if first >= last:
            return first // self.span, first // self.span
        return first // self.span, -(-last // self.span)

    def most_pages(
        self, tokens: int, chunk: int, origin: tuple[int, int] | None = None, drafts: int = 0
    ) -> int:
        """The most frames that one request, alone, makes this group hold on its way to ``tokens``,
        with up to ``drafts`` rows under verification.

        ``origin``: (tokens, anchor) of a checkpoint to start from, whose own pages then do not
        count. Without it the answer also covers a start from any checkpoint inside the request:
        its pages stay beside the request's. Every step is settled before the next; a pass leaves
        less than a chunk of open rows (accepted drafts aside), decoding at most two.
        """
        last = self.reach(tokens, drafts, True)
        end = -(-last // self.span)
        begin = max(0, origin[0] - self.lag) // self.span if origin else 0
        if origin and self.open:
            begin = max(begin, origin[1] // self.span)
        most = max(0, end - begin)
        # Without an origin: the page that some origin's appends would copy, held twice.
        if origin is None and self.span > 1 and last > 0:
            most += 1
        if self.open:
            # What a step leaves behind and what it leaves: two chunks, and one of the origin's.
            kept = -(-(chunk + drafts) // self.span)
            return min(most, (2 if origin else 3) * kept)
        if self.window is not None:
            # Windows before and after a step, each kept for a whole chunk of boundaries.
            kept = -(-(self.window + chunk + 2 * drafts) // self.span) + 1
            theirs = 0 if origin else -(-self.window // self.span) + 1
            return min(most, 2 * kept + theirs)
        return most

    def owner(self, row: int) -> int:
        """The rank (within its DCP group) that holds ``row``."""
        return row // self.interleave % self.shard

    def local_row(self, row: int) -> int:
        """Where ``row`` lies inside its page on its owner's rank."""
        within = row % self.span
        return within // (self.interleave * self.shard) * self.interleave + within % self.interleave

    def local_count(self, rows: int, rank: int) -> int:
        """How many of the first ``rows`` rows of a page lie on ``rank`` (always a prefix there)."""
        whole, rest = divmod(rows, self.interleave * self.shard)
        return whole * self.interleave + min(max(rest - rank * self.interleave, 0), self.interleave)


def anchor_of(at: int, chunk: int) -> int:
    """The token count of the anchor below (or at) ``at``."""
    return at // chunk * chunk
