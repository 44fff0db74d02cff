"""TLS, both sides, with certificates made by the openssl command."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import requests

from stratoscope.collector.component import Context, StartError
from stratoscope.collector.config_schema import read
from stratoscope.collector.exporters import otlp
from stratoscope.collector.telemetry import Telemetry

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """(certificate, key) for 127.0.0.1, signed by itself, so its own authority too."""
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        [
            *[
                "openssl",
                "req",
                "-x509",
                "-newkey",
                "ec",
                "-pkeyopt",
                "ec_paramgen_curve:prime256v1",
                "-nodes",
                "-days",
                "2",
            ],
            *f"-subj /CN=test -addext subjectAltName=IP:127.0.0.1 -keyout {key} -out {certificate}".split(),
        ],
        check=True,
        capture_output=True,
    )
    return str(certificate), str(key)


def exporter(transport: str, port: int, tls: dict[str, Any]) -> tuple[otlp.OtlpExporter, Telemetry]:
    telemetry, problems = Telemetry(), []  # type: ignore[var-annotated]
    factory = otlp.grpc_factory if transport == "grpc" else otlp.http_factory
    settings = {"endpoint": f"https://127.0.0.1:{port}", "tls": tls, "retry_on_failure": {"enabled": False}}
    config = read(factory.config, settings, "x", problems)
    assert not problems
    return factory.build(name="x", config=config, context=Context(telemetry, telemetry.registry)), telemetry


@pytest.mark.parametrize("transport", ["grpc", "http"])
@pytest.mark.parametrize(
    ("server_asks", "client_trusts", "client_shows", "delivered"),
    [
        (False, True, False, True),
        (False, False, False, False),  # the client does not know the authority
        (True, True, True, True),
        (True, True, False, False),  # the server wants a certificate
    ],
)
def test_only_those_who_trust_each_other_exchange_data(
    kit: Any,
    pair: tuple[str, str],
    transport: str,
    server_asks: bool,
    client_trusts: bool,
    client_shows: bool,
    delivered: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", requests.certs.where())  # must not win over tls.ca_file
    certificate, key = pair
    server_tls = {"cert_file": certificate, "key_file": key} | (
        {"client_ca_file": certificate} if server_asks else {}
    )
    client_tls = ({"ca_file": certificate} if client_trusts else {}) | (
        {"cert_file": certificate, "key_file": key} if client_shows else {}
    )
    sink = kit.Collected()
    with kit.receiver(sink, {transport: {"endpoint": "127.0.0.1:0", "tls": server_tls}}) as receiver:
        part, telemetry = exporter(transport, receiver.ports[0], client_tls)
        part.start()
        part.consume(kit.batch())
        outcome = "exporter_sent_spans_total" if delivered else "exporter_send_failed_spans_total"
        kit.wait_for(lambda: telemetry.value(outcome, exporter="x") == 3)
        part.shutdown(5.0)
    assert len(sink.batches) == delivered


@pytest.mark.parametrize("transport", ["grpc", "http"])
def test_unreadable_server_certificates_stop_the_start(kit: Any, transport: str) -> None:
    tls = {"cert_file": "/nowhere/cert.pem", "key_file": "/nowhere/key.pem"}
    with (
        pytest.raises(StartError, match=rf"protocols\.{transport}\.endpoint: cannot set up TLS"),
        kit.receiver(kit.Collected(), {transport: {"endpoint": "127.0.0.1:0", "tls": tls}}),
    ):
        pass


@pytest.mark.parametrize("transport", ["grpc", "http"])
def test_a_file_that_is_no_certificate_stops_the_start(kit: Any, tmp_path: Path, transport: str) -> None:
    path = tmp_path / "junk.pem"
    path.write_text("junk")
    tls = {"cert_file": str(path), "key_file": str(path)}
    with (
        pytest.raises(StartError, match=rf"protocols\.{transport}\.endpoint"),
        kit.receiver(kit.Collected(), {transport: {"endpoint": "127.0.0.1:0", "tls": tls}}),
    ):
        pass
