"""Joining: order and repetition change nothing, losses cost certainty and never the sum."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stratoscope.attribution.matrix import PercentileBands
from stratoscope.attribution.taxonomy import CELL_INDEX
from stratoscope.collector.assembler import Limits
from stratoscope.collector.attributor import Attributor, Options
from stratoscope.instrumentation import semconv as sc

fixtures = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def attributor(**limits):
    return Attributor(Options(Limits(**limits), PercentileBands()))


def run(messages, now_s=0.0, at_end=True, core=None):
    core = core or attributor()
    for message in messages:
        core.take(message, now_s)
    return {r.trace_id: r for r in core.finish(now_s, at_end=at_end)}, core


@fixtures
@given(st.data())
def test_order_and_repetition_change_nothing(vllm, data):
    messages = vllm(4, open_only=1).messages()
    expected, _ = run(messages)
    repeated = messages + data.draw(st.lists(st.sampled_from(messages), max_size=6))
    found, _ = run(data.draw(st.permutations(repeated)))
    assert found.keys() == expected.keys()
    for trace_id, request in expected.items():
        assert (found[trace_id].cells_ns == request.cells_ns).all()
        assert found[trace_id].attributes == request.attributes


@fixtures
@given(st.data())
def test_losses_never_break_the_sum(vllm, data):
    messages = vllm(4, open_only=1).messages()
    kept = [m for m in messages if data.draw(st.booleans())]
    for request in run(kept)[0].values():
        assert (request.cells_ns >= 0).all()
        assert (request.cells_ns.sum(axis=1) == request.latency_ns).all()


def test_a_complete_request_is_not_waited_for(vllm):
    found, _ = run(vllm(3).messages(), at_end=False)
    assert len(found) == 3


def test_a_missing_worker_is_waited_for_until_the_timeout(vllm):
    messages = vllm(2).messages()
    messages = [
        m for m in messages if m.resource_spans[0].scope_spans[0].spans[0].name != sc.Record.WORKER_STEPS
    ]
    core = attributor(join_timeout_s=3.0)
    assert not run(messages, at_end=False, core=core)[0]
    assert not core.finish(2.9)
    finished = core.finish(3.1)
    assert len(finished) == 2
    assert finished[0].cells_ns[2, CELL_INDEX["unattributed.workers_missing"]] > 0


def test_other_clocks_are_not_compared(vllm):
    tiny = vllm(1)
    engine = tiny.engine(0)
    for attribute in engine.resource_spans[0].resource.attributes:
        if attribute.key == sc.CLOCK_DOMAIN:
            attribute.value.string_value = "boot-2"
    request = next(iter(run([tiny.server(0), engine, *tiny.windows()])[0].values()))
    assert request.cells_ns[2, CELL_INDEX["unattributed.engine_record_missing"]] > 0


def test_open_requests_of_a_silent_process_are_unfinished(vllm):
    core = attributor(unfinished_after_s=30.0)
    assert not run(vllm(0, open_only=2).messages(), at_end=False, core=core)[0]
    assert not core.finish(29.0)
    outcomes = [r.attributes["outcome"] for r in [*core.finish(31.0), *core.finish(35.0)]]
    assert outcomes == ["unfinished"] * 2


def test_what_waits_is_bounded_and_counted(vllm):
    tiny = vllm(50)
    core = attributor(max_pending=10)
    run([tiny.engine(i) for i in range(50)], at_end=False, core=core)
    assert len(core.assembler.pending) <= 10
    assert core.assembler.counts["evicted_pending"] >= 40


def test_two_requests_may_share_a_trace(vllm):
    tiny = vllm(2)
    messages = tiny.messages()
    for message in messages[:4]:
        message.resource_spans[0].scope_spans[0].spans[0].trace_id = b"\x01" * 16
    core = run(messages)[1]
    assert len(core.store) == 2
