"""A stretch of time cut into labelled pieces, and what is done with such cuts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .tables import Int64
from .taxonomy import CELL_INDEX, N_CELLS

CLOCK_SLACK_NS = 1_000_000  # recorded times that contradict each other by more are not believed
STEPS_MISSING = CELL_INDEX["unattributed.steps_missing"]
CLOCK = CELL_INDEX["unattributed.clock"]


class Pieces(NamedTuple):
    """Piece i is [edges[i], edges[i+1]) with cell index ``cell[i]``; edges never decrease.

    ``step`` is the step number that a piece belongs to (-1: none), ``reason`` a WaitReason or 0.
    All arrays are int64; ``edges`` has one element more than the others.
    """

    edges: Int64
    cell: Int64
    step: Int64
    reason: Int64

    @property
    def lengths(self) -> Int64:
        """Length of each piece in ns."""
        return np.diff(self.edges)


_NONE = np.zeros(0, np.int64)


def nothing(at_ns: int) -> Pieces:
    """No piece at all, at ``at_ns``."""
    return Pieces(np.array([at_ns], np.int64), _NONE, _NONE, _NONE)


def one(start_ns: int, end_ns: int, cell: int) -> Pieces:
    """One piece; none if it has no length."""
    if end_ns <= start_ns:
        return nothing(start_ns)
    return Pieces(
        np.array([start_ns, end_ns], np.int64), np.array([cell]), np.array([-1]), np.zeros(1, np.int64)
    )


def join(parts: Sequence[Pieces]) -> Pieces:
    """Parts that follow on each other as one; there must be at least one."""
    filled = [part for part in parts if len(part.cell)]
    if not filled:
        return parts[0]
    if len(filled) == 1:
        return filled[0]
    return Pieces(
        np.concatenate([filled[0].edges[:1], *(part.edges[1:] for part in filled)]),
        np.concatenate([part.cell for part in filled]),
        np.concatenate([part.step for part in filled]),
        np.concatenate([part.reason for part in filled]),
    )


def clip(pieces: Pieces, start_ns: int, end_ns: int) -> Pieces:
    """What lies in [start_ns, end_ns); time outside of the pieces' own range is not invented."""
    edges = pieces.edges
    start_ns, end_ns = max(start_ns, int(edges[0])), min(end_ns, int(edges[-1]))
    if end_ns <= start_ns or not len(pieces.cell):
        return nothing(start_ns)
    low = int(edges.searchsorted(start_ns, "right")) - 1
    high = int(edges.searchsorted(end_ns, "left"))
    inner = edges[low : high + 1].copy()
    inner[0], inner[-1] = start_ns, end_ns
    return Pieces(inner, pieces.cell[low:high], pieces.step[low:high], pieces.reason[low:high])


def fill(pieces: Pieces, start_ns: int, end_ns: int, cell: int = STEPS_MISSING) -> Pieces:
    """Exactly [start_ns, end_ns): clipped, and padded with ``cell`` where the pieces do not reach."""
    if end_ns <= start_ns:
        return nothing(start_ns)
    inside = clip(pieces, start_ns, end_ns)
    if not len(inside.cell):
        return one(start_ns, end_ns, cell)
    first, last = int(inside.edges[0]), int(inside.edges[-1])
    if first == start_ns and last == end_ns:
        return inside
    return join([one(start_ns, first, cell), inside, one(last, end_ns, cell)])


def cut(pieces: Pieces, times_ns: Int64) -> Pieces:
    """The same pieces with additional edges at those ``times_ns`` that lie inside."""
    edges = pieces.edges
    inside = times_ns[(times_ns > edges[0]) & (times_ns < edges[-1])]
    if not len(inside):
        return pieces
    finer = np.union1d(edges, inside)
    source = edges.searchsorted(finer[:-1], "right") - 1
    return Pieces(finer, pieces.cell[source], pieces.step[source], pieces.reason[source])


def paint(pieces: Pieces, start_ns: int, end_ns: int, cell: int) -> Pieces:
    """The same stretch with everything in [start_ns, end_ns) labelled ``cell``."""
    if end_ns <= start_ns or not len(pieces.cell):
        return pieces
    finer = cut(pieces, np.array([start_ns, end_ns], np.int64))
    inside = (finer.edges[:-1] >= start_ns) & (finer.edges[:-1] < end_ns)
    return Pieces(
        finer.edges,
        np.where(inside, cell, finer.cell),
        np.where(inside, -1, finer.step),
        np.where(inside, 0, finer.reason),
    )


def sum_cells(cell: Int64, lengths: Int64) -> Int64:
    """Total ns of each cell, int64 of shape (N_CELLS,): integer sums, exact at any size
    (``np.bincount`` with weights adds floats, exact only below 2**53 ns)."""
    total = np.zeros(N_CELLS, np.int64)
    np.add.at(total, cell, lengths)
    return total


def sum_windows(pieces: Pieces, starts_ns: Int64, ends_ns: Int64) -> Int64:
    """Total ns of each cell inside disjoint, sorted windows; time outside of the pieces is not counted."""
    used = ends_ns > starts_ns
    starts_ns, ends_ns = starts_ns[used], ends_ns[used]
    if not len(starts_ns) or not len(pieces.cell):
        return np.zeros(N_CELLS, np.int64)
    edges = pieces.edges
    all_edges = np.unique(np.concatenate((edges, starts_ns, ends_ns)))
    left = all_edges[:-1]
    window = starts_ns.searchsorted(left, "right") - 1
    piece = edges.searchsorted(left, "right") - 1
    inside = (window >= 0) & (left < ends_ns[window]) & (piece >= 0) & (piece < len(pieces.cell))
    return sum_cells(pieces.cell[piece[inside]], np.diff(all_edges)[inside])
