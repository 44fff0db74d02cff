"""The wrappers around the engine core: they take timestamps and call the recorder."""

from __future__ import annotations

import types
from time import monotonic_ns, thread_time_ns
from typing import Any

from . import semconv as sc
from .core import HEADER, CoreRecorder
from .hook import Hook
from .patching import Wrapper


class CoreHook:
    """Installs the wrappers of the engine core and finds the recorder of each engine."""

    def __init__(self, hook: Hook) -> None:
        self.hook = hook
        self.recorders: dict[int, CoreRecorder] = {}
        hook.collectors.append(self._finish_open)
        hook.forgetters.append(self.recorders.clear)

    def recorder(self, engine: Any) -> CoreRecorder:
        """The recorder of ``engine``, made when its first request or step is seen."""
        recorder = self.recorders.get(id(engine))
        if recorder is None:
            recorder = self.recorders[id(engine)] = CoreRecorder(self.hook, engine)
            self.hook.expanders.append(recorder.expand)
        return recorder

    def _finish_open(self) -> None:
        for recorder in self.recorders.values():
            recorder.close()

    # Each make_* gets the original and returns the wrapper that Patcher.wrap puts in its place.

    def make_preprocess(self, original: Wrapper) -> Wrapper:
        """``EngineCore.preprocess_add_request``: takes our mark out of the trace headers."""
        hook, account = self.hook, self.hook.account

        def preprocess_add_request(engine: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
            start = monotonic_ns()
            headers = None
            try:
                headers = getattr(request, "trace_headers", None)
                if headers and HEADER in headers:
                    # vLLM echoes trace headers with every token: without its own tracing they are
                    # ours alone, and nobody needs them back.
                    keep = self.recorder(engine).keep_headers
                    others = {name: value for name, value in headers.items() if name != HEADER}
                    request.trace_headers = others if keep else None
            except Exception as error:
                hook.patcher.fault("core.preprocess_add_request", error)
            called = monotonic_ns()
            result = original(engine, request, *args, **kwargs)
            returned = monotonic_ns()
            try:
                self.recorder(engine).received(request, start, returned, headers)
                account.request_ns += monotonic_ns() - returned + called - start
            except Exception as error:
                hook.patcher.fault("core.preprocess_add_request", error)
            return result

        return preprocess_add_request

    def make_add_request(self, original: Wrapper) -> Wrapper:
        """``EngineCore.add_request``: the request is in the scheduler's queue."""
        hook, account = self.hook, self.hook.account

        def add_request(engine: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(engine, request, *args, **kwargs)
            now = monotonic_ns()
            try:
                self.recorder(engine).queued(request, now)
                account.request_ns += monotonic_ns() - now
            except Exception as error:
                hook.patcher.fault("core.add_request", error)
            return result

        return add_request

    def make_input_queue(self, original: Wrapper) -> Wrapper:
        """``EngineCoreProc._process_input_queue``: time between steps spent on new requests."""
        hook = self.hook

        def _process_input_queue(engine: Any, *args: Any, **kwargs: Any) -> Any:
            start = monotonic_ns()
            result = original(engine, *args, **kwargs)
            try:
                recorder = self.recorders.get(id(engine))
                if recorder is not None and recorder.input_start:
                    if recorder.members:  # busy engine: it did not wait in there
                        recorder.input_start = start
                    recorder.input_end = monotonic_ns()
            except Exception as error:
                hook.patcher.fault("core.process_input_queue", error)
            return result

        return _process_input_queue

    def make_step(self, batch_queue: bool) -> Any:
        """``EngineCore.step`` and ``step_with_batch_queue``: the first call wraps the instances."""

        def make(original: Wrapper) -> Wrapper:
            def step(engine: Any, *args: Any, **kwargs: Any) -> Any:
                try:
                    self.attach(engine, batch_queue)
                    if getattr(engine, "step_fn", None) is not None:
                        engine.step_fn = types.MethodType(original, engine)  # no wrapper from now on
                except Exception as error:
                    self.hook.patcher.fault("core.step", error)
                return original(engine, *args, **kwargs)

            return step

        return make

    def attach(self, engine: Any, batch_queue: bool) -> None:
        """Wrap the methods of this engine's scheduler and executor."""
        recorder = self.recorder(engine)
        if recorder.scheduler is not None:
            return
        recorder.scheduler = engine.scheduler
        recorder.flags = int(sc.StepFlag.BATCH_QUEUE) if batch_queue else 0
        wrap, scheduler, executor = self.hook.patcher.wrap, engine.scheduler, engine.model_executor
        missing = self.hook.account.missing
        for owner, name, point, make in (
            (scheduler, "schedule", "core.schedule", self._make_schedule(recorder)),
            (executor, "execute_model", "core.execute_model", self._make_execute(recorder)),
            (scheduler, "update_from_output", "core.update_from_output", self._make_update(recorder)),
            (scheduler, "finish_requests", "core.finish_requests", self._make_finish(recorder)),
            (scheduler, "_preempt_request", "core.preempt_request", self._make_preempt(recorder)),
        ):
            if not wrap(owner, name, point, make):
                missing.append(point)

    def _make_schedule(self, recorder: CoreRecorder) -> Any:
        account, fault = self.hook.account, self.hook.patcher.fault

        def make(original: Wrapper) -> Wrapper:
            def schedule(*args: Any, **kwargs: Any) -> Any:
                start = monotonic_ns()
                output = original(*args, **kwargs)
                end = monotonic_ns()
                try:
                    recorder.scheduled(output, start, end)
                    account.critical_ns += monotonic_ns() - end
                except Exception as error:
                    fault("core.schedule", error)
                return output

            return schedule

        return make

    def _make_execute(self, recorder: CoreRecorder) -> Any:
        account, fault = self.hook.account, self.hook.patcher.fault

        def make(original: Wrapper) -> Wrapper:
            def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
                result = original(scheduler_output, *args, **kwargs)
                end = monotonic_ns()
                try:
                    # CPU time: the workers run now, and may well have taken this core.
                    cpu = thread_time_ns()
                    recorder.compose(scheduler_output, end)
                    account.overlapped_ns += thread_time_ns() - cpu
                except Exception as error:
                    fault("core.execute_model", error)
                return result

            return execute_model

        return make

    def _make_update(self, recorder: CoreRecorder) -> Any:
        account, fault = self.hook.account, self.hook.patcher.fault

        def make(original: Wrapper) -> Wrapper:
            def update_from_output(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
                start = monotonic_ns()
                outputs = original(scheduler_output, *args, **kwargs)
                end = monotonic_ns()
                try:
                    recorder.updated(scheduler_output, start, end)
                    account.critical_ns += monotonic_ns() - end
                except Exception as error:
                    fault("core.update_from_output", error)
                return outputs

            return update_from_output

        return make

    def _make_finish(self, recorder: CoreRecorder) -> Any:
        fault = self.hook.patcher.fault

        def make(original: Wrapper) -> Wrapper:
            def finish_requests(request_ids: Any, *args: Any, **kwargs: Any) -> Any:
                if request_ids is not None and not isinstance(request_ids, str):
                    request_ids = list(request_ids)  # an iterator would be used up by us or by vLLM
                try:
                    recorder.aborted(request_ids, monotonic_ns())
                except Exception as error:
                    fault("core.finish_requests", error)
                return original(request_ids, *args, **kwargs)

            return finish_requests

        return make

    def _make_preempt(self, recorder: CoreRecorder) -> Any:
        fault = self.hook.patcher.fault

        def make(original: Wrapper) -> Wrapper:
            def _preempt_request(request: Any, *args: Any, **kwargs: Any) -> Any:
                try:
                    recorder.preempted.append((request.request_id, int(request.num_computed_tokens)))
                except Exception as error:
                    fault("core.preempt_request", error)
                return original(request, *args, **kwargs)

            return _preempt_request

        return make
