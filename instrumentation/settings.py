"""What the environment asks of the hook.

Standard ``OTEL_*`` variables come first; the few ``STRATOSCOPE_*`` ones are listed in
``docs/configuration.md``. Without an OTLP endpoint the hook is off: :func:`read` returns ``None``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


@dataclass(frozen=True, slots=True)
class Settings:
    """The hook's configuration, the same in every process of one vLLM.

    ``protocol`` is ``grpc`` or ``http/protobuf``. ``warnings`` are sentences about values that
    were not understood; the hook logs them once and goes on with the default.
    """

    endpoint: str
    protocol: str
    flush_interval_s: float = 1.0
    ring_rows: int = 8192
    max_open_requests: int = 16384
    record_content: bool = False
    metrics: bool = True
    nvml_hz: float = 1.0
    warnings: tuple[str, ...] = ()


def read(environ: Mapping[str, str] | None = None) -> Settings | None:
    """Read the settings from ``environ`` (default: the process's); ``None`` means off."""
    env = os.environ if environ is None else environ
    endpoint = env.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or env.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    if not endpoint or not endpoint.strip():
        return None
    if env.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":  # the only value the spec accepts
        return None
    if env.get("OTEL_TRACES_EXPORTER", "otlp").strip().lower() == "none":
        return None
    warnings: list[str] = []
    if not _flag(env, "STRATOSCOPE_ENABLED", True, warnings):
        return None
    metrics = env.get("OTEL_METRICS_EXPORTER", "otlp").strip().lower() != "none"
    return Settings(
        endpoint=endpoint.strip(),
        protocol=_protocol(env, endpoint.strip(), warnings),
        flush_interval_s=_number(env, "STRATOSCOPE_FLUSH_INTERVAL_S", 1.0, 0.05, 60.0, warnings),
        ring_rows=int(_number(env, "STRATOSCOPE_RING_ROWS", 8192, 64, 1 << 20, warnings)),
        max_open_requests=int(_number(env, "STRATOSCOPE_MAX_OPEN_REQUESTS", 16384, 16, 1 << 20, warnings)),
        record_content=_flag(env, "STRATOSCOPE_RECORD_CONTENT", False, warnings),
        metrics=metrics,
        nvml_hz=_number(env, "STRATOSCOPE_NVML_HZ", 1.0, 0.0, 10.0, warnings),
        warnings=tuple(warnings),
    )


def _protocol(env: Mapping[str, str], endpoint: str, warnings: list[str]) -> str:
    name = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
    value = env.get(name)
    if not value:
        name = "OTEL_EXPORTER_OTLP_PROTOCOL"
        value = env.get(name)
    if value:
        value = value.strip().lower()
        if value in ("grpc", "http/protobuf"):
            return value
        warnings.append(f"{name}={value!r} is not supported (grpc or http/protobuf); guessing from the port")
    # 4318 is OTLP/HTTP's registered port; everything else gets the Python exporters' default.
    return "http/protobuf" if ":4318" in endpoint or endpoint.endswith("/v1/traces") else "grpc"


def _flag(env: Mapping[str, str], name: str, default: bool, warnings: list[str]) -> bool:
    value = env.get(name, "").strip().lower()
    if not value:
        return default
    if value in _TRUE or value in _FALSE:
        return value in _TRUE
    warnings.append(f"{name}={value!r} is not a truth value (1 or 0); using {int(default)}")
    return default


def _number(
    env: Mapping[str, str], name: str, default: float, low: float, high: float, warnings: list[str]
) -> float:
    value = env.get(name, "").strip()
    if not value:
        return default
    try:
        number = float(value)
    except ValueError:
        number = float("nan")
    if low <= number <= high:
        return number
    warnings.append(f"{name}={value!r} is not a number from {low:g} to {high:g}; using {default:g}")
    return default
