"""Labelled intervals laid over each other: the mechanics under :mod:`.timeline`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from .tables import MAX_TIME_NS, Bool, Int64

NEVER_NS: Final = MAX_TIME_NS


class Layer(NamedTuple):
    """Intervals [start, end) with a kind and a step row each; all int64 of one length."""

    start: Int64
    end: Int64
    kind: Int64
    row: Int64

    def disjoint(self, drop_empty: bool = True) -> Layer:
        """Disjoint and in order: where intervals overlap, the one that stands first keeps the time."""
        if not len(self.start):
            return self
        reached = np.maximum.accumulate(np.maximum(self.end, self.start))
        start = np.maximum(self.start, np.concatenate((self.start[:1], reached[:-1])))
        end = np.maximum(self.end, start)
        if not drop_empty:
            return Layer(start, end, self.kind, self.row)
        kept = end > start
        return Layer(start[kept], end[kept], self.kind[kept], self.row[kept])


def overlay(
    base: tuple[Int64, Int64, Int64] | None,
    lower: Sequence[Layer],
    upper: Sequence[Layer],
    background: int = 0,
) -> tuple[Int64, Int64, Int64]:
    """Lay layers over ``base``: (edges, kind, row) of the elementary pieces, not merged.

    Without a base the ground is ``background``. Layers of ``upper`` hide those of ``lower``. Within
    ``lower`` (or ``upper``) the smallest row wins among layers that cover the same time, and an
    interval without a row (-1) wins over all.
    """
    layers = [*lower, *upper]
    times = [part for layer in layers for part in (layer.start, layer.end)]
    if base is not None:
        times.append(base[0])
    edges = np.unique(np.concatenate(times)) if times else np.zeros(0, np.int64)
    if not len(edges):
        edges = np.zeros(1, np.int64)
    left = edges[:-1]
    kind = np.full(len(left), background, np.int64)
    row = np.full(len(left), -1, np.int64)
    if base is not None:
        _lay(left, kind, row, [Layer(base[0][:-1], base[0][1:], base[1], base[2])])
    _lay(left, kind, row, lower)
    _lay(left, kind, row, upper)
    return edges, kind, row


def _lay(left: Int64, kind: Int64, row: Int64, layers: Sequence[Layer]) -> None:
    best = np.full(len(left), NEVER_NS, np.int64)
    for layer in layers:
        if not len(layer.start):
            continue
        index = layer.start.searchsorted(left, "right") - 1
        covered: Bool = (index >= 0) & (left < layer.end[index])
        covered &= layer.row[index] < best
        best[covered] = layer.row[index[covered]]
        kind[covered] = layer.kind[index[covered]]
        row[covered] = layer.row[index[covered]]


def flatten(edges: Int64, kind: Int64, row: Int64) -> tuple[Int64, Int64, Int64]:
    """Neighbouring pieces of one kind and row merged."""
    if len(kind) < 2:
        return edges, kind, row
    change = np.concatenate(([True], (kind[1:] != kind[:-1]) | (row[1:] != row[:-1])))
    return np.append(edges[:-1][change], edges[-1:]), kind[change], row[change]
