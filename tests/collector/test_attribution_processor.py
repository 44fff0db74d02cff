"""The processor on its own thread: spans pass first and untouched, the matrix follows."""

from __future__ import annotations

import time

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from stratoscope.collector import views
from stratoscope.collector.component import Batch, Context, Refused, Signal
from stratoscope.collector.config_schema import read
from stratoscope.collector.processors.attribution import Config, factory
from stratoscope.collector.telemetry import Telemetry


class Sink:
    def __init__(self, refusal=None):
        self.batches, self.refusal = [], refusal

    def consume(self, batch):
        if self.refusal:
            raise self.refusal
        self.batches.append(batch)


def make(sink, **keys):
    problems = []
    configuration = read(Config, keys, "processors.attribution", problems)
    assert not problems
    telemetry = Telemetry()
    context = Context(telemetry, telemetry.registry)
    tap = factory.build(
        name="attribution", config=configuration, next=sink, context=context, signal=Signal.TRACES
    )
    return tap, context.attribution


def batch_of(messages):
    merged = ExportTraceServiceRequest()
    for message in messages:
        merged.MergeFrom(message)
    return Batch(Signal.TRACES, merged, merged.SerializeToString(), len(messages))


def wait_for(condition):
    deadline_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline_s, "the condition never came true"
        time.sleep(0.02)


def test_spans_pass_untouched_and_finished_requests_follow(vllm):
    sink = Sink()
    tap, processor = make(sink, spans={"export": "all"})
    tap.start()
    try:
        batch = batch_of(vllm(4).messages())
        before = batch.raw
        tap.consume(batch)
        assert sink.batches[0] is batch and batch.raw == before == batch.message.SerializeToString()
        wait_for(lambda: views.summary(processor)["requests"] == 4 and len(sink.batches) == 2)
        names = {
            s.name for r in sink.batches[1].message.resource_spans for x in r.scope_spans for s in x.spans
        }
        assert {"queue", "prefill", "decode", "engine step"} <= names
    finally:
        tap.shutdown(5.0)


def test_what_the_next_refuses_is_not_attributed(vllm):
    tap, processor = make(Sink(Refused("full", retryable=True)))
    with pytest.raises(Refused):
        tap.consume(batch_of(vllm(1).messages()))
    assert processor.status()["queued_batches"] == 0


def test_a_full_queue_never_blocks_and_is_counted(vllm):
    sink = Sink()
    tap, processor = make(sink, queue_size=1)  # not started: nobody takes from the queue
    for _ in range(3):
        tap.consume(batch_of(vllm(1).messages()))
    assert len(sink.batches) == 3
    assert processor.status()["queued_batches"] == 1


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"bands": ["0", "90", "50", "100"]}, "processors.attribution.bands"),
        ({"bands_ms": ["x"]}, "processors.attribution.bands_ms"),
        ({"join_timeout": "soon"}, "processors.attribution.join_timeout"),
        ({"spans": {"export": "some"}}, "processors.attribution.spans.export"),
        ({"spans": {"slowest_share": 2}}, "processors.attribution.spans.slowest_share"),
        ({"max_request": 5}, "processors.attribution.max_request"),
    ],
)
def test_bad_configuration_names_the_key(keys, named):
    problems = []
    read(Config, keys, "processors.attribution", problems)
    assert len(problems) == 1 and problems[0].startswith(f"{named}:")
