"""Recorded requests and tables as OpenTelemetry spans; runs on the flush thread only."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from . import semconv as sc
from .account import Account
from .core import CoreRecorder
from .core_request import EngineRecord
from .server_request import ServerRecord
from .trace_context import TraceContext, new_span_id, new_trace
from .worker import WorkerRecorder, WorkerRequest

_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
}


class SpanBuilder:
    """Builds spans of one process: its resource, its clock offset, its scope."""

    def __init__(self, resource: Resource, scope: InstrumentationScope, wall_offset_ns: int) -> None:
        self._resource = resource
        self._scope = scope
        self._offset_ns = wall_offset_ns

    def _span(
        self,
        name: str,
        context: SpanContext,
        parent: SpanContext | None,
        start_ns: int,
        end_ns: int,
        attributes: dict[str, Any],
        kind: SpanKind = SpanKind.INTERNAL,
        error: str = "",
    ) -> ReadableSpan:
        return ReadableSpan(
            name=name,
            context=context,
            parent=parent,
            resource=self._resource,
            attributes=attributes,
            kind=kind,
            status=Status(StatusCode.ERROR, error) if error else Status(StatusCode.UNSET),
            start_time=start_ns + self._offset_ns,
            end_time=max(start_ns, end_ns) + self._offset_ns,
            instrumentation_scope=self._scope,
        )

    def server(self, record: ServerRecord, model: str) -> ReadableSpan:
        """The SERVER span of a request (INTERNAL for the offline LLM)."""
        trace, flags = record.context.trace_id, record.context.flags
        attributes: dict[str, Any] = {
            sc.RECORD: sc.Record.SERVER,
            sc.ROLE: "api_server",
            sc.API: record.api,
            sc.OUTCOME: record.outcome,
            sc.STREAMING: record.streaming,
            sc.T_ARRIVAL: record.arrival_ns,
            sc.T_BODY: record.body_ns,
            sc.T_TEMPLATE_START: record.template_start_ns,
            sc.T_TEMPLATE_END: record.template_end_ns,
            sc.T_TOKENIZE_START: record.tokenize_start_ns,
            sc.T_TOKENIZE_END: record.tokenize_end_ns,
            sc.T_SUBMIT: record.submit_ns,
            sc.T_LAST_BYTE: record.last_byte_ns,
            sc.T_END: record.end_ns,
            sc.FLUSHES: record.flushes.tobytes(),
            sc.N_ENGINE_REQUESTS: record.engine_requests,
            sc.GEN_AI_PROVIDER: "vllm",
        }
        if model:
            attributes[sc.GEN_AI_REQUEST_MODEL] = model
        if record.flushes_dropped:
            attributes[sc.FLUSHES_DROPPED] = record.flushes_dropped
        if record.error_type:
            attributes[sc.ERROR_TYPE] = record.error_type
        if record.content is not None:
            attributes[sc.GEN_AI_INPUT_MESSAGES] = json.dumps([{"role": "user", "content": record.content}])
        name, kind = "generate", SpanKind.INTERNAL
        if record.method:
            name, kind = f"{record.method} {record.route}", SpanKind.SERVER
            attributes[sc.HTTP_METHOD] = record.method
            attributes[sc.HTTP_ROUTE] = record.route
            if record.status:
                attributes[sc.HTTP_STATUS] = record.status
        attributes[sc.GEN_AI_OPERATION] = _OPERATIONS.get(record.route, "generate_content")
        failed = record.error_type if record.outcome == sc.Outcome.ERROR and record.status >= 500 else ""
        parent = _context(trace, record.parent_span_id, flags, remote=True) if record.parent_span_id else None
        own = _context(trace, record.span_id, flags)
        return self._span(
            name, own, parent, record.arrival_ns, record.end_ns, attributes, kind=kind, error=failed
        )

    def engine(self, core: CoreRecorder, record: EngineRecord) -> ReadableSpan:
        """The engine core's span of one engine request."""
        request = record.request
        attributes: dict[str, Any] = {
            sc.RECORD: sc.Record.ENGINE,
            sc.ROLE: "engine_core",
            sc.ENGINE_UID: core.uid,
            sc.ENGINE_INDEX: core.index,
            sc.REQUEST_ID: request.request_id,
            sc.T_CORE_RECEIVED: record.received_ns,
            sc.T_CORE_PREPROCESSED: record.preprocessed_ns,
            sc.T_QUEUED: record.queued_ns,
            sc.T_FINISHED: record.end_ns,
            sc.ARRIVAL_STEP: record.arrival_step,
            sc.FIRST_STEP: record.first_step,
            sc.FIRST_OUTPUT_STEP: record.first_output_step,
            sc.LAST_STEP: record.last_step,
            sc.EVENTS: record.events.tobytes(),
            sc.PREEMPTIONS: record.preemptions,
            sc.RECOMPUTED_TOKENS: record.recomputed_tokens,
            sc.GEN_AI_INPUT_TOKENS: request.num_prompt_tokens,
            sc.GEN_AI_CACHED_TOKENS: record.cached_tokens,
            sc.GEN_AI_OUTPUT_TOKENS: request.num_output_tokens,
            sc.PRIORITY: int(getattr(request, "priority", 0)),
        }
        if core.model:
            attributes[sc.GEN_AI_REQUEST_MODEL] = str(core.model)
        if record.events_dropped:
            attributes[sc.EVENTS_DROPPED] = record.events_dropped
        reason = request.get_finished_reason()
        attributes[sc.GEN_AI_FINISH_REASONS] = [str(reason)] if reason is not None else []
        lora = getattr(request, "lora_request", None)
        if lora is not None:
            attributes[sc.LORA_NAME] = str(lora.lora_name)
        attributes.update(sampling_attributes(request))
        return self._child("engine request", record.context, record.received_ns, record.end_ns, attributes)

    def worker(self, worker: WorkerRecorder, request_id: str, request: WorkerRequest) -> ReadableSpan:
        """A worker rank's span of one engine request."""
        attributes: dict[str, Any] = {
            sc.RECORD: sc.Record.WORKER,
            sc.ROLE: "worker",
            sc.ENGINE_UID: worker.engine_uid,
            sc.RANK: worker.rank,
            sc.REQUEST_ID: request_id,
            sc.FIRST_STEP: request.first_step,
            sc.LAST_STEP: request.last_step,
            sc.EXEC_TOTAL: request.busy_ns,
        }
        return self._child("worker execution", request.context, request.start_ns, request.end_ns, attributes)

    def _child(
        self, name: str, parent: TraceContext, start_ns: int, end_ns: int, attributes: dict[str, Any]
    ) -> ReadableSpan:
        context = _context(parent.trace_id, new_span_id(), parent.flags)
        above = None
        if parent.span_id:
            above = _context(parent.trace_id, parent.span_id, parent.flags, remote=True)
        return self._span(name, context, above, start_ns, end_ns, attributes)

    def window(
        self,
        record: str,
        columns: Sequence[str],
        rows: bytes,
        start_ns: int,
        watermark_ns: int,
        attributes: dict[str, Any],
        account: Account,
    ) -> ReadableSpan:
        """A table of what happened since the last window, in a trace of its own."""
        filled = {
            sc.RECORD: record,
            sc.COLUMNS: list(columns),
            sc.ROWS: rows,
            sc.WATERMARK: watermark_ns,
            **attributes,
            **account_attributes(account),
        }
        context = _context(new_trace().trace_id, new_span_id(), 1)
        return self._span(record, context, None, start_ns, watermark_ns, filled)


def account_attributes(account: Account) -> dict[str, Any]:
    """The hook's own account, as it stands on every window."""
    return {
        sc.HOOK_STEPS: account.steps,
        sc.HOOK_REQUESTS: account.requests,
        sc.HOOK_CRITICAL_NS: account.critical_ns,
        sc.HOOK_OVERLAPPED_NS: account.overlapped_ns,
        sc.HOOK_REQUEST_NS: account.request_ns,
        sc.HOOK_FLUSH_CPU_NS: account.flush_cpu_ns,
        sc.HOOK_DROPPED: account.dropped,
        sc.HOOK_ERRORS: account.errors,
        sc.HOOK_DISABLED: list(account.disabled),
        sc.HOOK_MISSING: list(account.missing),
        sc.LOOP_LAG_MAX_NS: account.loop_lag_max_ns,
        sc.LOOP_LAG_SUM_NS: account.loop_lag_sum_ns,
    }


def sampling_attributes(request: Any) -> dict[str, Any]:
    """Sampling options that cost time; only those that were set."""
    params = getattr(request, "sampling_params", None)
    if params is None:
        return {}
    found: dict[str, Any] = {}
    for name, attribute, neutral in (
        (sc.GEN_AI_MAX_TOKENS, "max_tokens", None),
        (sc.GEN_AI_CHOICE_COUNT, "n", 1),
        (sc.GEN_AI_PRESENCE_PENALTY, "presence_penalty", 0.0),
        (sc.GEN_AI_FREQUENCY_PENALTY, "frequency_penalty", 0.0),
        (sc.REPETITION_PENALTY, "repetition_penalty", 1.0),
        (sc.LOGPROBS, "logprobs", None),
        (sc.PROMPT_LOGPROBS, "prompt_logprobs", None),
    ):
        value = getattr(params, attribute, neutral)
        if value is not None and value != neutral:
            found[name] = value
    if getattr(request, "use_structured_output", False):
        found[sc.STRUCTURED_OUTPUT] = True
    return found


def _context(trace_id: int, span_id: int, flags: int, remote: bool = False) -> SpanContext:
    return SpanContext(trace_id, span_id, is_remote=remote, trace_flags=TraceFlags(flags))
