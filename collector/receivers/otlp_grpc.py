"""OTLP over gRPC: the three Export services, on raw bytes and a small pool of threads."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent import futures
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc import code_pb2, error_details_pb2, status_pb2

from stratoscope.collector.component import Refused, Signal, StartError
from stratoscope.collector.config_schema import split_endpoint
from stratoscope.collector.http_server import bind
from stratoscope.collector.otlp import SERVICE, InvalidPayload, PayloadError, decode_protobuf, partial_success
from stratoscope.collector.receivers.intake import RETRY_AFTER_S, Intake

if TYPE_CHECKING:
    from stratoscope.collector.receivers.otlp import ServerTls

log = logging.getLogger(__name__)
THREADS = 4  # decoding holds the GIL; more threads only wait
MAX_CONCURRENT_RPCS = 256  # bounds what unread requests may hold in memory


class GrpcReceiver:
    """Serves ``endpoint`` between start and shutdown; port 0 takes a free port (see ``port``)."""

    def __init__(
        self, intake: Intake, endpoint: str, key: str, max_message_bytes: int, tls: ServerTls | None
    ) -> None:
        self.endpoint, self.key, self.tls = endpoint, key, tls
        self.port = 0
        self._intake = intake
        self._max_message_bytes = max_message_bytes
        self._server: grpc.Server | None = None
        self._pool: futures.ThreadPoolExecutor | None = None

    def start(self) -> None:
        """Listen. Raises :class:`StartError`."""
        self._pool = futures.ThreadPoolExecutor(THREADS, thread_name_prefix="otlp-grpc")
        server = grpc.server(
            self._pool,
            maximum_concurrent_rpcs=MAX_CONCURRENT_RPCS,
            options=[
                ("grpc.max_receive_message_length", self._max_message_bytes),
                ("grpc.so_reuseport", 0),  # else two agents could share a port, each seeing half
            ],
        )
        for signal in sorted(self._intake.signals):
            method = grpc.unary_unary_rpc_method_handler(self._exporter(signal))
            server.add_generic_rpc_handlers(
                (grpc.method_handlers_generic_handler(SERVICE[signal], {"Export": method}),)
            )
        self.port = self._listen(server)
        server.start()
        self._server = server

    def shutdown(self, timeout_s: float) -> None:
        """Refuse new calls, let those in flight finish."""
        if self._server is not None:
            self._server.stop(timeout_s).wait()
            self._server = None
        if self._pool is not None:
            self._pool.shutdown(wait=False)

    def _listen(self, server: grpc.Server) -> int:
        host, port = split_endpoint(self.endpoint)
        address = f"[{host}]:{port}" if ":" in host else f"{host or '0.0.0.0'}:{port}"
        try:
            if self.tls is None:
                bound = server.add_insecure_port(address)
            else:
                bound = server.add_secure_port(address, self._credentials(self.tls))
            if bound:
                return int(bound)
        except RuntimeError:
            pass
        bind(self.endpoint, self.key).close()  # gRPC does not say why it failed: this does
        raise StartError(f"{self.key}: gRPC cannot listen on {self.endpoint!r}")

    def _credentials(self, tls: ServerTls) -> grpc.ServerCredentials:
        def content(path: str) -> bytes:
            try:
                with open(path, "rb") as file:
                    return file.read()
            except OSError as error:
                raise StartError(f"{self.key}: cannot set up TLS: {error}") from error

        client_ca = content(tls.client_ca_file) if tls.client_ca_file else None
        pair = (content(tls.key_file), content(tls.cert_file))
        return grpc.ssl_server_credentials([pair], client_ca, require_client_auth=client_ca is not None)

    def _exporter(self, signal: Signal) -> Callable[[bytes, grpc.ServicerContext], bytes]:
        def export(raw: bytes, context: grpc.ServicerContext) -> bytes:
            try:
                decoded = self._intake.take(signal, lambda: decode_protobuf(signal, raw))
            except InvalidPayload as error:
                abort(context, grpc.StatusCode.INVALID_ARGUMENT, error.reason)
            except PayloadError as error:
                abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, error.reason)
            except Refused as error:
                if not error.retryable:
                    abort(context, grpc.StatusCode.INTERNAL, error.reason)
                abort(
                    context, grpc.StatusCode.UNAVAILABLE, error.reason, error.retry_after_s or RETRY_AFTER_S
                )
            response: bytes = partial_success(signal, decoded).SerializeToString()
            return response

        return export


def abort(
    context: grpc.ServicerContext, code: grpc.StatusCode, reason: str, retry_after_s: float | None = None
) -> NoReturn:
    """End a call with a status; with ``retry_after_s``, carrying the RetryInfo that OTLP asks for."""
    if retry_after_s is not None:
        info: Any = error_details_pb2.RetryInfo()
        info.retry_delay.FromNanoseconds(int(retry_after_s * 1e9))
        detail = AnyMessage()
        detail.Pack(info)
        number: Any = code_pb2.Code.Value(code.name)
        status = status_pb2.Status(code=number, message=reason, details=[detail])
        context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
    context.abort(code, reason)
    raise AssertionError("abort returns")  # it always raises; this tells the type checker
