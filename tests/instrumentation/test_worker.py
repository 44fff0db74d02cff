"""The worker's recorder, driven as vLLM's executor drives a worker; CUDA is a fake (tests/fakes/cuda.py)."""

from __future__ import annotations

import importlib.util
import struct
from pathlib import Path
from types import SimpleNamespace as Namespace
from typing import Any

import pytest

from stratoscope.instrumentation import semconv as sc
from stratoscope.instrumentation.core import STEP_ATTRIBUTE
from stratoscope.instrumentation.gpu import cuda_events
from stratoscope.instrumentation.hook import Hook
from stratoscope.instrumentation.settings import Settings
from stratoscope.instrumentation.trace_context import TraceContext
from stratoscope.instrumentation.worker import WorkerHook, WorkerRecorder, WorkerRequest

_spec = importlib.util.spec_from_file_location("fake_cuda", Path(__file__).parents[1] / "fakes" / "cuda.py")
assert _spec is not None and _spec.loader is not None
fake: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(fake)

MS = 1_000_000
CONTEXT = TraceContext(7, 8, 1)


class OneCall:
    """A worker that samples inside execute_model."""

    rank = 3

    def execute_model(self, output: Any) -> Any:
        if output.fail:
            raise RuntimeError("theirs")
        return "tokens"


class TwoCalls(OneCall):
    """A worker that is asked for the tokens by a second call."""

    def execute_model(self, output: Any) -> Any:
        super().execute_model(output)
        return None

    def sample_tokens(self, grammar: Any) -> Any:
        return "tokens"


class CudaWorker(OneCall):
    """Enqueues 20 ms of work a step and does not wait for it."""

    def __init__(self, cuda: Any) -> None:
        self.cuda = cuda

    def execute_model(self, output: Any) -> Any:
        self.cuda.stream.work(20 * MS)
        return "tokens"


class Rank:
    """One worker process: vLLM's wrapper object, hooked as the plugin does it."""

    def __init__(self, worker: Any) -> None:
        self.hook = Hook(Settings("http://127.0.0.1:9", "grpc", ring_rows=64))
        self.hook._gave_up = True  # no flush thread: the test does what it would
        self.parts = WorkerHook(self.hook)
        first = self.parts.make_first_execute(lambda wrapper, *args: wrapper.worker.execute_model(*args))
        self.wrapper = Namespace(worker=worker)
        self.execute = lambda output: first(self.wrapper, output)
        self.step_number = -1

    @property
    def recorder(self) -> WorkerRecorder:
        (recorder,) = self.parts.recorders.values()
        return recorder

    def output(self, new: tuple[str, ...] = (), finished: tuple[str, ...] = (), fail: bool = False) -> Any:
        self.step_number += 1
        contexts = dict.fromkeys(new, CONTEXT) if new else None
        mark = ("e" * 16, self.step_number, contexts)
        return Namespace(finished_req_ids=set(finished), fail=fail, **{STEP_ATTRIBUTE: mark})

    def rows(self) -> list[dict[str, int]]:
        for expand in self.hook.expanders:
            expand()
        (window,) = self.hook.windows
        packed, width = window.ring.drain(1000), len(sc.WORKER_STEP_COLUMNS)
        return [
            dict(zip(sc.WORKER_STEP_COLUMNS, struct.unpack_from(f"<{width}q", packed, at), strict=True))
            for at in range(0, len(packed), 8 * width)
        ]

    def sent(self) -> dict[str, WorkerRequest]:
        return {request_id: request for _, (_, request_id, request) in self.hook.finished}


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = fake.FakeCuda()
    monkeypatch.setattr(cuda_events, "find_cuda", lambda: made)
    return made


def test_one_call_does_it_all() -> None:
    rank = Rank(OneCall())
    assert rank.execute(rank.output(new=("a",))) == "tokens"
    assert rank.execute(rank.output()) == "tokens"
    first, second = rank.rows()
    assert (first["step"], second["step"]) == (0, 1)
    assert 0 < first["exec_start_ns"] <= first["exec_end_ns"] <= second["exec_start_ns"]
    assert first["sample_start_ns"] == first["sample_end_ns"] == 0
    assert first["device_start_ns"] == first["device_end_ns"] == 0
    (window,) = rank.hook.windows
    assert window.attributes == {sc.ROLE: "worker", sc.ENGINE_UID: "e" * 16, sc.RANK: 3}


def test_sampling_by_a_second_call_belongs_to_the_same_row() -> None:
    rank = Rank(TwoCalls())
    assert rank.execute(rank.output(new=("a",))) is None
    assert not rank.recorder.done  # not over yet
    assert rank.wrapper.worker.sample_tokens(None) == "tokens"
    (row,) = rank.rows()
    assert row["exec_end_ns"] <= row["sample_start_ns"] <= row["sample_end_ns"]
    assert row["sample_start_ns"] > 0


def test_a_request_is_on_the_rank_from_its_first_step_to_the_news_of_its_end() -> None:
    rank = Rank(OneCall())
    rank.execute(rank.output(new=("a",)))
    rank.execute(rank.output(new=("b",)))
    rank.execute(rank.output(finished=("a",)))
    rows = rank.rows()
    request = rank.sent()["a"]
    assert set(rank.sent()) == {"a"}
    assert (request.first_step, request.last_step, request.context) == (0, 1, CONTEXT)
    assert (request.start_ns, request.end_ns) == (rows[0]["exec_start_ns"], rows[1]["exec_end_ns"])
    assert request.busy_ns == sum(row["exec_end_ns"] - row["exec_start_ns"] for row in rows[:2])
    rank.recorder.close()
    assert set(rank.sent()) == {"a", "b"}


def test_their_exception_stays_theirs_and_the_next_step_is_recorded() -> None:
    rank = Rank(TwoCalls())
    rank.execute(rank.output(new=("a",)))
    rank.wrapper.worker.sample_tokens(None)
    with pytest.raises(RuntimeError, match="theirs"):
        rank.execute(rank.output(fail=True))
    rank.execute(rank.output())
    rank.wrapper.worker.sample_tokens(None)
    assert [row["step"] for row in rank.rows()] == [0, 2]
    assert rank.hook.account.errors == 0


def test_steps_of_nobody_are_left_alone() -> None:
    rank = Rank(OneCall())
    assert rank.execute(Namespace(finished_req_ids=set(), fail=False)) == "tokens"  # a warm-up
    rank.recorder.expand()
    assert rank.hook.windows == [] and rank.hook.account.errors == 0


def test_steps_that_nobody_takes_are_bounded_and_counted() -> None:
    rank = Rank(OneCall())
    for _ in range(70):
        rank.execute(rank.output())
    assert len(rank.rows()) == 64
    assert rank.hook.account.dropped == 6


def test_each_step_gets_its_device_times(cuda: Any) -> None:
    rank = Rank(CudaWorker(cuda))
    for _ in range(3):
        rank.execute(rank.output())
        cuda.sleep(25 * MS)
    rows = rank.rows()
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows:
        assert abs(row["device_end_ns"] - row["device_start_ns"] - 20 * MS) < MS


def test_the_last_step_before_idle_comes_when_the_device_is_done(cuda: Any) -> None:
    rank = Rank(CudaWorker(cuda))
    rank.execute(rank.output())
    assert rank.rows() == []
    (window,) = rank.hook.windows
    assert window.pending_since_ns > 0  # what is later than this is not complete yet
    cuda.sleep(25 * MS)
    (row,) = rank.rows()
    assert row["step"] == 0 and row["device_end_ns"] > 0
    assert window.pending_since_ns == 0


def test_a_step_that_ends_while_rows_are_made_keeps_its_device_times(
    cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank(CudaWorker(cuda))
    rank.execute(rank.output())
    cuda.sleep(25 * MS)
    take = WorkerRecorder._take

    def meanwhile(recorder: WorkerRecorder, *args: Any) -> None:
        monkeypatch.undo()
        take(recorder, *args)
        for _ in range(2):  # the worker's thread goes on between two of the flush thread's rows
            rank.execute(rank.output())
            cuda.sleep(25 * MS)
        recorder.device_times.extend(recorder.timer.collect())

    monkeypatch.setattr(WorkerRecorder, "_take", meanwhile)
    monkeypatch.setattr(cuda_events, "find_cuda", lambda: cuda)
    rows = rank.rows() + rank.rows()
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(row["device_end_ns"] > 0 for row in rows)
    assert rank.hook.windows[0].pending_since_ns == 0


def test_rows_do_not_wait_for_a_device_that_fails(cuda: Any) -> None:
    rank = Rank(CudaWorker(cuda))
    rank.execute(rank.output())
    cuda.error = RuntimeError("CUDA error: unspecified launch failure")
    rank.execute(rank.output())
    rows = rank.rows()
    assert [row["step"] for row in rows] == [0, 1]
    assert all(row["exec_end_ns"] > 0 and row["device_end_ns"] == 0 for row in rows)
    assert rank.hook.account.errors == 0


def test_the_end_hands_over_rows_and_device_times(cuda: Any) -> None:
    rank = Rank(CudaWorker(cuda))
    rank.execute(rank.output(new=("a",)))
    cuda.sleep(25 * MS)
    rank.execute(rank.output())  # the device is still at it when the process ends
    rank.recorder.close()
    rows = rank.rows()
    assert [row["device_end_ns"] > 0 for row in rows] == [True, False]
    assert set(rank.sent()) == {"a"}
