"""One request as the API server (or the offline LLM) sees it, from arrival to last byte."""

from __future__ import annotations

import contextvars
from array import array

from . import semconv as sc
from .trace_context import TraceContext, new_span_id, new_trace

MAX_FLUSHES = 16384  # sends recorded a request; the last one is always known


class ServerRecord:
    """Lifecycle times in monotonic ns; 0: did not happen or was not seen."""

    __slots__ = (
        "api", "arrival_ns", "body_ns", "content", "context", "disconnected", "end_ns", "engine_requests",
        "error_type", "flushes", "flushes_dropped", "last_byte_ns", "method", "outcome", "parent_span_id",
        "response_complete", "route", "span_id", "status", "streaming", "submit_ns", "template_end_ns",
        "template_start_ns", "tokenize_end_ns", "tokenize_start_ns",
    )  # fmt: skip

    def __init__(self, api: str, arrival_ns: int, parent: TraceContext | None) -> None:
        self.api = api
        self.arrival_ns = arrival_ns
        context = parent or new_trace()
        self.parent_span_id = context.span_id
        self.span_id = new_span_id()
        self.context = TraceContext(context.trace_id, self.span_id, context.flags)
        self.body_ns = self.submit_ns = self.last_byte_ns = self.end_ns = 0
        self.template_start_ns = self.template_end_ns = 0
        self.tokenize_start_ns = self.tokenize_end_ns = 0
        self.flushes = array("q")
        self.flushes_dropped = 0
        self.engine_requests = 0
        self.streaming = self.disconnected = self.response_complete = False
        self.status = 0
        self.method = self.route = self.error_type = self.outcome = ""
        self.content: str | None = None

    def sent(self, start_ns: int, end_ns: int) -> None:
        """One response body message was sent."""
        self.last_byte_ns = end_ns
        if len(self.flushes) >= 2 * MAX_FLUSHES:
            self.flushes_dropped += 1
            return
        self.flushes.extend((start_ns, end_ns))

    def phase(self, name: str, start_ns: int, end_ns: int) -> None:
        """Template or tokenize ran; several calls (a list of prompts) make one stretch."""
        if name == "template":
            self.template_start_ns = self.template_start_ns or start_ns
            self.template_end_ns = end_ns
        else:
            self.tokenize_start_ns = self.tokenize_start_ns or start_ns
            self.tokenize_end_ns = end_ns

    def close(self, end_ns: int, error: BaseException | None) -> None:
        """The ASGI app returned or raised."""
        self.end_ns = end_ns
        if error is not None and not isinstance(error, Exception):  # CancelledError and its like
            self.outcome = sc.Outcome.ABORTED
        elif error is not None:
            self.outcome, self.error_type = sc.Outcome.ERROR, type(error).__name__
        elif self.disconnected or not self.response_complete:
            self.outcome = sc.Outcome.ABORTED
        elif self.status >= 400:
            self.outcome, self.error_type = sc.Outcome.ERROR, str(self.status)
        else:
            self.outcome = sc.Outcome.OK


current: contextvars.ContextVar[ServerRecord | None] = contextvars.ContextVar("stratoscope", default=None)
