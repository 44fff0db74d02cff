"""Configuration: what is accepted, and that every error names the key, the value and what is allowed."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from stratoscope.collector import config, registry
from stratoscope.collector.component import Kind
from stratoscope.collector.config_file import ConfigError
from stratoscope.collector.config_schema import parse_duration, split_endpoint

GOOD: dict[str, Any] = {
    "receivers": {"otlp": {"protocols": {"grpc": None, "http": {"endpoint": "0.0.0.0:4318"}}}},
    "processors": {
        "memory_limiter": {"limit_mib": 512, "spike_limit_mib": 128},
        "batch/small": {"timeout": "5ms"},
    },
    "exporters": {
        "otlp/backend": {
            "endpoint": "https://backend:4317",
            "headers": {"x-token": "secret"},
            "compression": "gzip",
            "tls": {"ca_file": "ca.pem"},
            "timeout": "1m30s",
            "sending_queue": {"enabled": True, "queue_size": 10},
            "retry_on_failure": {"initial_interval": "100ms", "max_interval": "1s", "max_elapsed_time": 0},
        },
        "file": {"path": "out.json"},
    },
    "service": {
        "pipelines": {
            "traces/all": {
                "receivers": ["otlp"],
                "processors": ["memory_limiter", "batch/small"],
                "exporters": ["otlp/backend", "file"],
            }
        }
    },
}


def changed(path: str, value: Any) -> dict[str, Any]:
    """GOOD with one key (slash-separated path) set, or deleted if ``value`` is ``...``."""
    tree = copy.deepcopy(GOOD)
    *parents, last = path.split(" > ")
    at = tree
    for name in parents:
        at = at.setdefault(name, {})
    if value is ...:
        del at[last]
    else:
        at[last] = value
    return tree


def problems(tree: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        config.check(tree)
    return caught.value.problems


def test_a_good_file_becomes_typed_configuration(tmp_path: Path) -> None:
    path = tmp_path / "agent.yaml"
    path.write_text(yaml.safe_dump(GOOD))
    loaded = config.load(str(path))
    exporter = loaded.components[Kind.EXPORTER]["otlp/backend"].config
    assert (exporter.timeout, exporter.retry_on_failure.initial_interval) == (90.0, 0.1)
    assert exporter.sending_queue.queue_size == 10
    assert exporter.headers == {"x-token": "secret"}
    receiver = loaded.components[Kind.RECEIVER]["otlp"].config
    assert receiver.protocols.grpc.endpoint == "127.0.0.1:4317"  # named without a value: its defaults
    assert receiver.protocols.http.endpoint == "0.0.0.0:4318"
    assert loaded.components[Kind.PROCESSOR]["batch/small"].config.timeout == 0.005
    assert list(loaded.pipelines) == ["traces/all"]


def test_a_protocol_that_is_not_named_is_not_served() -> None:
    loaded = config.check(changed("receivers > otlp > protocols", {"http": None}))
    assert loaded.components[Kind.RECEIVER]["otlp"].config.protocols.grpc is None


BATCH, OTLP, PIPELINE = (
    "processors > batch/small",
    "exporters > otlp/backend",
    "service > pipelines > traces/all",
)
CASES = [
    (f"{BATCH} > timout", "1s", "processors.batch/small.timout: unknown key; did you mean 'timeout'?"),
    (f"{BATCH} > timeout", 5, "processors.batch/small.timeout: must be a duration with a unit"),
    (
        f"{BATCH} > timeout",
        "5 parsecs",
        "batch/small.timeout: must be a duration with a unit: 200ms, 5s, 1m30s, got '5 p",
    ),
    (f"{BATCH} > send_batch_size", "many", "batch/small.send_batch_size: must be a whole number, got 'many'"),
    (f"{BATCH} > send_batch_size", True, "batch/small.send_batch_size: must be a whole number, got True"),
    (f"{BATCH} > send_batch_size", -1, "batch/small.send_batch_size: must be at least 0, got -1"),
    (
        f"{BATCH} > send_batch_max_size",
        5,
        "send_batch_max_size: must be 0, or greater than or equal to send_batch_size",
    ),
    ("processors > batch/small", [1], "processors.batch/small: must be a mapping of keys, got [1]"),
    ("processors > batch/", {}, "processors.batch/: the name after the slash is empty"),
    (
        "processors > bach",
        {},
        "processors.bach: unknown key; did you mean 'batch'? allowed: attribution, batch, mem",
    ),
    (
        "processors > memory_limiter > spike_limit_mib",
        512,
        "spike_limit_mib: must be less than limit_mib (512), got 512",
    ),
    (
        "processors > memory_limiter > limit_mib",
        1,
        "processors.memory_limiter.limit_mib: must be at least 128, got 1",
    ),
    ("receivers > otlp", None, "receivers.otlp.protocols: must name at least one of grpc, http"),
    (
        "receivers > otlp > protocols > grpc",
        {"endpoint": "x"},
        "protocols.grpc.endpoint: must be host:port, got 'x'",
    ),
    (
        "receivers > otlp > protocols > grpc",
        {"endpoint": "a:99999"},
        "grpc.endpoint: must be host:port with a port bet",
    ),
    (
        "receivers > otlp > protocols > grpc",
        {"endpoint": "http://a:1"},
        "grpc.endpoint: must be host:port without a sch",
    ),
    ("receivers > otlp > protocols > grpc", {"endpoint": "::1:80"}, "put an IPv6 address in brackets"),
    (
        "receivers > otlp > protocols > grpc",
        {"tls": {}},
        "protocols.grpc.tls.cert_file: is required when tls is given",
    ),
    (f"{OTLP} > endpoint", ..., "exporters.otlp/backend.endpoint: is required"),
    (
        f"{OTLP} > endpoint",
        "ftp://x:1",
        "otlp/backend.endpoint: must begin with http:// or https://, got 'ftp://x:1'",
    ),
    (f"{OTLP} > compression", "zstd", "otlp/backend.compression: must be one of none, gzip, got 'zstd'"),
    (f"{OTLP} > headers", {"a": [1]}, "otlp/backend.headers: must be a mapping of names to text values"),
    (f"{OTLP} > headers", {"X-Up": "a"}, "otlp/backend.headers.X-Up: gRPC metadata names must be lower case"),
    (f"{OTLP} > tls", {"cert_file": "x"}, "otlp/backend.tls.key_file: is required when cert_file is given"),
    (
        f"{OTLP} > sending_queue > queue_size",
        0,
        "otlp/backend.sending_queue.queue_size: must be at least 1, got 0",
    ),
    ("exporters > otlphttp", {"endpoint": "a:1"}, "exporters.otlphttp.endpoint: must be a URL"),
    ("exporters > file", {}, "exporters.file.path: is required"),
    ("exporters", ["file"], "exporters: must be a mapping of component ids"),
    ("exportrs", {}, "exportrs: unknown key; did you mean 'exporters'?"),
    ("service", ..., "service: is required"),
    ("service > pipelines", {}, "service.pipelines: must hold at least one of traces, metrics, logs"),
    ("service > pipelines > tracs", {}, "service.pipelines.tracs: unknown key; did you mean 'traces'?"),
    (
        "service > extensions",
        ["api"],
        "service.extensions: 'api' is not defined; allowed: nothing (define it under ext",
    ),
    (
        "service > telemetry",
        {"logs": {"level": "loud"}},
        "service.telemetry.logs.level: must be one of debug, info",
    ),
    (
        "service > shutdown_timeout",
        "0s",
        "service.shutdown_timeout: must be between 0.1s and 3600s, got '0s'",
    ),
    (
        f"{PIPELINE} > exporters",
        [],
        "service.pipelines.traces/all.exporters: must name at least one component",
    ),
    (f"{PIPELINE} > exporters", "file", "traces/all.exporters: must be a list of text values, got 'file'"),
    (f"{PIPELINE} > exporters", ["fil"], "traces/all.exporters: 'fil' is not defined; did you mean 'file'?"),
    (f"{PIPELINE} > exporters", ["file", "file"], "traces/all.exporters: names 'file' more than once"),
    (
        f"{BATCH} > timeout",
        "${env:NOT_SET_ANYWHERE}",
        "batch/small.timeout: environment variable NOT_SET_ANYWHERE is n",
    ),
]


@pytest.mark.parametrize(("path", "value", "expected"), CASES, ids=[case[2][:60] for case in CASES])
def test_a_mistake_is_named(path: str, value: Any, expected: str) -> None:
    found = problems(changed(path, value))
    assert any(expected in problem for problem in found), found


def test_all_mistakes_come_at_once_and_no_consequences_of_them() -> None:
    tree = changed(f"{BATCH} > timeout", "soon")
    tree["exporters"]["otlp/backend"]["endpoint"] = 7
    tree["service"]["pipelines"]["logs"] = {"receivers": ["none"], "exporters": ["file"]}
    found = problems(tree)
    assert len(found) == 3, found
    assert [problem.partition(":")[0] for problem in found] == [
        "processors.batch/small.timeout",
        "exporters.otlp/backend.endpoint",
        "service.pipelines.logs.receivers",
    ]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: [", "is not valid YAML"),
        ("- a", "must be a mapping"),
        ("", "must be a mapping"),
        ("receivers: {}\nreceivers: {}\n", "line 2: key 'receivers' appears twice"),
        ("a: \x00", "is not valid YAML"),
        ("? [a]\n: 1\n", "is not valid YAML"),
    ],
)
def test_a_file_that_is_no_configuration(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "agent.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=reason) as caught:
        config.load(str(path))
    assert str(path) in caught.value.problems[0]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.yaml: cannot be read"):
        config.load(str(tmp_path / "missing.yaml"))


def test_environment_variables_take_the_type_of_their_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCH", "100")
    monkeypatch.setenv("HOST", "10.0.0.1")
    monkeypatch.setenv("TOKEN", "0123")
    monkeypatch.setenv("EMPTY", "")
    tree = changed(f"{BATCH} > send_batch_size", "${env:BATCH}")
    tree["exporters"]["otlp/backend"].update(
        endpoint="${env:HOST}:${env:PORT:-4317}",
        headers={"x-token": "${env:TOKEN}", "x-price": "$$5", "x-empty": "${env:EMPTY:-none}"},
    )
    loaded = config.check(tree)
    assert loaded.components[Kind.PROCESSOR]["batch/small"].config.send_batch_size == 100
    exporter = loaded.components[Kind.EXPORTER]["otlp/backend"].config
    assert exporter.endpoint == "10.0.0.1:4317"
    assert exporter.headers == {"x-token": "0123", "x-price": "$5", "x-empty": "none"}
    assert "0123" not in config.dump(loaded), "a secret from the environment must stay there"


def test_overrides_reach_into_the_tree(tmp_path: Path) -> None:
    path = tmp_path / "agent.yaml"
    path.write_text(yaml.safe_dump(GOOD))
    overrides = ["processors::batch/small::timeout=7s", "exporters.otlp/backend.tls.insecure=true"]
    loaded = config.load(str(path), overrides)
    assert loaded.components[Kind.PROCESSOR]["batch/small"].config.timeout == 7
    assert loaded.components[Kind.EXPORTER]["otlp/backend"].config.tls.insecure is True


@pytest.mark.parametrize("text", ["no-equals", "=1", "receivers.otlp.protocols.http.endpoint.x=1", "a=["])
def test_a_bad_override_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "agent.yaml"
    path.write_text(yaml.safe_dump(GOOD))
    with pytest.raises(ConfigError) as caught:
        config.load(str(path), [text])
    assert caught.value.problems[0].startswith(f"--set {text}: ")


def test_the_default_configuration_is_valid_and_survives_being_printed() -> None:
    loaded = config.load()
    assert config.check(yaml.safe_load(config.dump(loaded))).pipelines == loaded.pipelines


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in Kind for name in registry.types(kind)])
def test_every_registered_type_has_its_factory(kind: Kind, name: str) -> None:
    factory = registry.find(kind, name)
    assert (factory.kind, factory.type) == (kind, name)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("200ms", 0.2), ("1m30s", 90.0), ("1.5h", 5400.0), (".5s", 0.5), ("3us", 3e-6), (0, 0.0)],
)
def test_durations(text: Any, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "s", "5", "-5s", "5s 3", "5x", None, True, False, 3.5, "1e3s"])
def test_what_is_no_duration(text: Any) -> None:
    with pytest.raises(ValueError, match="must be a duration with a unit"):
        parse_duration(text)


def test_endpoints() -> None:
    assert split_endpoint("[::1]:80") == ("::1", 80)
    assert split_endpoint(":80") == ("", 80)
