"""OTLP over HTTP: POST /v1/traces, /v1/metrics, /v1/logs, as protobuf or JSON, plain or gzip.

Errors carry a ``google.rpc.Status`` in the request's own content type, as OTLP asks.
"""

from __future__ import annotations

import asyncio
import math
import ssl
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from google.protobuf import json_format
from google.rpc import code_pb2, status_pb2
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from stratoscope.collector.component import Refused, Signal
from stratoscope.collector.http_server import HttpServer
from stratoscope.collector.otlp import (
    Decoded,
    InvalidPayload,
    PayloadError,
    PayloadTooLarge,
    UnsupportedPayload,
    decode_protobuf,
    decompress,
    partial_success,
)
from stratoscope.collector.otlp_json import decode_json
from stratoscope.collector.receivers.intake import RETRY_AFTER_S, Intake

if TYPE_CHECKING:
    from stratoscope.collector.receivers.otlp import ServerTls

PROTOBUF, JSON = "application/x-protobuf", "application/json"
THREADS = 2
BODY_TIMEOUT_S = 30.0
BUFFERED_BODIES = 8  # how many bodies of the largest size may be held at once, all clients together
_DECODERS: dict[str, Callable[[Signal, bytes], Decoded]] = {PROTOBUF: decode_protobuf, JSON: decode_json}
_HTTP_STATUS = {InvalidPayload: 400, PayloadTooLarge: 413, UnsupportedPayload: 415}
_RPC_CODE = {
    400: code_pb2.INVALID_ARGUMENT,
    408: code_pb2.DEADLINE_EXCEEDED,
    413: code_pb2.RESOURCE_EXHAUSTED,
    415: code_pb2.INVALID_ARGUMENT,
    503: code_pb2.UNAVAILABLE,
}


class HttpReceiver:
    """Serves ``endpoint`` between start and shutdown; port 0 takes a free port (see ``port``)."""

    def __init__(
        self, intake: Intake, endpoint: str, key: str, max_body_bytes: int, tls: ServerTls | None
    ) -> None:
        self._intake = intake
        self._max_body_bytes = max_body_bytes
        self._buffered_bytes = 0  # only the event loop touches it
        self._pool: ThreadPoolExecutor | None = None
        routes = [
            Route(f"/v1/{signal}", self._endpoint(signal), methods=["POST"])
            for signal in sorted(intake.signals)
        ]
        self._server = HttpServer(Starlette(routes=routes), endpoint, key, _uvicorn_tls(tls))

    @property
    def port(self) -> int:
        """The port that is listened on."""
        return self._server.port

    def start(self) -> None:
        """Listen. Raises ``StartError``."""
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="otlp-http")
        self._server.start()

    def shutdown(self, timeout_s: float) -> None:
        """Refuse new requests, let those in flight finish."""
        self._server.shutdown(timeout_s)
        if self._pool is not None:
            self._pool.shutdown(wait=False)

    def _endpoint(self, signal: Signal) -> Callable[[Request], Any]:
        async def export(request: Request) -> Response:
            content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            held = _Held()
            try:
                self._check_head(content_type, request)
                body = await asyncio.wait_for(self._read_body(request, held), BODY_TIMEOUT_S)
                encoding = request.headers.get("content-encoding", "")
                work = self._work(signal, content_type, encoding, body)
                decoded = await asyncio.get_running_loop().run_in_executor(self._pool, work)
            except _BadRequest as error:
                self._intake.count_bad(signal, error.error)
                return _error(content_type, error.error)
            except PayloadError as error:
                return _error(content_type, error)
            except Refused as error:
                return _refused(content_type, error)
            except TimeoutError:
                return _status(content_type, 408, f"the body did not arrive within {BODY_TIMEOUT_S:g} s")
            except ClientDisconnect:
                return Response(status_code=400)  # nobody reads it
            finally:
                self._buffered_bytes -= held.size_bytes
            return _success(content_type, partial_success(signal, decoded))

        return export

    def _check_head(self, content_type: str, request: Request) -> None:
        if content_type not in _DECODERS:
            text = f"Content-Type {content_type[:60]!r} is not supported; use {PROTOBUF} or {JSON}"
            raise _BadRequest(UnsupportedPayload(text))
        length = request.headers.get("content-length", "")
        if length.isascii() and length.isdigit() and len(length) < 20 and int(length) > self._max_body_bytes:
            raise _BadRequest(self._too_large())

    async def _read_body(self, request: Request, held: _Held) -> bytes:
        chunks: list[bytes] = []
        async for chunk in request.stream():
            held.size_bytes += len(chunk)
            self._buffered_bytes += len(chunk)
            if held.size_bytes > self._max_body_bytes:
                raise _BadRequest(self._too_large())
            if self._buffered_bytes > BUFFERED_BODIES * self._max_body_bytes:
                raise Refused("too many requests at once", retryable=True)
            chunks.append(chunk)
        return b"".join(chunks)

    def _too_large(self) -> PayloadTooLarge:
        return PayloadTooLarge(f"body is larger than max_request_body_size, {self._max_body_bytes} bytes")

    def _work(self, signal: Signal, content_type: str, encoding: str, body: bytes) -> Callable[[], Decoded]:
        def decode() -> Decoded:
            return _DECODERS[content_type](signal, decompress(body, encoding, self._max_body_bytes))

        return lambda: self._intake.take(signal, decode)


class _Held:
    """Bytes of one request that are counted in the receiver's total."""

    size_bytes = 0


class _BadRequest(Exception):
    """A payload error found before the intake could count it."""

    def __init__(self, error: PayloadError) -> None:
        self.error = error


def _uvicorn_tls(tls: ServerTls | None) -> dict[str, Any]:
    if tls is None:
        return {}
    options: dict[str, Any] = {"ssl_certfile": tls.cert_file, "ssl_keyfile": tls.key_file}
    if tls.client_ca_file:
        options.update(ssl_ca_certs=tls.client_ca_file, ssl_cert_reqs=ssl.CERT_REQUIRED)
    return options


def _success(content_type: str, response: Any) -> Response:
    if content_type == JSON:
        return Response(json_format.MessageToJson(response, indent=None), media_type=JSON)
    return Response(response.SerializeToString(), media_type=PROTOBUF)


def _error(content_type: str, error: PayloadError) -> Response:
    return _status(content_type, _HTTP_STATUS[type(error)], error.reason)


def _refused(content_type: str, error: Refused) -> Response:
    if not error.retryable:
        return _status(content_type, 500, error.reason)
    response = _status(content_type, 503, error.reason)
    response.headers["Retry-After"] = str(math.ceil(error.retry_after_s or RETRY_AFTER_S))
    return response


def _status(content_type: str, http_status: int, reason: str) -> Response:
    code: Any = _RPC_CODE.get(http_status, code_pb2.INTERNAL)
    status = status_pb2.Status(code=code, message=reason)
    if content_type == PROTOBUF:
        return Response(status.SerializeToString(), http_status, media_type=PROTOBUF)
    return Response(json_format.MessageToJson(status, indent=None), http_status, media_type=JSON)
