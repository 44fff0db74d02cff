"""The attribution matrix: latency band by layer and cause, in seconds and shares.

Sums are exact integers in ns; they become float seconds only in the rows. Quantiles are
nearest-rank: the p-quantile of n sorted values is the value at rank ceil(p / 100 * n), a value that
a request really had, never one between two.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from .attribute import E2E, Attributed
from .errors import BandError
from .tables import Bool, Int64
from .taxonomy import CELLS, PHASES

_UNATTRIBUTED: Final = np.array([cell.layer == "unattributed" for cell in CELLS])
LABEL_LAYERS: Final = ("model", "framework", "infrastructure")


@dataclass(frozen=True, slots=True)
class PercentileBands:
    """Bands by rank of a phase's latency: ``edges`` in percent, from 0 to 100, increasing.

    A request of rank r of n (1 is the fastest; equal latencies keep their order) is in the band
    whose edges a, b satisfy ceil(a/100 n) < r <= ceil(b/100 n).
    """

    edges: tuple[float, ...] = (0, 50, 90, 99, 100)

    def __post_init__(self) -> None:
        _check_increasing(self.edges)
        if self.edges[0] != 0 or self.edges[-1] != 100:
            raise BandError(f"percentile bands must begin with 0 and end with 100, not {list(self.edges)}")

    @property
    def names(self) -> tuple[str, ...]:
        """Such as ``p50-90``."""
        return tuple(f"p{low:g}-{high:g}" for low, high in zip(self.edges, self.edges[1:], strict=False))

    def assign(self, latency_ns: Int64) -> Int64:
        """Band index of each request."""
        count = len(latency_ns)
        rank = np.empty(count, np.int64)
        rank[np.argsort(latency_ns, kind="stable")] = np.arange(1, count + 1)
        upper = np.array([nearest_rank(edge, count) for edge in self.edges[1:]], np.int64)
        return np.searchsorted(upper, rank, "left")


@dataclass(frozen=True, slots=True)
class LatencyBands:
    """Bands by latency: ``edges_ns`` increasing; band i is [edges[i], edges[i+1]), the last one open.

    Requests below the first edge are in no band.
    """

    edges_ns: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.edges_ns:
            raise BandError("latency bands need at least one edge, such as (0, 15_000_000)")
        _check_increasing(self.edges_ns)

    @property
    def names(self) -> tuple[str, ...]:
        """Such as ``0-15ms``, and ``>=15ms`` for the last."""
        bounds = [
            f"{low / 1e6:g}-{high / 1e6:g}ms"
            for low, high in zip(self.edges_ns, self.edges_ns[1:], strict=False)
        ]
        return (*bounds, f">={self.edges_ns[-1] / 1e6:g}ms")

    def assign(self, latency_ns: Int64) -> Int64:
        """Band index of each request; -1: below the first edge."""
        return np.searchsorted(np.array(self.edges_ns, np.int64), latency_ns, "right") - 1


Bands = PercentileBands | LatencyBands


def _check_increasing(edges: Sequence[float]) -> None:
    if any(high <= low for low, high in itertools.pairwise(edges)):
        raise BandError(f"the edges of latency bands must increase, not {list(edges)}")


def nearest_rank(percent: float, count: int) -> int:
    """ceil(percent / 100 * count), free of binary rounding for percents with up to 6 decimals."""
    return -(-round(percent * 1_000_000) * count // 100_000_000)


def quantile_ns(values_ns: Int64, percent: float) -> int:
    """The nearest-rank quantile; 0 for no values."""
    if not len(values_ns):
        return 0
    return int(np.sort(values_ns)[max(nearest_rank(percent, len(values_ns)), 1) - 1])


@dataclass(frozen=True, slots=True)
class MatrixRow:
    """Seconds of one cause in one band; ``share`` is of all seconds of that phase and band.

    ``requests`` counts the requests of the band that spent time on this cause.
    """

    phase: str
    band: str
    layer: str
    cause: str
    seconds: float
    share: float
    requests: int


@dataclass(frozen=True, slots=True)
class LabelRow:
    """Seconds in which ``layer`` did ``label``; a layer's labels sum to the band's whole latency."""

    phase: str
    band: str
    layer: str
    label: str
    seconds: float


def matrix(attributed: Attributed, bands: Bands | None = None) -> list[MatrixRow]:
    """Rows with time in them, by phase, band and falling seconds.

    Requests without latency in a phase (no decode, not streaming) are not part of it.
    """
    rows = []
    for phase, band, cells in _bands(attributed, bands):
        total = cells.sum(axis=0)
        whole = int(total.sum())
        for index in np.argsort(-total, kind="stable").tolist():
            spent = int(total[index])
            if not spent:
                break
            users = int((cells[:, index] > 0).sum())
            cell = CELLS[index]
            rows.append(MatrixRow(phase, band, cell.layer, cell.cause, spent / 1e9, spent / whole, users))
    return rows


def label_matrix(attributed: Attributed, bands: Bands | None = None) -> list[LabelRow]:
    """The same time by what each layer was doing."""
    rows: list[LabelRow] = []
    for phase, band, cells in _bands(attributed, bands):
        total = cells.sum(axis=0).tolist()
        for layer in LABEL_LAYERS:
            by_label: dict[str, int] = {}
            for cell, spent in zip(CELLS, total, strict=True):
                if spent:
                    label = getattr(cell, layer)
                    by_label[label] = by_label.get(label, 0) + spent
            ordered = sorted(by_label.items(), key=lambda item: -item[1])
            rows.extend(LabelRow(phase, band, layer, label, spent / 1e9) for label, spent in ordered)
    return rows


def _bands(attributed: Attributed, bands: Bands | None) -> list[tuple[str, str, Int64]]:
    """(phase, band name, cells of its requests) of every band that has requests."""
    bands = bands or PercentileBands()
    found = []
    for phase, name in enumerate(PHASES):
        latency = attributed.latency_ns[:, phase]
        present = latency > 0
        assigned = np.full(len(latency), -1, np.int64)
        assigned[present] = bands.assign(latency[present])
        for index, band in enumerate(bands.names):
            chosen: Bool = assigned == index
            if chosen.any():
                found.append((name, band, attributed.cells_ns[chosen, phase]))
    return found


@dataclass(frozen=True, slots=True)
class Conservation:
    """Whether segments sum to latency in every phase, and how much of e2e stays unexplained (shares of a
    request)."""

    max_abs_residual_ns: int
    unattributed_share_mean: float
    unattributed_share_p99: float


def conservation(attributed: Attributed) -> Conservation:
    """The check of the whole method. The P99 is nearest-rank over the requests' shares."""
    latency = attributed.latency_ns[:, E2E]
    if not len(latency):
        return Conservation(0, 0.0, 0.0)
    unknown = attributed.cells_ns[:, E2E][:, _UNATTRIBUTED].sum(axis=1)
    share = np.sort(unknown / np.maximum(latency, 1))
    worst = int(np.abs(attributed.residual_ns).max())
    return Conservation(worst, float(share.mean()), float(share[nearest_rank(99, len(share)) - 1]))
