"""The agent as a process: exit codes, messages and signals."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

CODE = """
import sys
from stratoscope.collector.agent import run
sys.exit(run(sys.argv[1], check="--check" in sys.argv))
"""
EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
LIMIT_S = 60


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def configuration(port: int, exporters: dict[str, Any]) -> dict[str, Any]:
    return {
        "receivers": {"otlp": {"protocols": {"grpc": {"endpoint": f"127.0.0.1:{port}"}}}},
        "processors": {"batch": {"timeout": "1h"}},
        "exporters": exporters,
        "service": {
            "shutdown_timeout": "50s",
            "pipelines": {
                "traces": {"receivers": ["otlp"], "processors": ["batch"], "exporters": list(exporters)}
            },
        },
    }


def command(tmp_path: Path, tree: Any, *arguments: str) -> list[str]:
    path = tmp_path / "agent.yaml"
    path.write_text(yaml.safe_dump(tree))
    return [sys.executable, "-c", CODE, str(path), *arguments]


@contextmanager
def agent(tmp_path: Path, tree: Any) -> Iterator[subprocess.Popen[str]]:
    """A started agent process; killed at the end if it still lives."""
    with subprocess.Popen(command(tmp_path, tree), stderr=subprocess.PIPE, text=True) as process:
        try:
            read_until(process, "is ready")
            yield process
        finally:
            process.kill()


def read_until(process: subprocess.Popen[str], text: str) -> None:
    assert process.stderr is not None
    seen = ""
    for line in process.stderr:
        seen += line
        if text in line:
            return
    raise AssertionError(f"{text!r} never came; it said: {seen}")


def send(port: int, n: int) -> bytes:
    request = ExportTraceServiceRequest()
    scope = request.resource_spans.add().scope_spans.add()
    for _ in range(n):
        scope.spans.add(trace_id=os.urandom(16), span_id=os.urandom(8), name="span")
    raw = request.SerializeToString()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        channel.unary_unary(EXPORT)(raw, timeout=20)
    return raw


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_flushes_everything_and_exits_with_0(tmp_path: Path, number: signal.Signals) -> None:
    port, out = free_port(), tmp_path / "out.bin"
    with agent(tmp_path, configuration(port, {"file": {"path": str(out), "format": "proto"}})) as process:
        raws = [send(port, 3) for _ in range(4)]
        assert out.read_bytes() == b""  # all of it waits in the batch processor
        process.send_signal(number)
        assert process.wait(LIMIT_S) == 0
    assert out.read_bytes()[4:] == b"".join(raws)


def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    with socket.socket() as silent:  # accepts connections, never answers
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        port = free_port()
        with agent(
            tmp_path, configuration(port, {"otlphttp": {"endpoint": endpoint, "timeout": "1h"}})
        ) as process:
            send(port, 1)
            process.send_signal(signal.SIGTERM)
            read_until(process, "send it again to quit at once")
            assert process.poll() is None
            process.send_signal(signal.SIGTERM)
            assert process.wait(LIMIT_S) == 128 + signal.SIGTERM


def test_a_bad_configuration_exits_with_2_and_says_all_that_is_wrong(tmp_path: Path) -> None:
    tree = configuration(1, {"file": {"pth": "x"}})
    tree["processors"]["batch"]["timeout"] = "soon"
    done = subprocess.run(
        command(tmp_path, tree), capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 2
    assert "exporters.file.pth: unknown key; did you mean 'path'?" in done.stderr
    assert "exporters.file.path: is required" in done.stderr
    assert "processors.batch.timeout: must be a duration with a unit" in done.stderr
    assert "Traceback" not in done.stderr


def test_check_validates_without_starting(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    tree = configuration(free_port(), {"file": {"path": str(out)}})
    done = subprocess.run(
        command(tmp_path, tree, "--check"), capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert not out.exists()


def test_a_port_in_use_exits_with_1_naming_key_and_port(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = subprocess.run(
            command(tmp_path, configuration(port, {"nop": {}})),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    assert done.returncode == 1
    assert f"receivers.otlp.protocols.grpc.endpoint: cannot listen on '127.0.0.1:{port}'" in done.stderr
    assert "Traceback" not in done.stderr
