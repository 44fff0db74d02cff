"""Child spans: exact phases under the request's own trace, the same every time."""

from __future__ import annotations

import itertools

import pytest

from stratoscope.attribution.attribute import E2E
from stratoscope.attribution.matrix import PercentileBands
from stratoscope.collector.assembler import Limits
from stratoscope.collector.attributor import Attributor, Options
from stratoscope.collector.synth import SlowestSelector, StepLedger, build, select
from stratoscope.instrumentation import semconv as sc


@pytest.fixture
def served(vllm):
    core = Attributor(Options(Limits(), PercentileBands()))
    for message in vllm(6).messages():
        core.take(message, 0.0)
    finished = core.finish(1.0, at_end=True)
    assert len(finished) == 6
    return finished, core.assembler.timelines()


def spans_of(message):
    return [span for r in message.resource_spans for s in r.scope_spans for span in s.spans]


def values_of(span):
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}


def test_phases_are_children_of_the_server_span_and_cover_the_latency(served):
    finished, timelines = served
    spans = spans_of(build(finished, timelines, StepLedger()))
    for request in finished:
        mine = [s for s in spans if s.trace_id.hex() == request.trace_id]
        assert {s.parent_span_id.hex() for s in mine} == {request.span_id}
        assert {"admission", "queue", "prefill", "decode", "stream-out"} <= {s.name for s in mine}
        length = sum(s.end_time_unix_nano - s.start_time_unix_nano for s in mine)
        assert length == request.latency_ns[E2E]
        mine.sort(key=lambda s: s.start_time_unix_nano)
        assert all(a.end_time_unix_nano == b.start_time_unix_nano for a, b in itertools.pairwise(mine))
        for span in mine:
            values = values_of(span)
            seconds = {k: v for k, v in values.items() if k.startswith(sc.SECONDS_PREFIX)}
            length_s = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
            assert sum(seconds.values()) == pytest.approx(length_s, abs=1e-9)
            assert seconds[sc.SECONDS_PREFIX + values[sc.CAUSE]] == max(seconds.values())
            assert values[sc.SYNTH] is True


def test_steps_are_linked_both_ways_and_sent_once(served):
    finished, timelines = served
    ledger = StepLedger()
    spans = spans_of(build(finished, timelines, ledger))
    steps = [s for s in spans if s.name == "engine step"]
    assert len({s.trace_id for s in steps}) == 1 and all(not s.parent_span_id for s in steps)
    assert {values_of(s)["stratoscope.step"] for s in steps} == set(range(6))
    servers = {(r.trace_id, r.span_id) for r in finished}
    assert {(k.trace_id.hex(), k.span_id.hex()) for s in steps for k in s.links} == servers
    linked = {link.span_id for s in spans if s.name == "prefill" for link in s.links}
    assert linked == {s.span_id for s in steps}
    again = spans_of(build(finished, timelines, ledger))
    assert not [s for s in again if s.name == "engine step"]


def test_the_same_requests_make_the_same_bytes_with_distinct_ids(served):
    finished, timelines = served
    first, second = (build(finished, timelines, StepLedger()) for _ in range(2))
    assert first.SerializeToString() == second.SerializeToString()
    ids = [(s.trace_id, s.span_id) for s in spans_of(first)]
    assert len(ids) == len(set(ids))


def test_without_steps_phases_still_come(served):
    finished, _ = served
    assert {s.name for s in spans_of(build(finished, {}, StepLedger()))}.isdisjoint({"engine step"})


def test_select(served):
    finished, _ = served
    assert select(finished, "none", 1.0, SlowestSelector()) == []
    assert select(finished, "all", 0.0, SlowestSelector()) == finished
    assert select(finished, "slowest", 0.0, SlowestSelector()) == []


def test_slowest_keeps_about_its_share():
    selector = SlowestSelector()
    latencies = [(i * 7919) % 1000 for i in range(1, 3001)]
    kept = [x for x in latencies if selector.keep(x, 0.05)]
    late = [x for x in latencies[1000:] if x >= 950]
    assert set(kept[-50:]) <= set(late)
    assert 100 <= sum(x in set(late) for x in kept) <= 250


def test_ledger_is_bounded():
    ledger = StepLedger(size=2)
    assert [ledger.first_time(("e", n)) for n in (1, 1, 2, 3, 1)] == [True, False, True, True, True]
