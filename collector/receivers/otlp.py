"""The ``otlp`` receiver: OTLP over gRPC and over HTTP.

receivers:
  otlp:
    protocols:
      grpc: {endpoint: 127.0.0.1:4317}
      http: {endpoint: 127.0.0.1:4318}
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated

from stratoscope.collector.component import Component, Consumer, Context, Factory, Kind, Signal
from stratoscope.collector.config_schema import Endpoint, Range, key
from stratoscope.collector.receivers.intake import Intake
from stratoscope.collector.receivers.otlp_grpc import GrpcReceiver
from stratoscope.collector.receivers.otlp_http import HttpReceiver


@dataclass(frozen=True)
class ServerTls:
    """``tls`` of a listening endpoint"""

    cert_file: str = key("", "PEM certificate of this server.")
    key_file: str = key("", "PEM private key of this server.")
    client_ca_file: str = key("", "PEM authorities; when set, clients must present a certificate of theirs.")

    def validate(self) -> Iterable[tuple[str, str]]:
        """A certificate is no use without its key."""
        for name in ("cert_file", "key_file"):
            if not getattr(self, name):
                yield name, "is required when tls is given"


@dataclass(frozen=True)
class GrpcConfig:
    """``protocols.grpc``"""

    endpoint: Annotated[str, Endpoint()] = key(
        "127.0.0.1:4317", "host:port to listen on; 0.0.0.0 for every interface."
    )
    max_recv_msg_size_mib: Annotated[int, Range(1, 1024)] = key(16, "Largest request in MiB, uncompressed.")
    tls: ServerTls | None = key(None, "Serve over TLS.")


@dataclass(frozen=True)
class HttpConfig:
    """``protocols.http``"""

    endpoint: Annotated[str, Endpoint()] = key(
        "127.0.0.1:4318", "host:port to listen on; 0.0.0.0 for every interface."
    )
    max_request_body_size: Annotated[int, Range(1024, 1 << 30)] = key(
        20 << 20, "Largest request body in bytes, as sent and once decompressed."
    )
    tls: ServerTls | None = key(None, "Serve over TLS.")


@dataclass(frozen=True)
class Protocols:
    """``protocols``: those named are served"""

    grpc: GrpcConfig | None = key(None, "OTLP over gRPC.")
    http: HttpConfig | None = key(
        None, "OTLP over HTTP: /v1/traces, /v1/metrics, /v1/logs; protobuf and JSON."
    )


@dataclass(frozen=True)
class Config:
    """``receivers.otlp``"""

    protocols: Protocols = key(Protocols(), "Which transports to serve.")

    def validate(self) -> Iterable[tuple[str, str]]:
        """A receiver that listens nowhere is a mistake."""
        if self.protocols.grpc is None and self.protocols.http is None:
            yield "protocols", "must name at least one of grpc, http"


class OtlpReceiver:
    """Both servers as one component."""

    def __init__(self, servers: list[Component]) -> None:
        self.servers = servers

    def start(self) -> None:
        """Listen on every endpoint, or on none. Raises ``StartError``."""
        for index, server in enumerate(self.servers):
            try:
                server.start()
            except BaseException:
                for started in self.servers[:index]:
                    started.shutdown(0.0)
                raise

    def shutdown(self, timeout_s: float) -> None:
        """Stop listening; requests in flight have ``timeout_s`` to finish."""
        deadline = time.monotonic() + timeout_s
        for server in self.servers:
            server.shutdown(max(0.0, deadline - time.monotonic()))


def build(name: str, config: Config, consumers: Mapping[Signal, Consumer], context: Context) -> OtlpReceiver:
    """Make the receiver; nothing listens yet."""
    prefix = f"receivers.{name}.protocols"
    servers: list[Component] = []
    if (grpc := config.protocols.grpc) is not None:
        intake = Intake(name, "grpc", consumers, context.telemetry)
        servers.append(
            GrpcReceiver(
                intake, grpc.endpoint, f"{prefix}.grpc.endpoint", grpc.max_recv_msg_size_mib << 20, grpc.tls
            )
        )
    if (http := config.protocols.http) is not None:
        intake = Intake(name, "http", consumers, context.telemetry)
        servers.append(
            HttpReceiver(
                intake, http.endpoint, f"{prefix}.http.endpoint", http.max_request_body_size, http.tls
            )
        )
    return OtlpReceiver(servers)


factory = Factory(Kind.RECEIVER, "otlp", Config, build)
