"""The engine core's recorder, driven as vLLM drives it, with plain stand-ins for vLLM's objects.

The stand-ins are inputs: what vLLM itself does is covered by ``tests/integration``.
"""

from __future__ import annotations

import struct
from types import SimpleNamespace as Namespace
from typing import Any

import pytest

from stratoscope.instrumentation import semconv as sc
from stratoscope.instrumentation.core import STEP_ATTRIBUTE, CoreRecorder
from stratoscope.instrumentation.core_request import MAX_EVENTS, EngineRecord
from stratoscope.instrumentation.hook import Hook
from stratoscope.instrumentation.settings import Settings
from stratoscope.instrumentation.trace_context import TraceContext

Kind = sc.EventKind


class Engine:
    """A scheduler with requests, and the recorder that watches it."""

    def __init__(self) -> None:
        self.hook = Hook(Settings("http://127.0.0.1:9", "grpc"))
        self.hook._gave_up = True  # no flush thread: the test reads the buffers itself
        self.recorder = CoreRecorder(self.hook, Namespace())
        self.scheduler = Namespace(
            finished_req_ids=set(), running=[], waiting=[],
            max_num_running_reqs=8, max_num_scheduled_tokens=64,
            kv_cache_manager=Namespace(usage=0.25, block_pool=None),
            get_request_counts=lambda: (len(self.scheduler.running), len(self.scheduler.waiting)),
        )  # fmt: skip
        self.recorder.scheduler = self.scheduler
        self.requests: dict[str, Any] = {}
        self.clock = 1_000

    def tick(self) -> int:
        self.clock += 10
        return self.clock

    def add(self, name: str, prompt: int) -> None:
        request = Namespace(
            request_id=name, num_tokens=prompt, num_computed_tokens=0, status=Namespace(name="WAITING"),
            num_prompt_tokens=prompt, num_output_tokens=0, num_output_placeholders=0,
        )  # fmt: skip
        self.requests[name] = request
        context = TraceContext(7, 8, 1).header()
        self.recorder.received(request, self.tick(), self.tick(), {"traceparent": context})
        self.recorder.queued(request, self.tick())

    def schedule(
        self, tokens: dict[str, int], new: tuple[str, ...] = (), resumed: tuple[str, ...] = ()
    ) -> Any:
        output = Namespace(
            scheduled_new_reqs=[
                Namespace(req_id=name, num_computed_tokens=self.requests[name].num_computed_tokens)
                for name in new
            ],
            scheduled_cached_reqs=Namespace(resumed_req_ids=set(resumed)),
            num_scheduled_tokens=tokens,
            total_num_scheduled_tokens=sum(tokens.values()),
        )
        for name, count in tokens.items():
            self.requests[name].num_computed_tokens += count
        self.recorder.scheduled(output, self.tick(), self.tick())
        self.recorder.compose(output, self.tick())
        return output

    def update(self, output: Any, finished: tuple[str, ...] = ()) -> None:
        self.scheduler.finished_req_ids = set(finished)
        for name, count in output.num_scheduled_tokens.items():
            if count == 1 or self.requests[name].num_computed_tokens >= self.requests[name].num_tokens:
                self.requests[name].num_tokens += 1
        self.recorder.updated(output, self.tick(), self.tick())
        self.scheduler.finished_req_ids = set()

    def step(self, tokens: dict[str, int], finished: tuple[str, ...] = (), **kwargs: Any) -> None:
        self.update(self.schedule(tokens, **kwargs), finished)

    def rows(self) -> list[dict[str, int]]:
        self.recorder.expand()
        packed = self.recorder.window.ring.drain(1000)
        width = len(sc.STEP_COLUMNS)
        return [
            dict(zip(sc.STEP_COLUMNS, struct.unpack_from(f"<{width}q", packed, at), strict=True))
            for at in range(0, len(packed), 8 * width)
        ]

    def sent(self) -> dict[str, EngineRecord]:
        return {record.request.request_id: record for _, (_, record) in self.hook.finished}


def events(record: EngineRecord) -> list[tuple[int, int, int]]:
    flat = list(record.events)
    return [tuple(flat[at : at + 3]) for at in range(0, len(flat), 3)]  # type: ignore[misc]


def test_a_prompt_in_chunks_then_decode() -> None:
    engine = Engine()
    engine.add("a", 100)
    engine.step({"a": 64}, new=("a",))
    engine.step({"a": 36})
    engine.step({"a": 1})
    engine.step({"a": 1}, finished=("a",))
    engine.step({})
    record = engine.sent()["a"]
    assert events(record) == [(0, Kind.PREFILL, 64), (1, Kind.PREFILL, 36)]
    assert (record.first_step, record.first_output_step, record.last_step) == (0, 1, 3)
    assert record.arrival_step == 0
    rows = engine.rows()
    assert [row["prefill_tokens"] for row in rows] == [64, 36, 0, 0, 0]
    assert [row["decode_tokens"] for row in rows] == [0, 0, 1, 1, 0]
    assert [row["context_tokens"] for row in rows] == [0, 100, 101, 102, 0]
    assert [row["n_scheduled"] for row in rows] == [1, 1, 1, 1, 0]
    assert rows[0]["kv_usage_ppm"] == 250_000
    for row in rows:
        times = [
            row[f"{name}_ns"]
            for name in ("sched_start", "sched_end", "dispatch_end", "update_start", "update_end")
        ]
        assert times == sorted(times) and times[0] > 0


def test_the_workers_get_step_and_context() -> None:
    engine = Engine()
    engine.add("a", 4)
    output = engine.schedule({"a": 4}, new=("a",))
    uid, step, contexts = getattr(output, STEP_ATTRIBUTE)
    assert (uid, step) == (engine.recorder.uid, 0)
    assert contexts == {"a": TraceContext(7, 8, 1)}
    engine.update(output)
    assert getattr(engine.schedule({"a": 1}), STEP_ATTRIBUTE)[2] is None


def test_a_preemption_and_what_is_computed_again() -> None:
    engine = Engine()
    engine.add("a", 10)
    engine.step({"a": 10}, new=("a",))
    engine.step({"a": 1})
    engine.recorder.preempted.append(("a", 11))
    engine.requests["a"].num_computed_tokens = 0
    engine.step({})
    engine.step({"a": 12}, resumed=("a",))
    engine.step({"a": 1}, finished=("a",))
    engine.step({})
    record = engine.sent()["a"]
    assert events(record) == [
        (0, Kind.PREFILL, 10),
        (2, Kind.PREEMPTED, 11),
        (3, Kind.RESUMED, 0),
        (3, Kind.RECOMPUTE, 11),
        (3, Kind.PREFILL, 1),
    ]
    assert (record.preemptions, record.recomputed_tokens) == (1, 11)
    assert [row["n_preempted"] for row in engine.rows()] == [0, 0, 1, 0, 0, 0]
    assert engine.recorder.context_tokens == 0


def test_running_but_left_out_of_a_step() -> None:
    engine = Engine()
    engine.add("a", 4)
    engine.add("b", 4)
    engine.step({"a": 4, "b": 4}, new=("a", "b"))
    engine.step({"a": 64})
    engine.step({"a": 1, "b": 1}, finished=("a", "b"))
    engine.step({})
    assert (1, Kind.SKIPPED, sc.WaitReason.TOKEN_BUDGET) in events(engine.sent()["b"])


def test_asynchronous_scheduling_finishes_one_step_late() -> None:
    engine = Engine()
    engine.add("a", 4)
    first = engine.schedule({"a": 4}, new=("a",))
    second = engine.schedule({"a": 1})
    engine.update(first)
    third = engine.schedule({"a": 1})
    engine.update(second, finished=("a",))
    engine.update(third)
    engine.step({})
    assert engine.sent()["a"].last_step == 1
    assert [row["step"] for row in engine.rows()] == [0, 1, 2, 3]


def test_a_failed_execution_leaves_a_row_that_says_so() -> None:
    engine = Engine()
    engine.add("a", 4)
    engine.schedule({"a": 4}, new=("a",))  # its output never comes
    engine.step({"a": 1})
    rows = engine.rows()
    assert [row["flags"] & sc.StepFlag.NO_OUTPUT for row in rows] == [sc.StepFlag.NO_OUTPUT, 0]
    assert rows[0]["update_end_ns"] == 0


def test_an_abort_while_waiting_and_one_while_running() -> None:
    engine = Engine()
    engine.add("waits", 4)
    engine.add("runs", 4)
    engine.step({"runs": 4}, new=("runs",))
    engine.recorder.aborted(["waits", "runs", "unknown"], engine.tick())
    engine.step({})
    sent = engine.sent()
    assert (sent["waits"].first_step, sent["waits"].last_step) == (-1, -1)
    assert (sent["runs"].first_step, sent["runs"].last_step) == (0, 0)
    assert not engine.recorder.requests and not engine.recorder.members


def test_each_request_is_sent_once_whoever_sends_it() -> None:
    engine = Engine()
    engine.add("a", 4)
    engine.step({"a": 4}, new=("a",), finished=("a",))
    engine.recorder.expand()  # its end lies far back on this test's clock: an idle engine
    engine.step({})
    engine.recorder.close()
    assert [record.request.request_id for _, (_, record) in engine.hook.finished] == ["a"]


def test_what_is_open_at_the_end_is_sent() -> None:
    engine = Engine()
    engine.add("a", 4)
    engine.step({"a": 4}, new=("a",))
    engine.recorder.close()
    assert set(engine.sent()) == {"a"}


def test_events_are_bounded_and_counted() -> None:
    record = EngineRecord(Namespace(), TraceContext(1, 2, 1), 1, 2, 3, 0)
    for step in range(MAX_EVENTS + 5):
        record.event(step, Kind.SKIPPED, 0)
    assert len(record.events) == 3 * MAX_EVENTS
    assert record.events_dropped == 5


def test_rows_are_bounded_and_counted() -> None:
    engine = Engine()
    engine.add("a", 4)
    engine.step({"a": 4}, new=("a",))
    for _ in range(engine.hook.settings.ring_rows + 3):
        engine.step({"a": 1})
    assert engine.hook.account.dropped == 4


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"running": [0] * 8}, sc.WaitReason.SLOTS),
        ({"max_num_scheduled_tokens": 4}, sc.WaitReason.TOKEN_BUDGET),
        ({"_pause_state": Namespace(name="PAUSED_ALL")}, sc.WaitReason.PAUSED),
    ],
)
def test_the_wait_reason_of_the_head_is_in_the_row(change: dict[str, Any], reason: int) -> None:
    engine = Engine()
    for name, value in change.items():
        setattr(engine.scheduler, name, value)
    engine.scheduler.waiting = [object()]
    engine.add("a", 4)
    engine.step({"a": 4}, new=("a",))
    assert engine.rows()[0]["wait_reason"] == reason
