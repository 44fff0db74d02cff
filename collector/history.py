"""Tables as they arrive, window by window, kept for a while and given back for a stretch of time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Generic, TypeVar

import numpy as np

from stratoscope.attribution.tables import Table

T = TypeVar("T", bound=Table)
_MAX_CHUNKS: Final = 4096


@dataclass(slots=True)
class _Chunk(Generic[T]):
    table: T
    low_ns: int
    high_ns: int
    arrived_s: float


class TableHistory(Generic[T]):
    """The recent rows of one table. Age is counted from arrival, by the caller's clock.

    ``times`` names the columns that bound a row in time (0 there: not recorded); ``max_rows``
    bounds the memory, at 8 bytes a row and column.
    """

    def __init__(self, kind: type[T], times: tuple[str, ...], max_rows: int) -> None:
        self._kind, self._times, self._max_rows = kind, times, max_rows
        self._chunks: list[_Chunk[T]] = []
        self.rows = 0

    @property
    def size_bytes(self) -> int:
        """What the rows take."""
        return 8 * self.rows * len(self._kind.COLUMNS)

    def add(self, table: T, now_s: float) -> int:
        """Keep the rows of a window; returns how many old rows had to go for lack of room."""
        if not len(table):
            return 0
        low, high = self._bounds(table)
        self._chunks.append(_Chunk(table, low, high, now_s))
        self.rows += len(table)
        evicted = 0
        while len(self._chunks) > 1 and (self.rows > self._max_rows or len(self._chunks) > _MAX_CHUNKS):
            evicted += self.drop_first()
        return evicted

    def trim(self, before_s: float) -> None:
        """Forget windows that arrived before ``before_s``."""
        while self._chunks and self._chunks[0].arrived_s < before_s:
            self.drop_first()

    def between(self, from_ns: int, to_ns: int) -> T:
        """All rows of the windows that touch [from_ns, to_ns], and of one window on either side."""
        chunks = sorted(self._chunks, key=lambda chunk: chunk.low_ns)
        wanted = [i for i, c in enumerate(chunks) if c.high_ns >= from_ns and c.low_ns <= to_ns]
        if wanted:
            low, high = max(wanted[0] - 1, 0), wanted[-1] + 2
        else:  # between two windows
            after = sum(chunk.low_ns <= to_ns for chunk in chunks)
            low, high = max(after - 1, 0), after + 1
        return self._kind.concat([chunk.table for chunk in chunks[low:high]])

    def last(self, rows: int) -> T:
        """At least the ``rows`` rows that arrived last, as far as they are kept."""
        found: list[T] = []
        count = 0
        for chunk in reversed(self._chunks):
            found.append(chunk.table)
            count += len(chunk.table)
            if count >= rows:
                break
        return self._kind.concat(found)

    def drop_first(self) -> int:
        """Forget the window that arrived first (there must be one); returns its number of rows."""
        count = len(self._chunks.pop(0).table)
        self.rows -= count
        return count

    def _bounds(self, table: T) -> tuple[int, int]:
        times = np.concatenate([table[name] for name in self._times])
        known = times[times > 0]
        return (int(known.min()), int(known.max())) if len(known) else (0, 0)
