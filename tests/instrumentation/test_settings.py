"""The environment: off without an endpoint, standard variables first, bad values said."""

from __future__ import annotations

import pytest

from stratoscope.instrumentation import settings

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4317"}


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "  "},
        {**ENDPOINT, "OTEL_SDK_DISABLED": "true"},
        {**ENDPOINT, "OTEL_TRACES_EXPORTER": "none"},
        {**ENDPOINT, "STRATOSCOPE_ENABLED": "0"},
    ],
)
def test_off(environ: dict[str, str]) -> None:
    assert settings.read(environ) is None


@pytest.mark.parametrize(
    ("environ", "protocol"),
    [
        (ENDPOINT, "grpc"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://agent:4318"}, "http/protobuf"),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "https://x/v1/traces"}, "http/protobuf"),
        ({**ENDPOINT, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, "http/protobuf"),
        (
            {
                **ENDPOINT,
                "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
                "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc",
            },
            "grpc",
        ),
    ],
)
def test_protocol(environ: dict[str, str], protocol: str) -> None:
    found = settings.read(environ)
    assert found is not None
    assert (found.protocol, found.warnings) == (protocol, ())


@pytest.mark.parametrize(
    ("name", "value", "field", "default"),
    [
        ("STRATOSCOPE_FLUSH_INTERVAL_S", "soon", "flush_interval_s", 1.0),
        ("STRATOSCOPE_FLUSH_INTERVAL_S", "0", "flush_interval_s", 1.0),
        ("STRATOSCOPE_RING_ROWS", "1e12", "ring_rows", 8192),
        ("STRATOSCOPE_RECORD_CONTENT", "perhaps", "record_content", False),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json", "protocol", "grpc"),
    ],
)
def test_a_bad_value_is_named_and_the_default_kept(
    name: str, value: str, field: str, default: object
) -> None:
    found = settings.read({**ENDPOINT, name: value})
    assert found is not None
    assert getattr(found, field) == default
    assert len(found.warnings) == 1
    assert name in found.warnings[0] and value in found.warnings[0]


def test_content_is_recorded_only_when_asked() -> None:
    plain, asked = settings.read(ENDPOINT), settings.read({**ENDPOINT, "STRATOSCOPE_RECORD_CONTENT": "1"})
    assert plain is not None and asked is not None
    assert (plain.record_content, asked.record_content) == (False, True)
