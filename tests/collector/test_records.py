"""Spans as records: bad ones are rejected with a reason, their neighbours are kept."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from stratoscope.collector.records import EngineSpan, RecordParser, ServerSpan, Window
from stratoscope.instrumentation import semconv as sc


def parse(*messages):
    merged = ExportTraceServiceRequest()
    for message in messages:
        merged.MergeFrom(message)
    return RecordParser().parse(merged)


def test_everything_of_a_small_vllm_is_read(vllm):
    parsed = parse(*vllm(3, open_only=2).messages())
    assert parsed.rejected == 0
    kinds = [type(record) for record in parsed.records]
    assert (kinds.count(ServerSpan), kinds.count(EngineSpan), kinds.count(Window)) == (3, 3, 4)
    server = next(r for r in parsed.records if isinstance(r, ServerSpan))
    assert server.request.flushes.shape == (4, 2)
    assert server.facts["model"] == "tiny" and server.process.clock_domain == "boot-1"


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"T_ARRIVAL": "soon"}, sc.T_ARRIVAL),
        ({"T_ARRIVAL": None}, sc.T_ARRIVAL),
        ({"OUTCOME": "great"}, sc.OUTCOME),
        ({"FLUSHES": b"123"}, sc.FLUSHES),
        ({"STREAMING": 1}, sc.STREAMING),
        ({"GEN_AI_REQUEST_MODEL": ["a"]}, sc.GEN_AI_REQUEST_MODEL),
        ({"RECORD": "request.unheard-of"}, sc.RECORD),
    ],
)
def test_a_bad_attribute_rejects_its_span_alone(vllm, changed, reason):
    parsed = parse(vllm().server(0, **changed), vllm().server(1))
    assert parsed.rejected == 1 and len(parsed.records) == 1
    assert reason in parsed.reasons[0]


def test_a_table_of_broken_rows_is_rejected(vllm):
    tiny = vllm()
    bad = tiny.window("c", sc.Record.STEPS, "engine_core", sc.STEP_COLUMNS, [], ROWS=b"\0" * 9)
    parsed = parse(bad, tiny.server(0))
    assert parsed.rejected == 1 and len(parsed.records) == 1
    assert "whole number of rows" in parsed.reasons[0]


def test_other_spans_are_left_alone(vllm):
    message = vllm().server(0)
    message.resource_spans[0].scope_spans[0].scope.name = "somebody.else"
    parsed = parse(message)
    assert (parsed.foreign, parsed.rejected, parsed.records) == (1, 0, [])


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_mutated_messages_never_crash(vllm, data):
    raw = bytearray(data.draw(st.sampled_from(vllm(1, open_only=1).messages())).SerializeToString())
    for _ in range(data.draw(st.integers(1, 6))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        parsed = parse(ExportTraceServiceRequest.FromString(bytes(raw)))
    except DecodeError:
        return
    assert parsed.rejected + len(parsed.records) + parsed.foreign <= 2  # a mutation may cut a message in two
