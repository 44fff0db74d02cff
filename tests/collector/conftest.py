"""A small vLLM as its hook would report it: OTLP in, made by arithmetic, the same every time."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from stratoscope.instrumentation import semconv as sc

MS = 1_000_000
T0 = 1_000_000 * MS
WALL = 1_700_000_000_000 * MS
DECODES = 3


def set_value(target: Any, value: Any) -> None:
    if isinstance(value, bool):
        target.bool_value = value
    elif isinstance(value, int):
        target.int_value = value
    elif isinstance(value, float):
        target.double_value = value
    elif isinstance(value, bytes):
        target.bytes_value = value
    elif isinstance(value, str):
        target.string_value = value
    else:
        target.array_value.SetInParent()
        for item in value:
            set_value(target.array_value.values.add(), item)


def pack(rows: Iterable[Sequence[int]]) -> bytes:
    return b"".join(struct.pack(f"<{len(row)}q", *row) for row in rows)


def trace_id(index: int) -> bytes:
    return bytes([0xAB]) + index.to_bytes(15, "big")


def server_id(index: int) -> bytes:
    return bytes([0xCD]) + index.to_bytes(7, "big")


class TinyVllm:
    """``requests`` requests, one admitted a step of 10 ms, each with a prefill and three decode steps.

    :meth:`messages` gives one export request a span, so that a test may lose, repeat and reorder them.
    """

    def __init__(self, requests: int = 4, open_only: int = 0, model: str = "tiny") -> None:
        self.requests, self.open_only, self.model = requests, open_only, model

    def messages(self) -> list[ExportTraceServiceRequest]:
        """All spans, in the order in which a flush would send them."""
        spans = []
        for index in range(self.requests):
            spans += [self.server(index), self.engine(index)]
        return [*spans, *self.windows()]

    def step_start(self, step: int) -> int:
        return T0 + step * 10 * MS

    def message(self, uid: str, name: str, ids: tuple[bytes, bytes, bytes], values: dict[str, Any]) -> Any:
        """An export request with one span of process ``uid``."""
        message = ExportTraceServiceRequest()
        resource = message.resource_spans.add()
        about = {
            sc.PROCESS_UID: uid, sc.CLOCK_DOMAIN: "boot-1", sc.WALL_OFFSET_NS: WALL, sc.SERVICE_NAME: "vllm",
            sc.VLLM_VERSION: "0.32.0",
        }  # fmt: skip
        for key, value in about.items():
            set_value(resource.resource.attributes.add(key=key).value, value)
        scope = resource.scope_spans.add()
        scope.scope.name = sc.SCOPE_NAME
        span = scope.spans.add(trace_id=ids[0], span_id=ids[1], parent_span_id=ids[2], name=name)
        span.start_time_unix_nano, span.end_time_unix_nano = WALL, WALL + 1
        for key, value in values.items():
            set_value(span.attributes.add(key=key).value, value)
        return message

    def server(self, index: int, **changed: Any) -> ExportTraceServiceRequest:
        """The server span of request ``index``; ``changed`` by constant name, None leaves it out."""
        arrival = self.step_start(index) - 5 * MS
        flushes = [
            (self.step_start(index + k) + 9_200_000, self.step_start(index + k) + 9_300_000)
            for k in range(1 + DECODES)
        ]
        values = {
            "RECORD": sc.Record.SERVER, "ROLE": "api_server", "OUTCOME": "ok", "STREAMING": True,
            "T_ARRIVAL": arrival, "T_BODY": arrival + 100_000, "T_SUBMIT": arrival + MS,
            "T_LAST_BYTE": flushes[-1][1], "T_END": flushes[-1][1] + 1000, "FLUSHES": pack(flushes),
            "N_ENGINE_REQUESTS": 1, "GEN_AI_REQUEST_MODEL": self.model, "HTTP_ROUTE": "/v1/completions",
            **changed,
        }  # fmt: skip
        return self.message("a" * 16, "POST", (trace_id(index), server_id(index), b""), self._named(values))

    def engine(self, index: int, **changed: Any) -> ExportTraceServiceRequest:
        """The engine span of request ``index``."""
        arrival = self.step_start(index) - 5 * MS
        values = {
            "RECORD": sc.Record.ENGINE, "ROLE": "engine_core", "ENGINE_UID": "e" * 16,
            "REQUEST_ID": f"cmpl-{index}", "T_CORE_RECEIVED": arrival + 2 * MS,
            "T_CORE_PREPROCESSED": arrival + 2_100_000, "T_QUEUED": arrival + 3 * MS,
            "T_FINISHED": self.step_start(index + DECODES) + 9 * MS,
            "ARRIVAL_STEP": index, "FIRST_STEP": index,
            "FIRST_OUTPUT_STEP": index, "LAST_STEP": index + DECODES,
            "EVENTS": pack([(index, int(sc.EventKind.PREFILL), 100)]), "GEN_AI_INPUT_TOKENS": 100,
            "GEN_AI_OUTPUT_TOKENS": 1 + DECODES, **changed,
        }  # fmt: skip
        ids = (trace_id(index), bytes([0xEF]) + index.to_bytes(7, "big"), server_id(index))
        return self.message("c" * 16, "engine request", ids, self._named(values))

    def windows(self) -> list[ExportTraceServiceRequest]:
        """The tables of steps, executions, outputs, and of open requests if there are any."""
        steps, executions, outputs = [], [], []
        for step in range(self.requests + DECODES):
            at = self.step_start(step)
            prefill = 100 if step < self.requests else 0
            decodes = min(step, DECODES, self.requests + DECODES - step)
            steps.append(
                (step, at, at + MS, at + 1_500_000, at + 8 * MS, at + 9 * MS, 0, 0, decodes + 1, 1, prefill,
                 decodes, 0, 0, 0, 0, 0, 0, 0)
            )  # fmt: skip
            executions.append((step, at + 1_600_000, at + 7_900_000, 0, 0, 0, 0))
            outputs.append((at + 8_500_000, at + 9_050_000, at + 9_150_000, 0, 1))
        found = [
            self.window("c", sc.Record.STEPS, "engine_core", sc.STEP_COLUMNS, steps),
            self.window("w", sc.Record.WORKER_STEPS, "worker", sc.WORKER_STEP_COLUMNS, executions),
            self.window("a", sc.Record.OUTPUTS, "api_server", sc.OUTPUT_COLUMNS, outputs),
        ]
        opened = [
            (*struct.unpack(">qq", trace_id(1000 + i)), *struct.unpack(">q", server_id(1000 + i)), T0)
            for i in range(self.open_only)
        ]
        if opened:
            found.append(self.window("a", sc.Record.OPEN, "api_server", sc.OPEN_COLUMNS, opened))
        return found

    def window(
        self, process: str, record: str, role: str, columns: Sequence[str], rows: Any, **changed: Any
    ) -> Any:
        """A window span."""
        values = {
            "RECORD": record, "ROLE": role, "COLUMNS": list(columns), "ROWS": pack(rows),
            "WATERMARK": self.step_start(self.requests + DECODES + 10), "ENGINE_UID": "e" * 16, "RANK": 0,
            "HOOK_STEPS": len(rows) if role == "engine_core" else 0,
            "HOOK_CRITICAL_NS": 1000 * len(rows), **changed,
        }  # fmt: skip
        ids = (b"\x77" * 16, record.encode().ljust(8, b"w")[-8:], b"")
        return self.message(process * 16, record, ids, self._named(values))

    @staticmethod
    def _named(values: dict[str, Any]) -> dict[str, Any]:
        return {getattr(sc, name): value for name, value in values.items() if value is not None}


@pytest.fixture
def vllm() -> Callable[..., TinyVllm]:
    """``vllm(requests=4)``: a small vLLM that has served so many requests."""
    return TinyVllm
