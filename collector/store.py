"""Finished requests: exact for the newest ones, per minute for a day.

Memory, measured by ``benchmarks/agent_cost.py``: a request kept in detail costs 2 x 4 x 42 int64
cells (1.4 KB) and its attributes (about 2 KB); the newest :data:`MAX_WATERFALLS` and the slowest
:data:`MAX_SLOW` keep their segments as well (about 50 bytes a segment, a few hundred segments). What
is older is summed per minute and latency bucket: at most 24 hours x 60 x :data:`N_BUCKETS` rows.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stratoscope.attribution.attribute import E2E, Attributed
from stratoscope.attribution.tables import Int64
from stratoscope.attribution.taxonomy import N_CELLS, PHASES

from .finished import Finished

MAX_WATERFALLS = 2000
MAX_SLOW = 500
DAY_MINUTES = 24 * 60
# Latency buckets of the day's history: powers of two from 1 ms, the last one open.
BUCKET_EDGES_NS = tuple(0 if power == 0 else (1 << (power - 1)) * 1_000_000 for power in range(19))
N_BUCKETS = len(BUCKET_EDGES_NS)


@dataclass(slots=True)
class Row:
    """A stored request; ``finished`` is dropped when it is neither new nor slow any more."""

    trace_id: str
    end_wall_ns: int
    cells_ns: Int64
    latency_ns: Int64
    attributes: dict[str, Any]
    finished: Finished | None


@dataclass(slots=True)
class Minute:
    """Sums of one minute: by latency bucket, (requests, cells_ns, latency_ns)."""

    requests: dict[int, int] = field(default_factory=dict)
    cells_ns: dict[int, Int64] = field(default_factory=dict)
    latency_ns: dict[int, Int64] = field(default_factory=dict)


class RequestStore:
    """Not safe for use by several threads; its owner holds a lock."""

    def __init__(self, max_requests: int) -> None:
        self._max = max_requests
        self._rows: OrderedDict[int, Row] = OrderedDict()
        self._by_trace: dict[str, list[int]] = {}
        self._with_segments: deque[int] = deque()
        self._slow: list[tuple[int, int]] = []  # heap of (e2e ns, row number)
        self._numbers = itertools.count()
        self._minutes: OrderedDict[int, Minute] = OrderedDict()
        self.total = 0
        self.outcomes: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, finished: Finished) -> None:
        """Store one request; the oldest goes when there are too many."""
        number = next(self._numbers)
        self.total += 1
        outcome = str(finished.attributes.get("outcome", ""))
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
        self._rows[number] = Row(
            finished.trace_id, finished.end_wall_ns, finished.cells_ns, finished.latency_ns,
            finished.attributes, finished,
        )  # fmt: skip
        self._by_trace.setdefault(finished.trace_id, []).append(number)
        self._keep_segments(number, int(finished.latency_ns[E2E]))
        self._sum_minute(finished)
        if len(self._rows) > self._max:
            self._drop_oldest()

    def _keep_segments(self, number: int, e2e_ns: int) -> None:
        self._with_segments.append(number)
        if len(self._slow) < MAX_SLOW:
            heapq.heappush(self._slow, (e2e_ns, number))
        elif e2e_ns > self._slow[0][0]:
            self._forget_segments(heapq.heapreplace(self._slow, (e2e_ns, number))[1])
        if len(self._with_segments) > MAX_WATERFALLS:
            old = self._with_segments.popleft()
            if not any(number == old for _, number in self._slow):
                self._forget_segments(old)

    def _forget_segments(self, number: int) -> None:
        row = self._rows.get(number)
        newest = self._with_segments[0] if self._with_segments else number + 1
        if row is not None and number < newest:
            row.finished = None

    def _drop_oldest(self) -> None:
        number, row = self._rows.popitem(last=False)
        numbers = self._by_trace[row.trace_id]
        numbers.remove(number)
        if not numbers:
            del self._by_trace[row.trace_id]

    def _sum_minute(self, finished: Finished) -> None:
        minute_number = finished.end_wall_ns // 60_000_000_000
        minute = self._minutes.get(minute_number)
        if minute is None:
            minute = self._minutes[minute_number] = Minute()
            while len(self._minutes) > DAY_MINUTES:
                self._minutes.popitem(last=False)
        bucket = int(np.searchsorted(BUCKET_EDGES_NS, int(finished.latency_ns[E2E]), "right")) - 1
        if bucket not in minute.requests:
            minute.requests[bucket] = 0
            minute.cells_ns[bucket] = np.zeros((len(PHASES), N_CELLS), np.int64)
            minute.latency_ns[bucket] = np.zeros(len(PHASES), np.int64)
        minute.requests[bucket] += 1
        minute.cells_ns[bucket] += finished.cells_ns
        minute.latency_ns[bucket] += finished.latency_ns

    # --- reading --------------------------------------------------------------------------------

    def rows(self, since_wall_ns: int = 0, model: str | None = None, outcome: str | None = None) -> list[Row]:
        """Stored requests that ended at or after ``since_wall_ns``, oldest first."""
        return [
            row
            for row in self._rows.values()
            if row.end_wall_ns >= since_wall_ns
            and (model is None or row.attributes.get("model") == model)
            and (outcome is None or row.attributes.get("outcome") == outcome)
        ]

    def find(self, trace_id: str) -> Row | None:
        """The newest stored request of a trace."""
        numbers = self._by_trace.get(trace_id)
        return self._rows[numbers[-1]] if numbers else None

    def covers_since_wall_ns(self) -> int:
        """From when on every request is still here in detail; 0 if none was dropped."""
        if self.total == len(self._rows) or not self._rows:
            return 0
        return next(iter(self._rows.values())).end_wall_ns

    def minutes(self, since_wall_ns: int) -> Iterator[tuple[int, int, int, Int64, Int64]]:
        """(start of the minute in Unix ns, bucket, requests, cells_ns, latency_ns) since then."""
        for number, minute in self._minutes.items():
            start_ns = number * 60_000_000_000
            if start_ns + 60_000_000_000 > since_wall_ns:
                for bucket, requests in minute.requests.items():
                    yield start_ns, bucket, requests, minute.cells_ns[bucket], minute.latency_ns[bucket]


def attributed(rows: list[Row]) -> Attributed:
    """The numbers of stored requests as one table."""
    if not rows:
        return Attributed.concat([])
    return Attributed(np.stack([row.cells_ns for row in rows]), np.stack([row.latency_ns for row in rows]))
