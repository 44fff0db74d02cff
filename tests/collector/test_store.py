"""The store: exact for the newest, summed for a day, bounded by counts."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from stratoscope.attribution.attribute import E2E
from stratoscope.attribution.matrix import PercentileBands
from stratoscope.collector import store as store_module
from stratoscope.collector.assembler import Limits
from stratoscope.collector.attributor import Attributor, Options
from stratoscope.collector.store import RequestStore, attributed


@pytest.fixture
def one(vllm):
    core = Attributor(Options(Limits(), PercentileBands()))
    for message in vllm(1).messages():
        core.take(message, 0.0)
    return core.finish(0.0, at_end=True)[0]


def numbered(request, number, latency_ns=None, minute=0):
    latency = request.latency_ns.copy()
    if latency_ns is not None:
        latency[E2E] = latency_ns
    return dataclasses.replace(
        request,
        trace_id=f"{number:032x}",
        latency_ns=latency,
        wall_offset_ns=request.wall_offset_ns + minute * 60_000_000_000,
    )


def test_the_newest_stay_exact_and_the_minutes_keep_the_sums(one):
    store = RequestStore(max_requests=10)
    for number in range(25):
        store.add(numbered(one, number))
    assert len(store) == 10 and store.total == 25
    assert store.find(f"{24:032x}") is not None and store.find(f"{0:032x}") is None
    minutes = list(store.minutes(0))
    assert sum(requests for _, _, requests, _, _ in minutes) == 25
    assert (sum(cells for *_, cells, _ in minutes) == 25 * one.cells_ns).all()
    assert (attributed(store.rows()).cells_ns.sum(axis=0) == 10 * one.cells_ns).all()
    assert store.covers_since_wall_ns() > 0


def test_a_day_of_minutes_is_kept_and_not_more(one):
    store = RequestStore(max_requests=10)
    for minute in range(store_module.DAY_MINUTES + 30):
        store.add(numbered(one, minute, minute=minute))
    assert len({start for start, *_ in store.minutes(0)}) == store_module.DAY_MINUTES


def test_segments_are_kept_for_the_newest_and_the_slowest(one, monkeypatch):
    monkeypatch.setattr(store_module, "MAX_WATERFALLS", 5)
    monkeypatch.setattr(store_module, "MAX_SLOW", 3)
    store = RequestStore(max_requests=1000)
    latencies = np.random.default_rng(1).permutation(np.arange(1, 101)) * 1_000_000
    for number, latency in enumerate(latencies.tolist()):
        store.add(numbered(one, number, latency))
    kept = {row.trace_id for row in store.rows() if row.finished is not None}
    newest = {f"{number:032x}" for number in range(95, 100)}
    slowest = {f"{number:032x}" for number in np.argsort(-latencies)[:3].tolist()}
    assert newest | slowest <= kept
    assert len(kept) <= 5 + 3


def test_filters(one):
    store = RequestStore(max_requests=10)
    store.add(numbered(one, 1))
    store.add(
        dataclasses.replace(numbered(one, 2, minute=5), attributes={"model": "b", "outcome": "aborted"})
    )
    assert [row.trace_id for row in store.rows(model="b")] == [f"{2:032x}"]
    assert [row.trace_id for row in store.rows(outcome="ok")] == [f"{1:032x}"]
    assert len(store.rows(since_wall_ns=one.end_wall_ns + 1)) == 1


def test_requests_that_share_a_trace_are_found_newest_first(one):
    store = RequestStore(max_requests=2)
    for end in range(3):
        store.add(dataclasses.replace(one, wall_offset_ns=end))
    row = store.find(one.trace_id)
    assert row is not None and row.end_wall_ns == one.segmented.end_ns + 2
