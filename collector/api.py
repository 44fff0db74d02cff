"""The ``api`` extension: the JSON documents, ``/metrics`` and health, on one port.

Errors are JSON too: ``{"error": sentence}``, with ``parameter`` where one is to blame. No
``Access-Control-Allow-Origin`` is ever sent: pages of other origins may not read this.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from stratoscope.attribution.taxonomy import PHASES
from stratoscope.collector import views
from stratoscope.collector.component import Context, Factory, Kind
from stratoscope.collector.config_schema import Endpoint, key
from stratoscope.collector.http_server import HttpServer
from stratoscope.collector.metrics import RequestMetrics
from stratoscope.collector.openapi import MAX_LIMIT, document
from stratoscope.collector.query import BadParameter, Query

Document = dict[str, Any]
_NO_STORE = {"Cache-Control": "no-store"}  # every answer is of this moment
_LIST_KEYS = ("sort", "limit", "offset", "outcome", "model")


@dataclass(frozen=True)
class Config:
    """``extensions.api``"""

    endpoint: Annotated[str, Endpoint()] = key("127.0.0.1:9464", "Where to serve the JSON API and /metrics.")


class ApiExtension:
    """Serves between :meth:`start` and :meth:`shutdown`; ``port`` is known once started."""

    def __init__(self, name: str, config: Config, context: Context) -> None:
        self._context = context
        self._source = context.attribution
        self._started = False
        if self._source is not None and context.metrics is None:  # once, however many ports serve it
            context.metrics = RequestMetrics(context.registry, self._source)
            self._source.on_finished(context.metrics.observe)
        self._server = HttpServer(self._app(), config.endpoint, f"extensions.{name}.endpoint")

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return self._server.port

    def start(self) -> None:
        """Listen. Raises ``StartError`` naming the key."""
        self._server.start()
        self._started = True

    def shutdown(self, timeout_s: float) -> None:
        """Finish what is being answered, and stop."""
        self._started = False
        self._server.shutdown(timeout_s)

    def _app(self) -> Starlette:
        def route(path: str, answer: Callable[[Request], Document], needs_source: bool = True) -> Route:
            async def endpoint(request: Request) -> Response:
                if needs_source and self._source is None:
                    raise HTTPException(
                        503, "no pipeline of this agent names the attribution processor (service.pipelines)"
                    )
                return JSONResponse(await run_in_threadpool(answer, request), headers=_NO_STORE)

            return Route(path, endpoint, methods=["GET"])

        return Starlette(
            routes=[
                Route("/metrics", self._metrics, methods=["GET"]),
                route("/healthz", self._health, needs_source=False),
                Route("/readyz", self._ready, methods=["GET"]),
                route("/api/v1/summary", self._summary),
                route("/api/v1/matrix", self._matrix),
                route("/api/v1/requests", self._requests),
                route("/api/v1/requests/{trace_id}", self._request),
                route("/api/v1/steps", self._steps),
                route("/api/v1/status", self._status, needs_source=False),
                route("/api/v1/openapi.json", lambda _: document(), needs_source=False),
            ],
            exception_handlers={
                HTTPException: _http_error,
                BadParameter: _bad_parameter,
                Exception: _failure,
            },
        )

    def _summary(self, request: Request) -> Document:
        query = Query(request.query_params, ("window", "model"))
        return views.summary(self._source, query.seconds("window"), query.text("model"))

    def _matrix(self, request: Request) -> Document:
        query = Query(request.query_params, ("window", "model", "phase"))
        return views.matrix(
            self._source, query.seconds("window"), query.text("model"), query.choice("phase", PHASES)
        )

    def _requests(self, request: Request) -> Document:
        query = Query(request.query_params, _LIST_KEYS)
        return views.requests(
            self._source,
            sort=query.choice("sort", ("slowest", "recent")) or "slowest",
            limit=query.integer("limit", 20, 1, MAX_LIMIT),
            offset=query.integer("offset", 0, 0, 1 << 31),
            outcome=query.choice("outcome", ("ok", "aborted", "error", "unfinished")),
            model=query.text("model"),
        )

    def _request(self, request: Request) -> Document:
        Query(request.query_params, ())
        trace_id = request.path_params["trace_id"].lower()
        if len(trace_id) != 32 or set(trace_id) - set("0123456789abcdef"):
            raise BadParameter("trace_id", "must be 32 hexadecimal digits, as in a traceparent header")
        found = views.request(self._source, trace_id)
        if found is None:
            raise HTTPException(
                404,
                f"no finished request with trace id {trace_id} is stored; it may be open, or too long ago",
            )
        return found

    def _steps(self, request: Request) -> Document:
        query = Query(request.query_params, ("engine", "from", "to", "limit"))
        limit = query.integer("limit", 100, 1, MAX_LIMIT)
        low, high = query.integer("from", 0, 0, 1 << 62), query.integer("to", 1 << 62, 0, 1 << 62)
        rows = self._source.steps(query.text("engine"), MAX_LIMIT)
        rows = [row for row in rows if low <= row["step"] <= high]
        return {"schema": views.SCHEMA, "total": len(rows), "steps": rows[:limit]}

    def _status(self, request: Request) -> Document:
        Query(request.query_params, ())
        context = self._context
        return {
            "schema": views.SCHEMA,
            **context.status,
            "uptime_s": max(time.time_ns() - context.started_wall_ns, 0) / 1e9,
            "attribution": self._source.status() if self._source is not None else None,
            "telemetry": context.telemetry.snapshot(),
        }

    def _health(self, request: Request) -> Document:
        return {"status": "ok"}

    async def _ready(self, request: Request) -> Response:
        if self._started:
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "starting"}, status_code=503)

    async def _metrics(self, request: Request) -> Response:
        if not self._context.prometheus:
            raise HTTPException(404, "no pipeline of this agent names the prometheus exporter")
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        body = await run_in_threadpool(encode, self._context.registry)
        return Response(body, headers={"content-type": content_type})


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = error.detail
    if error.status_code == 404 and text == "Not Found":
        text = f"there is nothing at {request.url.path}; /api/v1/openapi.json lists what there is"
    return JSONResponse({"error": text}, error.status_code, headers=error.headers)


async def _bad_parameter(request: Request, error: Exception) -> Response:
    assert isinstance(error, BadParameter)
    return JSONResponse({"error": str(error), "parameter": error.name}, 400)


async def _failure(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": "an error in the agent; see its log"}, 500)


def build(name: str, config: Config, context: Context) -> ApiExtension:
    """Make the extension; processors and exporters are built already."""
    return ApiExtension(name, config, context)


factory = Factory(Kind.EXTENSION, "api", Config, build)
