"""OTLP spans of the hook as typed records; all that is known of the wire is in ``semconv``.

A span without ``stratoscope.record`` is not the hook's and is left alone. One that has it and does
not hold together (an attribute of the wrong type, a table that is no whole number of rows, a
required attribute missing) is rejected with a reason; its neighbours are kept. What comes out may
still say untrue things about time: that is for the attribution to judge.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from stratoscope.attribution.errors import TableError
from stratoscope.attribution.records import EngineRequest, ServerRequest
from stratoscope.attribution.tables import Int64, OutputTable, StepTable, WorkerStepTable, columns_from_rows
from stratoscope.collector.span_attributes import Attributes, Bad, read_attributes
from stratoscope.instrumentation import semconv as sc

MAX_TABLE_BYTES: Final = 16 << 20
_OUTCOMES: Final = frozenset((sc.Outcome.OK, sc.Outcome.ABORTED, sc.Outcome.ERROR, sc.Outcome.UNFINISHED))
_RECORD_LIMIT: Final = 1 << 31
_MAX_PROCESSES: Final = 4096
_MAX_REASONS: Final = 20


@dataclass(frozen=True, slots=True)
class Process:
    """The process that a record comes from, by its resource. ``resource`` is serialised protobuf."""

    uid: str
    clock_domain: str
    wall_offset_ns: int
    service: str
    instance: str
    host: str
    pid: int
    versions: tuple[tuple[str, str], ...]  # ("vllm", "0.32.0"), ...
    resource: bytes


@dataclass(frozen=True, slots=True)
class ServerSpan:
    """``request.server``: ids are raw bytes; ``facts`` are for people and filters."""

    trace_id: bytes
    span_id: bytes
    process: Process
    request: ServerRequest
    facts: dict[str, Any]
    flags: int = 0


@dataclass(frozen=True, slots=True)
class EngineSpan:
    """``request.engine``; ``parent_id`` is the server span's id."""

    trace_id: bytes
    span_id: bytes
    parent_id: bytes
    process: Process
    request: EngineRequest
    facts: dict[str, Any]


@dataclass(frozen=True, slots=True)
class WorkerSpan:
    """``request.worker``: one rank's part in one engine request."""

    trace_id: bytes
    span_id: bytes
    parent_id: bytes
    process: Process
    engine_uid: str
    rank: int
    exec_ns: int


@dataclass(frozen=True, slots=True)
class Window:
    """``window.*``: a table, the watermark, and the hook's own account (cumulative, by short name).

    ``table`` has the type that ``kind`` asks for; open requests are int64 of shape (n, 4).
    """

    span_id: bytes
    kind: str
    process: Process
    role: str
    watermark_ns: int
    table: StepTable | WorkerStepTable | OutputTable | Int64
    account: dict[str, int]
    missing: tuple[str, ...] = ()
    engine_uid: str = ""
    engine_index: int = 0
    rank: int = 0


SpanRecord = ServerSpan | EngineSpan | WorkerSpan | Window


@dataclass(slots=True)
class Parsed:
    """What a request held. ``reasons`` has the first few rejections; ``foreign`` counts other spans."""

    records: list[SpanRecord] = field(default_factory=list)
    rejected: int = 0
    reasons: list[str] = field(default_factory=list)
    foreign: int = 0


class RecordParser:
    """Parses export requests; remembers the resources it has seen. For one thread."""

    def __init__(self) -> None:
        self._processes: dict[bytes, Process | str] = {}

    def parse(self, message: Any) -> Parsed:
        """The records of an ``ExportTraceServiceRequest``. Never raises."""
        parsed = Parsed()
        for resource_spans in message.resource_spans:
            process: Process | str | None = None
            for scope_spans in resource_spans.scope_spans:
                if scope_spans.scope.name != sc.SCOPE_NAME:
                    parsed.foreign += len(scope_spans.spans)
                    continue
                if process is None:
                    process = self._process(resource_spans.resource)
                for span in scope_spans.spans:
                    self._span(span, process, parsed)
        return parsed

    def _span(self, span: Any, process: Process | str, parsed: Parsed) -> None:
        try:
            attributes = read_attributes(span.attributes)
            kind = attributes.get(sc.RECORD)
            if kind is None or attributes.get(sc.SYNTH):
                parsed.foreign += 1
                return
            if isinstance(process, str):
                raise Bad(process)
            builder = _BUILDERS.get(kind)
            if builder is None:
                raise Bad(f"{sc.RECORD}: {str(kind)[:40]!r} is not known here")
            parsed.records.append(builder(span, attributes, process))
        except (Bad, TableError) as error:
            parsed.rejected += 1
            if len(parsed.reasons) < _MAX_REASONS:
                parsed.reasons.append(f"span {str(span.name)[:40]!r}: {error}")

    def _process(self, resource: Any) -> Process | str:
        key = resource.SerializeToString(deterministic=True)
        known = self._processes.get(key)
        if known is None:
            try:
                known = _process_of(resource, key)
            except Bad as error:
                known = f"resource: {error}"
            if len(self._processes) >= _MAX_PROCESSES:
                self._processes.clear()
            self._processes[key] = known
        return known


def _process_of(resource: Any, raw: bytes) -> Process:
    a = read_attributes(resource.attributes)
    runtime = a.text("process.runtime.version", "")
    versions = {
        "stratoscope": a.text(sc.HOOK_VERSION, ""),
        "vllm": a.text(sc.VLLM_VERSION, ""),
        "torch": a.text(sc.TORCH_VERSION, ""),
        "python": runtime,
    }
    uid = a.text(sc.PROCESS_UID)
    return Process(
        uid=uid,
        clock_domain=a.text(sc.CLOCK_DOMAIN),
        wall_offset_ns=a.integer(sc.WALL_OFFSET_NS, 0),
        service=a.text(sc.SERVICE_NAME, ""),
        instance=a.text(sc.SERVICE_INSTANCE_ID, uid),
        host=a.text("host.name", ""),
        pid=a.integer("process.pid", 0),
        versions=tuple((name, value) for name, value in versions.items() if value and value != "unknown"),
        resource=raw,
    )


def _server(span: Any, a: Attributes, process: Process) -> ServerSpan:
    outcome = a.text(sc.OUTCOME)
    if outcome not in _OUTCOMES:
        raise Bad(f"{sc.OUTCOME}: must be one of {', '.join(sorted(_OUTCOMES))}, not {outcome[:40]!r}")
    submitted = min(max(a.integer(sc.N_ENGINE_REQUESTS, 0), 0), _RECORD_LIMIT)
    request = ServerRequest(
        arrival_ns=a.integer(sc.T_ARRIVAL),
        end_ns=a.integer(sc.T_END),
        last_byte_ns=a.integer(sc.T_LAST_BYTE, 0),
        outcome=outcome,
        streaming=a.flag(sc.STREAMING, False),
        api=a.text(sc.API, "http"),
        process_uid=process.uid,
        body_ns=a.integer(sc.T_BODY, 0),
        template_start_ns=a.integer(sc.T_TEMPLATE_START, 0),
        template_end_ns=a.integer(sc.T_TEMPLATE_END, 0),
        tokenize_start_ns=a.integer(sc.T_TOKENIZE_START, 0),
        tokenize_end_ns=a.integer(sc.T_TOKENIZE_END, 0),
        submit_ns=a.integer(sc.T_SUBMIT, 0),
        n_engine_requests=submitted,
        flushes=_matrix(a, sc.FLUSHES, len(sc.FLUSH_COLUMNS)),
        flushes_dropped=max(a.integer(sc.FLUSHES_DROPPED, 0), 0),
    )
    facts = {
        "model": a.text(sc.GEN_AI_REQUEST_MODEL, ""),
        "operation": a.text(sc.GEN_AI_OPERATION, ""),
        "route": a.text(sc.HTTP_ROUTE, ""),
        "status": a.integer(sc.HTTP_STATUS, 0),
        "error_type": a.text(sc.ERROR_TYPE, ""),
    }
    return ServerSpan(span.trace_id, span.span_id, process, request, facts, span.flags & 0xFF)


_ENGINE_FACTS: Final = (
    ("max_tokens", sc.GEN_AI_MAX_TOKENS),
    ("choices", sc.GEN_AI_CHOICE_COUNT),
    ("logprobs", sc.LOGPROBS),
    ("prompt_logprobs", sc.PROMPT_LOGPROBS),
    ("presence_penalty", sc.GEN_AI_PRESENCE_PENALTY),
    ("frequency_penalty", sc.GEN_AI_FREQUENCY_PENALTY),
    ("repetition_penalty", sc.REPETITION_PENALTY),
    ("structured_output", sc.STRUCTURED_OUTPUT),
    ("lora", sc.LORA_NAME),
)


def _engine(span: Any, a: Attributes, process: Process) -> EngineSpan:
    request = EngineRequest(
        engine_uid=a.text(sc.ENGINE_UID),
        engine_index=a.integer(sc.ENGINE_INDEX, 0),
        request_id=a.text(sc.REQUEST_ID, ""),
        core_received_ns=a.integer(sc.T_CORE_RECEIVED, 0),
        core_preprocessed_ns=a.integer(sc.T_CORE_PREPROCESSED, 0),
        queued_ns=a.integer(sc.T_QUEUED, 0),
        finished_ns=a.integer(sc.T_FINISHED),
        arrival_step=a.integer(sc.ARRIVAL_STEP, -1),
        first_step=a.integer(sc.FIRST_STEP),
        first_output_step=a.integer(sc.FIRST_OUTPUT_STEP, -1),
        last_step=a.integer(sc.LAST_STEP),
        events=_matrix(a, sc.EVENTS, len(sc.EVENT_COLUMNS)),
        prompt_tokens=max(a.integer(sc.GEN_AI_INPUT_TOKENS, 0), 0),
        cached_tokens=max(a.integer(sc.GEN_AI_CACHED_TOKENS, 0), 0),
        output_tokens=max(a.integer(sc.GEN_AI_OUTPUT_TOKENS, 0), 0),
        preemptions=max(a.integer(sc.PREEMPTIONS, 0), 0),
        recomputed_tokens=max(a.integer(sc.RECOMPUTED_TOKENS, 0), 0),
    )
    facts: dict[str, Any] = {"model": a.text(sc.GEN_AI_REQUEST_MODEL, "")}
    reasons = a.texts(sc.GEN_AI_FINISH_REASONS, ())
    if reasons:
        facts["finish_reason"] = reasons[0]
    for name, attribute in _ENGINE_FACTS:
        value = a.scalar(attribute)
        if value is not None:
            facts[name] = value
    return EngineSpan(span.trace_id, span.span_id, span.parent_span_id, process, request, facts)


def _worker(span: Any, a: Attributes, process: Process) -> WorkerSpan:
    return WorkerSpan(
        span.trace_id,
        span.span_id,
        span.parent_span_id,
        process,
        engine_uid=a.text(sc.ENGINE_UID),
        rank=a.integer(sc.RANK),
        exec_ns=max(a.integer(sc.EXEC_TOTAL, 0), 0),
    )


ACCOUNT: Final = {
    "steps": sc.HOOK_STEPS,
    "requests": sc.HOOK_REQUESTS,
    "critical_ns": sc.HOOK_CRITICAL_NS,
    "overlapped_ns": sc.HOOK_OVERLAPPED_NS,
    "request_ns": sc.HOOK_REQUEST_NS,
    "flush_cpu_ns": sc.HOOK_FLUSH_CPU_NS,
    "dropped": sc.HOOK_DROPPED,
    "errors": sc.HOOK_ERRORS,
    "loop_lag_max_ns": sc.LOOP_LAG_MAX_NS,
}
"""Short names of the hook's account on a window."""


def _window(span: Any, a: Attributes, process: Process) -> Window:
    kind = a.text(sc.RECORD)
    columns = a.texts(sc.COLUMNS)
    rows = a.data(sc.ROWS)
    if len(rows) > MAX_TABLE_BYTES:
        raise Bad(f"{sc.ROWS}: {len(rows)} bytes, more than {MAX_TABLE_BYTES}")
    of_engine = kind in (sc.Record.STEPS, sc.Record.WORKER_STEPS)
    return Window(
        span_id=span.span_id,
        kind=kind,
        process=process,
        role=a.text(sc.ROLE, ""),
        watermark_ns=a.integer(sc.WATERMARK),
        table=_table(kind, columns, rows),
        account={name: max(a.integer(attribute, 0), 0) for name, attribute in ACCOUNT.items()},
        missing=(*a.texts(sc.HOOK_MISSING, ()), *a.texts(sc.HOOK_DISABLED, ())),
        engine_uid=a.text(sc.ENGINE_UID) if of_engine else a.text(sc.ENGINE_UID, ""),
        engine_index=a.integer(sc.ENGINE_INDEX, 0),
        rank=a.integer(sc.RANK) if kind == sc.Record.WORKER_STEPS else 0,
    )


def _table(
    kind: str, columns: tuple[str, ...], rows: bytes
) -> StepTable | WorkerStepTable | OutputTable | Int64:
    if kind == sc.Record.STEPS:
        return StepTable.from_rows(columns, rows)
    if kind == sc.Record.WORKER_STEPS:
        return WorkerStepTable.from_rows(columns, rows)
    if kind == sc.Record.OUTPUTS:
        return OutputTable.from_rows(columns, rows)
    found = columns_from_rows(columns, rows, sc.OPEN_COLUMNS)
    return np.stack([found[name] for name in sc.OPEN_COLUMNS], axis=1)


def _matrix(a: Attributes, name: str, width: int) -> Int64:
    rows = a.data(name, b"")
    if len(rows) % (8 * width):
        raise Bad(f"{name}: {len(rows)} bytes are not a whole number of rows of {width} int64")
    if len(rows) > MAX_TABLE_BYTES:
        raise Bad(f"{name}: {len(rows)} bytes, more than {MAX_TABLE_BYTES}")
    return np.frombuffer(rows, "<i8").reshape(-1, width)


_BUILDERS: Final[dict[Any, Any]] = {
    sc.Record.SERVER: _server,
    sc.Record.ENGINE: _engine,
    sc.Record.WORKER: _worker,
    **dict.fromkeys((sc.Record.STEPS, sc.Record.WORKER_STEPS, sc.Record.OUTPUTS, sc.Record.OPEN), _window),
}
