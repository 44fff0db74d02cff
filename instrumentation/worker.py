"""Worker ranks: when each step was executed, on the host and, with CUDA, on the device."""

from __future__ import annotations

import collections
import time
from time import monotonic_ns
from typing import Any

from . import semconv as sc
from .core import STEP_ATTRIBUTE
from .gpu.cuda_events import StepTimer
from .gpu.devices import current_device
from .gpu.nvml import NvmlSampler
from .hook import Hook, Window
from .patching import Wrapper
from .trace_context import TraceContext

_MAX_WAITING_ROWS = 256  # rows kept back for the device times of steps still running
_ROWS_AT_ONCE = 64
_PAUSE_S = 0.0005  # between batches of rows: the worker's thread wants the interpreter lock back


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
    """Records one rank.

    The worker's thread appends one tuple a step to ``done``; everything made of it (rows, requests)
    is made by the flush thread in :meth:`expand`, since each microsecond between two steps of a
    worker is one that the engine waits.
    """

    def __init__(self, hook: Hook, rank: int) -> None:
        self.hook = hook
        self.rank = rank
        self.timer = StepTimer()
        # (step mark, finished ids, exec start, exec end, sample start, sample end)
        self.done: collections.deque[tuple[Any, Any, int, int, int, int]] = collections.deque()
        self.device_times: collections.deque[tuple[int, int, int]] = collections.deque()
        self.current: tuple[Any, int, int] | None = None  # executed, not sampled yet
        self.engine_uid = ""
        self._capacity = hook.settings.ring_rows
        self._window: Window | None = None
        self._requests: dict[str, WorkerRequest] = {}
        self._busy_ns = 0
        self._last_end_ns = 0
        self._waiting: dict[int, list[int]] = {}  # rows whose device times are not known yet

    def finish_step(self, output: Any, start_ns: int, end_ns: int, sample: tuple[int, int]) -> None:
        """A step is over on this rank. On the worker's thread."""
        mark = getattr(output, STEP_ATTRIBUTE, None)
        if mark is None:
            return
        if len(self.done) >= self._capacity:
            self.hook.account.dropped += 1
            return
        self.done.append((mark, output.finished_req_ids, start_ns, end_ns, *sample))
        if self.timer.active:
            self.timer.end(mark[1])
            self.device_times.extend(self.timer.collect())

    def expand(self) -> None:
        """Turn what the worker's thread left into rows and requests. On the flush thread."""
        # A step is in done before its device times are known: those of these times have rows below,
        # while a step that ends from here on has its times taken with its row, at the next flush.
        self.device_times.extend(self.timer.collect_idle())
        n_times = len(self.device_times)
        for count in range(1, len(self.done) + 1):
            mark, finished, *times = self.done.popleft()
            self._take(mark, finished, times)
            if count % _ROWS_AT_ONCE == 0:
                time.sleep(_PAUSE_S)
        if self.timer.active or self._waiting:
            self._take_device_times(n_times)

    def _take(self, mark: Any, finished: Any, times: list[int]) -> None:
        uid, step, contexts = mark
        if self._window is None:
            self.engine_uid = uid
            identity = {sc.ROLE: "worker", sc.ENGINE_UID: uid, sc.RANK: self.rank}
            self._window = self.hook.window(sc.Record.WORKER_STEPS, sc.WORKER_STEP_COLUMNS, identity)
        for request_id in finished:
            self._finish(request_id, step - 1)
        exec_start, exec_end, sample_start, sample_end = times
        for request_id, context in (contexts or {}).items():
            if request_id not in self._requests:
                self._requests[request_id] = WorkerRequest(context, step, exec_start, self._busy_ns)
        self._busy_ns += exec_end - exec_start + sample_end - sample_start
        self._last_end_ns = max(exec_end, sample_end)
        if self.timer.active:
            self._waiting[step] = [step, *times]
        else:
            self._window.ring.push(step, *times, 0, 0)

    def _take_device_times(self, count: int) -> None:
        window = self._window
        if window is None:
            return
        for _ in range(count):
            step, start_ns, end_ns = self.device_times.popleft()
            row = self._waiting.pop(step, None)
            if row is not None:
                window.ring.push(*row, start_ns, end_ns)
        while len(self._waiting) > _MAX_WAITING_ROWS or (self._waiting and not self.timer.active):
            window.ring.push(*self._waiting.pop(next(iter(self._waiting))), 0, 0)  # host times only
        window.pending_since_ns = next(iter(self._waiting.values()))[1] if self._waiting else 0

    def _finish(self, request_id: str, last_step: int) -> None:
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        request.last_step = max(last_step, request.first_step)
        request.end_ns = max(self._last_end_ns, request.start_ns)
        request.busy_ns += self._busy_ns
        self.hook.finish(sc.Record.WORKER, (self, request_id, request))

    def close(self) -> None:
        """The process ends: hand over what is left. On the flush thread."""
        self.expand()  # with the device times of what the device has done
        self.timer.close()
        self.expand()
        for request_id in list(self._requests):
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
        """Wrap execute_model and sample_tokens of this worker instance. On the worker's thread."""
        recorder = self.recorders[id(worker)] = WorkerRecorder(self.hook, rank)
        two_calls = hasattr(worker, "sample_tokens")
        wrap, missing = self.hook.patcher.wrap, self.hook.account.missing
        if not wrap(worker, "execute_model", "worker.execute_model", self._make_execute(recorder, two_calls)):
            missing.append("worker.execute_model")
        if not wrap(worker, "sample_tokens", "worker.sample_tokens", self._make_sample(recorder)):
            missing.append("worker.sample_tokens")
        self.hook.expanders.append(recorder.expand)
        self._start_sampler()
        self.hook.start()

    def _start_sampler(self) -> None:
        hz, device = self.hook.settings.nvml_hz, current_device()
        if device is not None and hz > 0 and self.hook.settings.metrics:
            sampler = NvmlSampler(hz=hz, devices=[device])
            sampler.start()
            self.hook.samplers.append(sampler)

    def _make_execute(self, recorder: WorkerRecorder, two_calls: bool) -> Any:
        account, fault = self.hook.account, self.hook.patcher.fault
        no_sample = (0, 0)

        def make(original: Wrapper) -> Wrapper:
            def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
                if recorder.timer.wanted:
                    begin(scheduler_output)
                start = monotonic_ns()
                result = original(scheduler_output, *args, **kwargs)
                end = monotonic_ns()
                try:
                    if two_calls and result is None:
                        recorder.current = (scheduler_output, start, end)
                    else:
                        recorder.finish_step(scheduler_output, start, end, no_sample)
                        account.critical_ns += monotonic_ns() - end
                except Exception as error:
                    fault("worker.execute_model", error)
                return result

            def begin(scheduler_output: Any) -> None:
                try:
                    mark = getattr(scheduler_output, STEP_ATTRIBUTE, None)
                    if mark is not None:
                        recorder.timer.begin(mark[1])
                except Exception as error:
                    fault("worker.execute_model", error)

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
                    current = recorder.current
                    if current is not None:
                        recorder.current = None
                        recorder.finish_step(*current, (start, end))
                    account.critical_ns += monotonic_ns() - end
                except Exception as error:
                    fault("worker.sample_tokens", error)
                return result

            return sample_tokens

        return make
