"""The OpenAPI description of the JSON API, served at ``/api/v1/openapi.json``."""

from __future__ import annotations

from typing import Any, Final

from stratoscope.attribution.taxonomy import LAYERS, PHASES

MAX_LIMIT: Final = 10_000
Schema = dict[str, Any]
_NUMBER: Final[Schema] = {"type": "number"}
_COUNT: Final[Schema] = {"type": "integer", "minimum": 0}
_TEXT: Final[Schema] = {"type": "string"}
_TRACE_ID: Final[Schema] = {"type": "string", "pattern": "^[0-9a-f]{32}$"}
_SHARE: Final[Schema] = {"type": "number", "minimum": 0, "maximum": 1}


def _maybe(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _object(required: Schema, **optional: Schema) -> Schema:
    """An object; more properties may come, those of ``required`` are always there."""
    return {"type": "object", "required": list(required), "properties": {**required, **optional}}


def _list(of: Schema) -> Schema:
    return {"type": "array", "items": of}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


_SCHEMA_NAME: Final[Schema] = {"const": "stratoscope/1"}
_CELL: Final[Schema] = {"layer": {"enum": list(LAYERS)}, "cause": _TEXT, "seconds": _NUMBER, "share": _SHARE}
_QUANTILES: Final = _object(
    {"count": _COUNT, **{f"{name}_ms": _maybe(_NUMBER) for name in ("mean", "p50", "p90", "p99")}}
)
_SCHEMAS: Final[dict[str, Schema]] = {
    "Error": _object({"error": _TEXT}, parameter=_TEXT),
    "Health": _object({"status": _TEXT}),
    "Cause": _object(_CELL),
    "MatrixRow": _object({"phase": {"enum": list(PHASES)}, "band": _TEXT, **_CELL, "requests": _COUNT}),
    "LabelRow": _object(
        {"phase": {"enum": list(PHASES)}, "band": _TEXT, "layer": _TEXT, "label": _TEXT, "seconds": _NUMBER}
    ),
    "RequestRow": _object(
        {
            "trace_id": _TRACE_ID,
            "end_unix_s": _NUMBER,
            "e2e_ms": _NUMBER,
            "ttft_ms": _NUMBER,
            "outcome": _TEXT,
            "model": _maybe(_TEXT),
            "input_tokens": _maybe(_COUNT),
            "output_tokens": _maybe(_COUNT),
            "top_causes": _list(_ref("Cause")),
        }
    ),
    "Summary": _object(
        {
            "schema": _SCHEMA_NAME,
            "requests": _COUNT,
            "outcomes": {"type": "object", "additionalProperties": _COUNT},
            "window": _object({name: _maybe(_NUMBER) for name in ("seconds", "from_unix_s", "to_unix_s")}),
            "latency": _object(dict.fromkeys(("ttft", "itl", "e2e"), _QUANTILES)),
            "conservation": _object(
                {
                    "max_abs_residual_ns": _COUNT,
                    "unattributed_share_mean": _SHARE,
                    "unattributed_share_p99": _SHARE,
                }
            ),
            "matrix": _list(_ref("MatrixRow")),
            "labels": _list(_ref("LabelRow")),
            "slowest": _list(_ref("RequestRow")),
            "hook": _object(
                {
                    "us_per_step": _maybe(_NUMBER),
                    "us_per_step_overlapped": _maybe(_NUMBER),
                    "us_per_request": _maybe(_NUMBER),
                    "dropped": _COUNT,
                    "errors": _COUNT,
                    "processes": _list({"type": "object"}),
                }
            ),
            "versions": {"type": "object", "additionalProperties": _TEXT},
            "engines": _list({"type": "object"}),
        }
    ),
    "Matrix": _object(
        {
            "schema": _SCHEMA_NAME,
            "requests": _COUNT,
            "approximate": {"type": "boolean"},
            "matrix": _list(_ref("MatrixRow")),
        }
    ),
    "RequestList": _object({"schema": _SCHEMA_NAME, "total": _COUNT, "requests": _list(_ref("RequestRow"))}),
    "Request": _object(
        {
            "schema": _SCHEMA_NAME,
            "trace_id": _TRACE_ID,
            "attributes": {"type": "object"},
            "phases": _object(
                dict.fromkeys(PHASES, _object({"seconds": _NUMBER, "causes": _list(_ref("Cause"))}))
            ),
            "waterfall": _list(
                _object(
                    {
                        "start_ms": _NUMBER,
                        "duration_ms": _NUMBER,
                        "group": _TEXT,
                        "layer": {"enum": list(LAYERS)},
                        "cause": _TEXT,
                        "steps": _COUNT,
                        "note": _TEXT,
                    }
                )
            ),
            "neighbours": _list(
                _object({"trace_id": _TRACE_ID, "seconds": _NUMBER, "tokens": _COUNT, "mechanism": _TEXT})
            ),
            "explanation": _list(_TEXT),
        }
    ),
    "Steps": _object(
        {
            "schema": _SCHEMA_NAME,
            "total": _COUNT,
            "steps": _list(_object({"engine_uid": _TEXT, "step": _COUNT, "sched_start_ns": _COUNT})),
        }
    ),
    "Status": _object(
        {
            "schema": _SCHEMA_NAME,
            "uptime_s": _NUMBER,
            "attribution": _maybe({"type": "object"}),
            "telemetry": {"type": "object", "additionalProperties": _NUMBER},
        },
        version=_TEXT,
        pipelines={"type": "object"},
    ),
}


def _parameter(name: str, schema: Schema, text: str, where: str = "query") -> Schema:
    return {"name": name, "in": where, "required": where == "path", "schema": schema, "description": text}


_WINDOW: Final = _parameter("window", _NUMBER, "Only requests that ended in the last so many seconds.")
_MODEL: Final = _parameter("model", _TEXT, "Only requests of this model.")
_LIMIT: Final = _parameter(
    "limit", {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT}, "How many at most."
)


def _get(text: str, schema: str, *parameters: Schema, errors: tuple[int, ...] = ()) -> Schema:
    def answer(name: str, words: str) -> Schema:
        return {"description": words, "content": {"application/json": {"schema": _ref(name)}}}

    responses = {"200": answer(schema, "OK")}
    responses.update({str(code): answer("Error", "See ``error``.") for code in errors})
    return {"get": {"summary": text, "parameters": list(parameters), "responses": responses}}


_PATHS: Final[Schema] = {
    "/metrics": {
        "get": {
            "summary": "Prometheus text, or OpenMetrics with exemplars if that is accepted.",
            "responses": {"200": {"description": "OK", "content": {"text/plain": {"schema": _TEXT}}}},
        }
    },
    "/healthz": _get("The process lives.", "Health"),
    "/readyz": _get("The agent takes data.", "Health"),
    "/api/v1/summary": _get("Everything at a glance.", "Summary", _WINDOW, _MODEL, errors=(400, 503)),
    "/api/v1/matrix": _get(
        "Seconds by phase, latency band, layer and cause.",
        "Matrix",
        _WINDOW,
        _MODEL,
        _parameter("phase", {"enum": list(PHASES)}, "Only this phase."),
        errors=(400, 503),
    ),
    "/api/v1/requests": _get(
        "Finished requests.",
        "RequestList",
        _parameter("sort", {"enum": ["slowest", "recent"]}, "Which come first; slowest if not given."),
        _LIMIT,
        _parameter("offset", _COUNT, "How many to skip."),
        _parameter("outcome", {"enum": ["ok", "aborted", "error", "unfinished"]}, "Only this outcome."),
        _MODEL,
        errors=(400, 503),
    ),
    "/api/v1/requests/{trace_id}": _get(
        "One request: where its time went, in order and in words.",
        "Request",
        _parameter("trace_id", _TRACE_ID, "As in its traceparent.", "path"),
        errors=(400, 404, 503),
    ),
    "/api/v1/steps": _get(
        "Recent engine steps, newest first.",
        "Steps",
        _parameter("engine", _TEXT, "Only the engine with this uid."),
        _parameter("from", _COUNT, "The first step number."),
        _parameter("to", _COUNT, "The last step number."),
        _LIMIT,
        errors=(400, 503),
    ),
    "/api/v1/status": _get("The agent's health: what it holds, what it lost.", "Status"),
    "/api/v1/openapi.json": {
        "get": {
            "summary": "This description.",
            "responses": {
                "200": {"description": "OK", "content": {"application/json": {"schema": {"type": "object"}}}}
            },
        }
    },
}


def document() -> dict[str, Any]:
    """The description, OpenAPI 3.1."""
    return {
        "openapi": "3.1.0",
        "info": {"title": "Stratoscope agent", "version": "1", "license": {"name": "Apache-2.0"}},
        "paths": _PATHS,
        "components": {"schemas": _SCHEMAS},
    }
