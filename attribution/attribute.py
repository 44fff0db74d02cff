"""Many requests: nanoseconds by phase and cell, checked against latencies taken from the raw times."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .pieces import sum_cells
from .records import ServerRequest
from .segment import Segmented, segment_request
from .tables import Int64, OutputTable
from .taxonomy import N_CELLS, PHASES
from .timeline import EngineTimeline

TTFT, DECODE, E2E, ITL = (PHASES.index(name) for name in ("ttft", "decode", "e2e", "itl"))


@dataclass(frozen=True, slots=True)
class Attributed:
    """What n requests spent. All int64, ns.

    ``cells_ns``: shape (n, len(PHASES), N_CELLS). ``latency_ns``: shape (n, len(PHASES)), from the
    requests' recorded times alone. ``residual_ns``: what the cells miss of it; not 0 is a defect.
    """

    cells_ns: Int64
    latency_ns: Int64

    @property
    def residual_ns(self) -> Int64:
        """latency - sum of cells, shape (n, len(PHASES))."""
        missed: Int64 = self.latency_ns - self.cells_ns.sum(axis=2)
        return missed

    def __len__(self) -> int:
        return len(self.latency_ns)

    @classmethod
    def concat(cls, parts: Sequence[Attributed]) -> Attributed:
        """The requests of all parts, in order."""
        if not parts:
            return cls(np.zeros((0, len(PHASES), N_CELLS), np.int64), np.zeros((0, len(PHASES)), np.int64))
        return cls(
            np.concatenate([part.cells_ns for part in parts]),
            np.concatenate([part.latency_ns for part in parts]),
        )


def cells_of(segmented: Segmented) -> Int64:
    """Ns by phase and cell of one request, shape (len(PHASES), N_CELLS)."""
    cells = np.zeros((len(PHASES), N_CELLS), np.int64)
    lengths = segmented.ends - segmented.starts
    n_ttft = segmented.n_ttft
    cells[TTFT] = sum_cells(segmented.cell[:n_ttft], lengths[:n_ttft])
    cells[DECODE] = sum_cells(segmented.cell[n_ttft:], lengths[n_ttft:])
    cells[E2E] = cells[TTFT] + cells[DECODE]
    cells[ITL] = segmented.itl_cells
    return cells


def latency_of(segmented: Segmented) -> Int64:
    """Latency by phase, shape (len(PHASES),): from the request's own times, not from its segments."""
    arrival, end = segmented.request.span_ns
    first = segmented.first_token_ns
    return np.array(
        [first - arrival, end - first, end - arrival, segmented.itl_to_ns - segmented.itl_from_ns], np.int64
    )


def attribute_segmented(requests: Iterable[Segmented]) -> Attributed:
    """Sum requests that were segmented already."""
    rows = [(cells_of(segmented), latency_of(segmented)) for segmented in requests]
    if not rows:
        return Attributed.concat([])
    return Attributed(np.stack([row[0] for row in rows]), np.stack([row[1] for row in rows]))


def attribute(
    requests: Iterable[ServerRequest],
    timelines: Mapping[str, EngineTimeline],
    outputs: Mapping[str, OutputTable],
) -> Attributed:
    """Segment every request and sum. ``timelines`` by engine uid, ``outputs`` by process uid."""
    return attribute_segmented(segment_request(request, timelines, outputs) for request in requests)
