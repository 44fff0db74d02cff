"""From recorded points in time to a gapless stretch of pieces."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .pieces import CLOCK, CLOCK_SLACK_NS, Pieces, join, nothing, one, paint
from .tables import Int64
from .taxonomy import CELL_INDEX

Filler = Callable[[int, int], Pieces]
FLUSH = CELL_INDEX["framework.flush"]


class Stretch:
    """Cuts [start, end) at points that are given in the order in which they should have happened.

    A point of 0 was not recorded: its time falls to the next label. A point earlier than one before
    it is moved up to it; if it was earlier by more than a millisecond, the time that the two
    contradict each other about is ``unattributed.clock``. Points after the end are the end; with
    ``closed`` (nothing can have happened later) that is a contradiction too.
    """

    def __init__(self, start_ns: int, end_ns: int, closed: bool) -> None:
        self.start_ns = start_ns
        self.end_ns = end_ns
        self._closed = closed
        self._at = start_ns
        self._latest = start_ns
        self._parts: list[Pieces] = []
        self._edges = [start_ns]  # plain labels since the last part: arrays are made once
        self._cells: list[int] = []
        self._clock: list[tuple[int, int]] = []

    def to(self, point_ns: int, label: int | Filler, soft: bool = False) -> None:
        """Label the time from the last point to this one; ``soft``: points may overlap by nature."""
        if point_ns <= 0:
            return
        if point_ns < self._latest - CLOCK_SLACK_NS and not soft:
            self._clock.append((point_ns, self._latest))
        if self._closed and point_ns > self.end_ns + CLOCK_SLACK_NS and self._latest <= self.end_ns:
            self._clock.append((self._at, self.end_ns))
        self._latest = max(self._latest, point_ns)
        self._advance(min(point_ns, self.end_ns), label)

    def rest(self, label: int | Filler) -> Pieces:
        """Label what is left until the end, and return everything."""
        self._advance(self.end_ns, label)
        self._close_plain()
        pieces = join([nothing(self.start_ns), *self._parts])
        for start, end in self._clock:
            pieces = paint(pieces, max(start, self.start_ns), min(end, self.end_ns), CLOCK)
        return pieces

    def _close_plain(self) -> None:
        if self._cells:
            count = len(self._cells)
            edges, cell = np.array(self._edges, np.int64), np.array(self._cells, np.int64)
            self._parts.append(Pieces(edges, cell, np.full(count, -1, np.int64), np.zeros(count, np.int64)))
            self._cells = []

    def _advance(self, to_ns: int, label: int | Filler) -> None:
        if to_ns <= self._at:
            return
        if isinstance(label, int):
            self._edges.append(to_ns)
            self._cells.append(label)
        else:
            self._close_plain()
            self._parts.append(label(self._at, to_ns))
            self._edges = [to_ns]
        self._at = to_ns


def between_flushes(starts_ns: Int64, ends_ns: Int64, otherwise: int) -> Filler:
    """A label for time in which a response is written: flush inside its sends, ``otherwise`` else."""

    def label(start_ns: int, end_ns: int) -> Pieces:
        low = int(ends_ns.searchsorted(start_ns, "right"))
        high = int(starts_ns.searchsorted(end_ns, "left"))
        if high <= low:
            return one(start_ns, end_ns, otherwise)
        inner = np.stack((starts_ns[low:high], ends_ns[low:high]), 1).ravel()
        edges = np.concatenate(([start_ns], np.clip(inner, start_ns, end_ns), [end_ns])).astype(np.int64)
        cell = np.full(len(edges) - 1, otherwise, np.int64)
        cell[1::2] = FLUSH
        used = np.diff(edges) > 0
        count = int(used.sum())
        return Pieces(
            np.append(edges[:-1][used], end_ns),
            cell[used],
            np.full(count, -1, np.int64),
            np.zeros(count, np.int64),
        )

    return label
