"""API server: the HTTP request around vLLM, and the seam where it becomes engine requests."""

from __future__ import annotations

import asyncio
import inspect
from time import monotonic_ns
from typing import Any

from . import semconv as sc
from .core import HEADER, served_name
from .hook import Hook, Window
from .patching import Wrapper
from .server_request import ServerRecord, current
from .trace_context import parse_traceparent

# Inference routes of vLLM's servers; everything else (health, metrics, models) is not a request.
_PREFIXES = (
    "/v1/", "/v2/", "/inference/", "/invocations", "/generate", "/pooling", "/score", "/rerank", "/classify",
)  # fmt: skip
_EXCLUDED = ("/v1/models", "/v1/load_lora_adapter", "/v1/unload_lora_adapter")
_LAG_PERIOD_S = 0.05


class FrontendHook:
    """Installs the wrappers of the API server process and of the offline ``LLM``."""

    def __init__(self, hook: Hook) -> None:
        self.hook = hook
        self.window: Window | None = None
        self.engine_index = 0  # of the outputs being processed: one task handles them in turn
        self.direct: dict[str, ServerRecord] = {}  # requests that no HTTP server holds, by engine request id
        self._lag_due_ns = 0
        self._lag_running = False
        hook.collectors.append(self._close_open)
        hook.forgetters.append(self._forget)

    def _forget(self) -> None:
        self.window = None
        self.direct.clear()
        self._lag_running = False

    # --- HTTP ---------------------------------------------------------------------------------------

    def make_asgi(self, original: Wrapper) -> Wrapper:
        """``Starlette.__call__``: arrival, body, every flush, last byte."""
        fault = self.hook.patcher.fault

        async def __call__(app: Any, scope: Any, receive: Any, send: Any) -> None:
            record = None
            try:
                if scope["type"] == "http" and _is_inference(scope) and current.get() is None:
                    record = self._arrived(scope)
            except Exception as error:
                fault("frontend.asgi", error)
            if record is None:
                await original(app, scope, receive, send)
                return
            token = current.set(record)
            failure: BaseException | None = None
            try:
                await original(app, scope, _receiver(record, receive), _sender(record, send, fault))
            except BaseException as error:
                failure = error
                raise
            finally:
                current.reset(token)
                record.route = getattr(scope.get("route"), "path", record.route)
                self._left(record, failure)

        return __call__

    def _arrived(self, scope: Any) -> ServerRecord:
        now = monotonic_ns()
        parent = None
        for name, value in scope["headers"]:
            if name == b"traceparent":
                parent = parse_traceparent(value.decode("latin-1"))
                break
        record = ServerRecord("http", now, parent)
        record.method = scope["method"]
        record.route = scope["path"]
        self._open(record)
        self._watch_loop()
        return record

    def _open(self, record: ServerRecord) -> None:
        account = self.hook.account
        account.requests += 1
        if len(self.hook.open) < self.hook.settings.max_open_requests:
            self.hook.open[record.span_id] = record
        self.hook.start()
        account.request_ns += monotonic_ns() - record.arrival_ns

    def _left(self, record: ServerRecord, failure: BaseException | None) -> None:
        now = monotonic_ns()
        try:
            record.close(now, failure)
            self.hook.open.pop(record.span_id, None)
            self.hook.finish(sc.Record.SERVER, record)
            self.hook.account.request_ns += monotonic_ns() - now
        except Exception as error:
            self.hook.patcher.fault("frontend.asgi", error)

    def _close_open(self) -> None:
        """The process ends: what is open never finished."""
        now = monotonic_ns()
        for record in list(self.hook.open.values()):
            record.end_ns = now
            record.outcome = sc.Outcome.UNFINISHED
            self.hook.finish(sc.Record.SERVER, record)
        self.hook.open.clear()

    # --- the event loop -----------------------------------------------------------------------------

    def _watch_loop(self) -> None:
        if self._lag_running:
            return
        self._lag_running = True
        self._schedule_tick(asyncio.get_running_loop())

    def _schedule_tick(self, loop: asyncio.AbstractEventLoop) -> None:
        self._lag_due_ns = monotonic_ns() + int(_LAG_PERIOD_S * 1e9)
        loop.call_later(_LAG_PERIOD_S, self._tick, loop)

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        account = self.hook.account
        lag = max(monotonic_ns() - self._lag_due_ns, 0)
        account.loop_lag_sum_ns += lag
        account.loop_lag_max_ns = max(account.loop_lag_max_ns, lag)
        if self.hook.open:
            self._schedule_tick(loop)
        else:
            self._lag_running = False  # an idle server is left alone

    # --- template, tokenize ---------------------------------------------------------------------------

    def make_phase(self, phase: str) -> Any:
        """A renderer's (async) method: its time counts as ``phase`` of the current request."""

        def make(original: Wrapper) -> Wrapper:
            if inspect.iscoroutinefunction(original):

                async def timed_async(*args: Any, **kwargs: Any) -> Any:
                    record, start = current.get(), monotonic_ns()
                    try:
                        return await original(*args, **kwargs)
                    finally:
                        if record is not None:
                            record.phase(phase, start, monotonic_ns())

                return timed_async

            def timed(*args: Any, **kwargs: Any) -> Any:
                record, start = current.get(), monotonic_ns()
                try:
                    return original(*args, **kwargs)
                finally:
                    if record is not None:
                        record.phase(phase, start, monotonic_ns())

            return timed

        return make

    # --- engine requests --------------------------------------------------------------------------------

    def make_engine_init(self, original: Wrapper) -> Wrapper:
        """``AsyncLLM.__init__`` and ``LLMEngine.__init__``: the model's served name."""

        def __init__(engine: Any, *args: Any, **kwargs: Any) -> None:
            original(engine, *args, **kwargs)
            try:
                self.hook.model_name = served_name(engine.vllm_config.model_config)
            except Exception as error:
                self.hook.patcher.fault("frontend.engine_init", error)

        return __init__

    def make_submit(self, original: Wrapper) -> Wrapper:
        """``OutputProcessor.add_request``: an engine request is about to go to the core."""
        hook = self.hook

        def add_request(processor: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
            start = monotonic_ns()
            try:
                self._submitting(request, args, kwargs, start)
                hook.account.request_ns += monotonic_ns() - start
            except Exception as error:
                hook.patcher.fault("frontend.submit", error)
            return original(processor, request, *args, **kwargs)

        return add_request

    def _submitting(self, request: Any, args: tuple[Any, ...], kwargs: dict[str, Any], now: int) -> None:
        if request.request_id in self.direct:  # next part of a streaming-input session
            return
        record = current.get()
        headers = dict(request.trace_headers or {})
        if record is None:
            queue = kwargs.get("queue", args[3] if len(args) > 3 else None)
            parent = parse_traceparent(headers.get("traceparent"))
            record = ServerRecord("llm" if queue is None else "async_llm", now, parent)
            self.direct[request.request_id] = record
            self._open(record)
        record.submit_ns = record.submit_ns or now
        record.engine_requests += 1
        if self.hook.settings.record_content and record.content is None:
            prompt = kwargs.get("prompt", args[0] if args else None)
            record.content = prompt if isinstance(prompt, str) else None
        headers["traceparent"] = record.context.header()
        headers[HEADER] = "1"
        request.trace_headers = headers

    def make_get_output(self, original: Wrapper) -> Wrapper:
        """``AsyncMPClient.get_output_async``: which engine the next outputs come from."""

        async def get_output_async(*args: Any, **kwargs: Any) -> Any:
            outputs = await original(*args, **kwargs)
            self.engine_index = getattr(outputs, "engine_index", 0)
            return outputs

        return get_output_async

    def make_process_outputs(self, original: Wrapper) -> Wrapper:
        """``OutputProcessor.process_outputs``: one row a batch of outputs."""
        hook = self.hook

        def process_outputs(
            processor: Any, outputs: Any, timestamp: Any = None, *args: Any, **kwargs: Any
        ) -> Any:
            if timestamp is None:
                timestamp = kwargs.pop("engine_core_timestamp", None)
            start = monotonic_ns()
            result = original(processor, outputs, timestamp, *args, **kwargs)
            end = monotonic_ns()
            try:
                if outputs and timestamp is not None:
                    window = self.window
                    if window is None:
                        window = self.window = hook.window(
                            sc.Record.OUTPUTS, sc.OUTPUT_COLUMNS, {sc.ROLE: "api_server"}
                        )
                    window.ring.push(int(timestamp * 1e9), start, end, self.engine_index, len(outputs))
                if self.direct:
                    self._finish_direct(processor, outputs, end)
                hook.account.request_ns += monotonic_ns() - end
            except Exception as error:
                hook.patcher.fault("frontend.process_outputs", error)
            return result

        return process_outputs

    def _finish_direct(self, processor: Any, outputs: Any, now: int) -> None:
        states = processor.request_states
        for output in outputs:
            record = self.direct.get(output.request_id)
            if record is None or output.request_id in states:
                continue
            del self.direct[output.request_id]
            record.last_byte_ns = now
            record.response_complete = True
            self._left(record, None)

    def make_abort(self, original: Wrapper) -> Wrapper:
        """``OutputProcessor.abort_requests``: requests without a server end here when aborted."""
        hook = self.hook

        def abort_requests(processor: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(processor, *args, **kwargs)
            try:
                if self.direct:
                    for request_id in [i for i in self.direct if i not in processor.request_states]:
                        self._left(self.direct.pop(request_id), None)
            except Exception as error:
                hook.patcher.fault("frontend.abort", error)
            return result

        return abort_requests


def _is_inference(scope: Any) -> bool:
    path: str = scope["path"]
    return scope["method"] == "POST" and path.startswith(_PREFIXES) and not path.startswith(_EXCLUDED)


def _receiver(record: ServerRecord, receive: Any) -> Any:
    async def recorded_receive() -> Any:
        message = await receive()
        kind = message["type"]
        if kind == "http.request":
            if not message.get("more_body", False):
                record.body_ns = monotonic_ns()
        elif kind == "http.disconnect" and not record.response_complete:
            record.disconnected = True
        return message

    return recorded_receive


def _sender(record: ServerRecord, send: Any, fault: Any) -> Any:
    async def recorded_send(message: Any) -> None:
        start = monotonic_ns()
        await send(message)
        try:
            if message["type"] == "http.response.body":
                if message.get("body"):
                    record.sent(start, monotonic_ns())
                if not message.get("more_body", False):
                    record.response_complete = True
                    record.last_byte_ns = monotonic_ns()
            elif message["type"] == "http.response.start":
                record.status = message["status"]
                record.streaming = _is_event_stream(message)
        except Exception as error:
            fault("frontend.asgi", error)

    return recorded_send


def _is_event_stream(message: Any) -> bool:
    return any(
        name.lower() == b"content-type" and b"text/event-stream" in value
        for name, value in message.get("headers", ())
    )
