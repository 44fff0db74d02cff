"""The ``otlp`` (gRPC) and ``otlphttp`` exporters: send the bytes of each batch on, untouched."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal

from stratoscope.collector.component import Batch, Context, Factory, Kind
from stratoscope.collector.config_schema import Duration, Endpoint, key, required
from stratoscope.collector.exporters.otlp_clients import GrpcClient, HttpClient
from stratoscope.collector.exporters.queued import QueueConfig, QueuedSender, RetryConfig


@dataclass(frozen=True)
class ClientTls:
    """``tls``"""

    insecure: bool = key(False, "Do not use TLS (gRPC; an http:// endpoint says the same).")
    insecure_skip_verify: bool = key(False, "HTTP only: accept any certificate.")
    ca_file: str = key("", "PEM authorities to trust; empty: the system's.")
    cert_file: str = key("", "PEM certificate to present.")
    key_file: str = key("", "PEM key of cert_file.")

    def validate(self) -> Iterable[tuple[str, str]]:
        """A certificate is no use without its key."""
        if bool(self.cert_file) != bool(self.key_file):
            missing, given = ("key_file", "cert_file") if self.cert_file else ("cert_file", "key_file")
            yield missing, f"is required when {given} is given"


@dataclass(frozen=True)
class GrpcConfig:
    """``exporters.otlp``"""

    endpoint: Annotated[str, Endpoint(url="allowed")] = required("host:port or URL of an OTLP/gRPC server.")
    headers: dict[str, str] = key({}, "Metadata sent with every request.")
    compression: Literal["none", "gzip"] = key("none", "Compression of requests.")
    tls: ClientTls = key(ClientTls(), "TLS settings.")
    timeout: Annotated[float, Duration(min_s=0.001)] = key(5.0, "Longest time for one attempt.")
    sending_queue: QueueConfig = key(QueueConfig(), "Queue in front of the network.")
    retry_on_failure: RetryConfig = key(RetryConfig(), "What to do about failures that may pass.")

    def validate(self) -> Iterable[tuple[str, str]]:
        """gRPC cannot skip verification."""
        if self.tls.insecure_skip_verify:
            yield "tls.insecure_skip_verify", "is not supported over gRPC; give ca_file"
        for name in self.headers:
            if not name.isascii() or name != name.lower() or name.startswith("grpc-"):
                yield f"headers.{name}", "gRPC metadata names must be lower case and not begin with grpc-"


@dataclass(frozen=True)
class HttpConfig:
    """``exporters.otlphttp``"""

    endpoint: Annotated[str, Endpoint(url="required")] = required("Base URL; /v1/<signal> is appended.")
    headers: dict[str, str] = key({}, "Headers sent with every request.")
    compression: Literal["none", "gzip"] = key("none", "Compression of requests.")
    tls: ClientTls = key(ClientTls(), "TLS settings.")
    timeout: Annotated[float, Duration(min_s=0.001)] = key(30.0, "Longest time for one attempt.")
    sending_queue: QueueConfig = key(QueueConfig(), "Queue in front of the network.")
    retry_on_failure: RetryConfig = key(RetryConfig(), "What to do about failures that may pass.")


class OtlpExporter:
    """A queue in front of a client."""

    def __init__(
        self, name: str, client: GrpcClient | HttpClient, config: GrpcConfig | HttpConfig, context: Context
    ):
        self._client = client
        self._sender = QueuedSender(
            name, client.send, config.timeout, config.sending_queue, config.retry_on_failure, context
        )

    def start(self) -> None:
        """Read certificates, start the threads. The server need not be there yet. Raises ``StartError``."""
        self._client.start()
        self._sender.start()

    def consume(self, batch: Batch) -> None:
        """Queue a batch. Raises ``Refused`` when the queue is full."""
        self._sender.consume(batch)

    def shutdown(self, timeout_s: float) -> None:
        """Flush, then close the connections."""
        deadline = time.monotonic() + timeout_s
        self._sender.shutdown(timeout_s)
        self._client.close(max(0.0, deadline - time.monotonic()))


def build_grpc(name: str, config: GrpcConfig, context: Context) -> OtlpExporter:
    """Make an ``otlp`` exporter."""
    return OtlpExporter(name, GrpcClient(name, config, context.telemetry), config, context)


def build_http(name: str, config: HttpConfig, context: Context) -> OtlpExporter:
    """Make an ``otlphttp`` exporter."""
    return OtlpExporter(name, HttpClient(name, config, context.telemetry), config, context)


grpc_factory = Factory(Kind.EXPORTER, "otlp", GrpcConfig, build_grpc)
http_factory = Factory(Kind.EXPORTER, "otlphttp", HttpConfig, build_http)
