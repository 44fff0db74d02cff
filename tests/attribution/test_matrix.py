from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratoscope.attribution.attribute import Attributed
from stratoscope.attribution.errors import BandError
from stratoscope.attribution.matrix import (
    LatencyBands,
    PercentileBands,
    conservation,
    label_matrix,
    matrix,
    nearest_rank,
    quantile_ns,
)
from stratoscope.attribution.taxonomy import CELL_INDEX, N_CELLS, PHASES

DECODE, SLOTS, CLOCK = (CELL_INDEX[n] for n in ("model.decode", "framework.wait_slots", "unattributed.clock"))


def attributed(*requests):
    """Each request: ns by cell, all of it in TTFT."""
    cells = np.zeros((len(requests), len(PHASES), N_CELLS), np.int64)
    for index, spent in enumerate(requests):
        for cell, time_ns in spent.items():
            cells[index, PHASES.index("ttft"), cell] = cells[index, PHASES.index("e2e"), cell] = time_ns
    return Attributed(cells, cells.sum(axis=2))


def test_bands_by_percentile():
    rows = matrix(attributed(*({DECODE: 10**9 * (i + 1)} for i in range(100))))
    e2e = [row for row in rows if row.phase == "e2e"]
    assert [(row.band, row.requests, row.seconds) for row in e2e] == [
        ("p0-50", 50, sum(range(1, 51))),
        ("p50-90", 40, sum(range(51, 91))),
        ("p90-99", 9, sum(range(91, 100))),
        ("p99-100", 1, 100),
    ]
    assert {row.phase for row in rows} == {"ttft", "e2e"}  # nobody decoded


def test_bands_by_latency():
    rows = matrix(
        attributed({DECODE: 5}, {DECODE: 14_999_999}, {SLOTS: 15_000_000}), LatencyBands((0, 15_000_000))
    )
    assert [(r.band, r.cause, r.requests) for r in rows if r.phase == "e2e"] == [
        ("0-15ms", "decode", 2),
        (">=15ms", "wait_slots", 1),
    ]


def test_shares_and_order():
    rows = [
        r
        for r in matrix(attributed({DECODE: 30, SLOTS: 60, CLOCK: 10}), PercentileBands((0, 100)))
        if r.phase == "e2e"
    ]
    assert [(r.layer, r.cause, r.share, r.requests) for r in rows] == [
        ("framework", "wait_slots", 0.6, 1),
        ("model", "decode", 0.3, 1),
        ("unattributed", "clock", 0.1, 1),
    ]


def test_labels_of_each_layer_sum_to_the_latency():
    rows = [r for r in label_matrix(attributed({DECODE: 3 * 10**9, SLOTS: 10**9})) if r.phase == "e2e"]
    assert {(r.layer, r.label): r.seconds for r in rows} == {
        ("model", "decode"): 3, ("model", "idle"): 1,
        ("framework", "execute"): 3, ("framework", "wait_slots"): 1,
        ("infrastructure", "unknown"): 4,
    }  # fmt: skip


def test_conservation():
    good = attributed({DECODE: 90, CLOCK: 10}, {DECODE: 100})
    found = conservation(good)
    assert (found.max_abs_residual_ns, found.unattributed_share_mean, found.unattributed_share_p99) == (
        0,
        0.05,
        0.1,
    )
    bad = Attributed(good.cells_ns, good.latency_ns + np.array([[0] * len(PHASES), [0, 0, -7, 0]]))
    assert conservation(bad).max_abs_residual_ns == 7
    assert conservation(Attributed.concat([])).max_abs_residual_ns == 0
    assert matrix(Attributed.concat([])) == []


@pytest.mark.parametrize("edges", [(0, 50, 50, 100), (0, 99), (10, 100), (100, 0)])
def test_bad_percentiles(edges):
    with pytest.raises(BandError):
        PercentileBands(edges)


@pytest.mark.parametrize("edges", [(), (5, 5)])
def test_bad_latency_edges(edges):
    with pytest.raises(BandError):
        LatencyBands(edges)


def test_quantiles_are_nearest_rank():
    values = np.array([40, 10, 30, 20], np.int64)
    assert [quantile_ns(values, p) for p in (0, 25, 25.1, 50, 75, 99, 100)] == [10, 10, 20, 20, 30, 40, 40]
    assert quantile_ns(values[:0], 50) == 0
    assert nearest_rank(99.9, 1000) == 999  # 0.999 * 1000 in floats is more than 999


@given(st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, 2**40)), min_size=1, max_size=30))
def test_nothing_is_lost_between_bands(spent):
    requests = attributed(*({DECODE: a, SLOTS: b} for a, b in spent))
    rows = matrix(requests)
    assert len({(r.phase, r.band, r.layer, r.cause) for r in rows}) == len(rows)
    for phase in ("ttft", "e2e"):
        seconds = sum(r.seconds for r in rows if r.phase == phase)
        assert seconds == pytest.approx(sum(a + b for a, b in spent) / 1e9)
    for phase, band in {(r.phase, r.band) for r in rows}:
        assert sum(r.share for r in rows if (r.phase, r.band) == (phase, band)) == pytest.approx(1)
