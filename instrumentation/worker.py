"""Worker ranks: when each step was executed, on the host and, with CUDA, on the device."""

from __future__ import annotations

from time import monotonic_ns
from typing import Any

from . import semconv as sc
from .core import STEP_ATTRIBUTE
from .gpu.cuda_events import StepTimer
from .hook import Hook, Window
from .patching import Wrapper
from .trace_context import TraceContext

_MAX_WAITING_ROWS = 256  # rows kept back for the device times of steps still running


class WorkerRequest:
    """An engine request's stay on one rank, from its first step to the news of its end."""

    __slots__ = ("busy_ns", "context", "end_ns", "first_step", "last_step", "start_ns")

    def __init__(self, context: TraceContext, step: int, start_ns: int, busy_ns: int) -> None:
        self.context = context
        self.first_step = self.last_step = step
        self.start_ns = start_ns
        self.end_ns = start_ns
        self.busy_ns = -busy_ns


class WorkerRecorder:
    """Records one rank. All methods run on the thread that executes steps."""

    def __init__(self, hook: Hook, rank: int) -> None:
        self.hook = hook
        self.rank = rank
        self.engine_uid = ""
        self.window: Window | None = None
        self.requests: dict[str, WorkerRequest] = {}
        self.busy_ns = 0
        self.row: list[int] | None = None  # step, exec start/end, sample start/end
        self.last_end_ns = 0
        self.timer = StepTimer()
        self.waiting: dict[int, list[int]] = {}  # rows whose device times are not known yet

    def began(self, output: Any, now: int) -> None:
        """execute_model was called."""
        if self.row is not None:
            self._push()
        mark = getattr(output, STEP_ATTRIBUTE, None)
        if mark is None:
            return
        uid, step, headers = mark
        if self.window is None:
            self.engine_uid = uid
            identity = {sc.ROLE: "worker", sc.ENGINE_UID: uid, sc.RANK: self.rank}
            self.window = self.hook.window(sc.Record.WORKER_STEPS, sc.WORKER_STEP_COLUMNS, identity)
        for request_id in output.finished_req_ids:
            self._finish(request_id, step - 1)
        for request_id, context in (headers or {}).items():
            if request_id not in self.requests:
                self.requests[request_id] = WorkerRequest(context, step, now, self.busy_ns)
        self.row = [step, now, 0, 0, 0]
        self.timer.begin(step)

    def executed(self, end_ns: int, sampled: bool) -> None:
        """execute_model returned; ``sampled``: it did the sampling as well."""
        row = self.row
        if row is None:
            return
        row[2] = end_ns
        self.busy_ns += end_ns - row[1]
        self.last_end_ns = end_ns
        if sampled:
            self._push()

    def sampled(self, start_ns: int, end_ns: int) -> None:
        """sample_tokens returned."""
        row = self.row
        if row is None:
            return
        row[3], row[4] = start_ns, end_ns
        self.busy_ns += end_ns - start_ns
        self.last_end_ns = end_ns
        self._push()

    def _push(self) -> None:
        row, self.row = self.row, None
        if row is None or self.window is None:
            return
        ring = self.window.ring
        self.timer.end(row[0])
        if not self.timer.active:
            ring.push(*row, 0, 0)
            return
        self.waiting[row[0]] = row
        for step, start_ns, end_ns in self.timer.collect():
            known = self.waiting.pop(step, None)
            if known is not None:
                ring.push(*known, start_ns, end_ns)
        while len(self.waiting) > _MAX_WAITING_ROWS:  # its events were lost: host times only
            ring.push(*self.waiting.pop(next(iter(self.waiting))), 0, 0)
        self.window.pending_since_ns = next(iter(self.waiting.values()))[1] if self.waiting else 0

    def _finish(self, request_id: str, last_step: int) -> None:
        request = self.requests.pop(request_id, None)
        if request is None:
            return
        request.last_step = max(last_step, request.first_step)
        request.end_ns = max(self.last_end_ns, request.start_ns)
        request.busy_ns += self.busy_ns
        self.hook.finish(sc.Record.WORKER, (self, request_id, request))

    def close(self) -> None:
        """The process ends: hand over what is left."""
        if self.row is not None:
            self._push()
        if self.window is not None:
            for row in self.waiting.values():
                self.window.ring.push(*row, 0, 0)
        self.waiting.clear()
        for request_id in list(self.requests):
            self._finish(request_id, -1)


class WorkerHook:
    """Installs the wrappers of the worker."""

    def __init__(self, hook: Hook) -> None:
        self.hook = hook
        self.recorders: dict[int, WorkerRecorder] = {}
        hook.collectors.append(self._close)
        hook.forgetters.append(self.recorders.clear)

    def _close(self) -> None:
        for recorder in self.recorders.values():
            recorder.close()

    def make_first_execute(self, original: Wrapper) -> Wrapper:
        """``WorkerWrapperBase.execute_model``: the first call wraps the worker that it drives."""
        fault = self.hook.patcher.fault

        def execute_model(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                worker = getattr(wrapper, "worker", None)
                if worker is not None and id(worker) not in self.recorders:
                    self.attach(worker, int(getattr(worker, "rank", 0) or 0))
            except Exception as error:
                fault("worker.wrapper", error)
            return original(wrapper, *args, **kwargs)

        return execute_model

    def attach(self, worker: Any, rank: int) -> None:
        """Wrap execute_model and sample_tokens of this worker instance."""
        recorder = self.recorders[id(worker)] = WorkerRecorder(self.hook, rank)
        two_calls = hasattr(worker, "sample_tokens")
        wrap, missing = self.hook.patcher.wrap, self.hook.account.missing
        if not wrap(worker, "execute_model", "worker.execute_model", self._make_execute(recorder, two_calls)):
            missing.append("worker.execute_model")
        if not wrap(worker, "sample_tokens", "worker.sample_tokens", self._make_sample(recorder)):
            missing.append("worker.sample_tokens")

    def _make_execute(self, recorder: WorkerRecorder, two_calls: bool) -> Any:
        account, fault = self.hook.account, self.hook.patcher.fault

        def make(original: Wrapper) -> Wrapper:
            def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
                called = monotonic_ns()
                try:
                    recorder.began(scheduler_output, called)
                except Exception as error:
                    fault("worker.execute_model", error)
                start = monotonic_ns()
                result = original(scheduler_output, *args, **kwargs)
                end = monotonic_ns()
                try:
                    recorder.executed(end, sampled=not two_calls or result is not None)
                    account.critical_ns += start - called + monotonic_ns() - end
                except Exception as error:
                    fault("worker.execute_model", error)
                return result

            return execute_model

        return make

    def _make_sample(self, recorder: WorkerRecorder) -> Any:
        account, fault = self.hook.account, self.hook.patcher.fault

        def make(original: Wrapper) -> Wrapper:
            def sample_tokens(*args: Any, **kwargs: Any) -> Any:
                start = monotonic_ns()
                result = original(*args, **kwargs)
                end = monotonic_ns()
                try:
                    recorder.sampled(start, end)
                    account.critical_ns += monotonic_ns() - end
                except Exception as error:
                    fault("worker.sample_tokens", error)
                return result

            return sample_tokens

        return make
