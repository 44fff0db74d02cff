"""How one OTLP request is sent, over gRPC or HTTP, and what its answer means for a retry."""

from __future__ import annotations

import contextlib
import gzip
import logging
import threading
from typing import TYPE_CHECKING, Any, Final

import grpc
import requests
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from stratoscope.collector.component import Batch, Signal, StartError
from stratoscope.collector.exporters.queued import SendError
from stratoscope.collector.otlp import REJECTED_FIELD, RESPONSE, SERVICE
from stratoscope.collector.telemetry import ITEM_NAME, Telemetry

if TYPE_CHECKING:
    from stratoscope.collector.exporters.otlp import ClientTls, GrpcConfig, HttpConfig

log = logging.getLogger(__name__)
_RETRYABLE_GRPC: Final = {
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DATA_LOSS,
}
_RETRYABLE_HTTP: Final = {429, 502, 503, 504}


class _PartialSuccess:
    """Counts what a server took a request without."""

    def __init__(self, name: str, telemetry: Telemetry) -> None:
        self._name = name
        self._rejected = telemetry.item_counters(
            "exporter_rejected", "Items that the server said it rejected.", ("exporter",)
        )

    def note(self, signal: Signal, body: bytes) -> None:
        response: Any = RESPONSE[signal]()
        try:
            response.ParseFromString(body)
        except DecodeError:  # some servers answer 200 with a text: the data is delivered all the same
            return
        rejected = getattr(response.partial_success, REJECTED_FIELD[signal])
        if rejected > 0:
            self._rejected[signal].labels(self._name).inc(rejected)
            reason = response.partial_success.error_message[:300]
            log.warning("%s: the server rejected %d %s: %s", self._name, rejected, ITEM_NAME[signal], reason)


class GrpcClient:
    """One channel for all threads; gRPC reconnects by itself."""

    def __init__(self, name: str, config: GrpcConfig, telemetry: Telemetry) -> None:
        self._name, self._config = name, config
        self._partial = _PartialSuccess(name, telemetry)
        self._metadata = tuple(config.headers.items())
        self._channel: grpc.Channel | None = None
        self._exports: dict[Signal, grpc.UnaryUnaryMultiCallable] = {}

    def start(self) -> None:
        """Make the channel; connecting happens in the background. Raises ``StartError``."""
        scheme, separator, rest = self._config.endpoint.partition("://")
        target = rest.rstrip("/") if separator else self._config.endpoint
        compression = (
            grpc.Compression.Gzip if self._config.compression == "gzip" else grpc.Compression.NoCompression
        )
        options = [("grpc.max_send_message_length", -1)]
        if self._config.tls.insecure or scheme == "http":
            self._channel = grpc.insecure_channel(target, options, compression)
        else:
            credentials = _grpc_credentials(self._config.tls, f"exporters.{self._name}.tls")
            self._channel = grpc.secure_channel(target, credentials, options, compression)
        self._exports = {s: self._channel.unary_unary(f"/{service}/Export") for s, service in SERVICE.items()}

    def send(self, batch: Batch, timeout_s: float) -> None:
        """One attempt. Raises :class:`SendError`."""
        try:
            body = self._exports[batch.signal](batch.raw, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            code = error.code()
            retry_after_s = _retry_info_s(error)
            retryable = code in _RETRYABLE_GRPC or (
                code is grpc.StatusCode.RESOURCE_EXHAUSTED and retry_after_s is not None
            )
            raise SendError(
                f"{self._config.endpoint} answered {code.name}: {error.details()}", retryable, retry_after_s
            ) from None
        self._partial.note(batch.signal, body)

    def close(self, timeout_s: float) -> None:
        """Close the channel."""
        if self._channel is not None:
            self._channel.close()


class HttpClient:
    """One session, hence one kept-alive connection, a thread."""

    def __init__(self, name: str, config: HttpConfig, telemetry: Telemetry) -> None:
        self._name, self._config = name, config
        self._partial = _PartialSuccess(name, telemetry)
        self._verify = False if config.tls.insecure_skip_verify else (config.tls.ca_file or True)
        self._local = threading.local()
        self._sessions: list[requests.Session] = []

    def start(self) -> None:
        """Check that the certificates can be read. Raises ``StartError``."""
        for file in ("ca_file", "cert_file", "key_file"):
            if path := getattr(self._config.tls, file):
                _content(path, f"exporters.{self._name}.tls.{file}")

    def send(self, batch: Batch, timeout_s: float) -> None:
        """One attempt. Raises :class:`SendError`."""
        headers = {"Content-Type": "application/x-protobuf"}
        body = batch.raw
        if self._config.compression == "gzip":
            headers["Content-Encoding"] = "gzip"
            body = gzip.compress(body, compresslevel=1)
        url = f"{self._config.endpoint.rstrip('/')}/v1/{batch.signal}"
        try:
            answer = self._session().post(
                url,
                data=body,
                headers=headers,
                timeout=timeout_s,
                allow_redirects=False,
                verify=self._verify,  # here, for REQUESTS_CA_BUNDLE would win over the session's
            )
        except (
            requests.ConnectionError,
            requests.Timeout,
            requests.exceptions.ChunkedEncodingError,
        ) as error:
            raise SendError(f"{url}: {error}", retryable=True) from None
        except requests.RequestException as error:  # such as a URL or header that cannot be sent
            raise SendError(f"{url}: {error}", retryable=False) from None
        if answer.status_code // 100 != 2:
            retryable = answer.status_code in _RETRYABLE_HTTP
            text = _status_text(answer)
            raise SendError(f"{url} answered {answer.status_code}: {text}", retryable, _retry_after_s(answer))
        self._partial.note(batch.signal, answer.content)

    def close(self, timeout_s: float) -> None:
        """Close the connections."""
        for session in self._sessions:
            session.close()

    def _session(self) -> requests.Session:
        session: requests.Session | None = getattr(self._local, "session", None)
        if session is None:
            session = requests.Session()
            tls = self._config.tls
            session.cert = (tls.cert_file, tls.key_file) if tls.cert_file else None
            session.headers.update(self._config.headers)
            self._local.session = session
            self._sessions.append(session)
        return session


def _grpc_credentials(tls: ClientTls, key: str) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(
        *(
            _content(path, f"{key}.{file}") if (path := getattr(tls, file)) else None
            for file in ("ca_file", "key_file", "cert_file")
        )
    )


def _content(path: str, key: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise StartError(f"{key}: cannot read {path!r}: {error.strerror}") from error


def _retry_info_s(error: Any) -> float | None:
    for name, value in error.trailing_metadata() or ():
        if name == "grpc-status-details-bin":
            with contextlib.suppress(DecodeError):
                for detail in status_pb2.Status.FromString(value).details:
                    info = error_details_pb2.RetryInfo()
                    if detail.Unpack(info):
                        return float(info.retry_delay.ToNanoseconds() / 1e9)
    return None


def _retry_after_s(answer: requests.Response) -> float | None:
    text = answer.headers.get("Retry-After", "")
    return float(text) if text.isascii() and text.isdigit() and len(text) < 9 else None


def _status_text(answer: requests.Response) -> str:
    """The reason in an error's body: a ``google.rpc.Status`` by the specification, else any text."""
    if "protobuf" in answer.headers.get("Content-Type", ""):
        with contextlib.suppress(DecodeError):
            return str(status_pb2.Status.FromString(answer.content).message)
    return answer.text[:300]
