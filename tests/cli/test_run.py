"""``stratoscope run``: what the command finds in its environment, whose exit code and signals it has,
and the agent that comes and goes with it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stratoscope.cli.agent import LINGER_S
from stratoscope.cli.errors import CliError
from stratoscope.cli.run import environment

SHOW = (
    "import json, os, signal; print(json.dumps({'pid': os.getpid(), 'pipe': str(signal.getsignal(13)),"
    " **{k: v for k, v in os.environ.items() if k.startswith('OTEL_')}}))"
)
AGENT_CONFIG = """\
receivers: {{otlp: {{protocols: {{grpc: {{endpoint: "127.0.0.1:{port}"}}}}}}}}
exporters: {{nop: {{}}}}
service: {{pipelines: {{traces: {{receivers: [otlp], exporters: [nop]}}}}}}
"""


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def eventually(condition: Callable[[], bool], timeout_s: float = 30.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_the_command_gets_the_environment_that_turns_the_hook_on(cli: Any) -> None:
    done = cli("run", "--no-agent", "--", sys.executable, "-c", SHOW)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["OTEL_EXPORTER_OTLP_ENDPOINT"] == "http://127.0.0.1:4317"
    assert seen["OTEL_EXPORTER_OTLP_PROTOCOL"] == "grpc"
    assert seen["OTEL_SERVICE_NAME"] == "vllm"


@pytest.mark.parametrize(
    ("option", "environ", "expected"),
    [
        (None, {}, ("http://127.0.0.1:4317", "grpc", "vllm")),
        ("http://10.0.0.7:4318", {}, ("http://10.0.0.7:4318", "http/protobuf", "vllm")),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:1"}, ("http://a:1", "grpc", "vllm")),
        ("http://b:2", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:1"}, ("http://b:2", "grpc", "vllm")),
        (
            None,
            {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf", "OTEL_SERVICE_NAME": "mine"},
            ("http://127.0.0.1:4318", "http/protobuf", "mine"),
        ),
    ],
)
def test_what_the_user_has_set_stays(option: Any, environ: dict[str, str], expected: tuple[str, ...]) -> None:
    assert tuple(environment(option, environ).values()) == expected


@pytest.mark.parametrize("url", ["http://:4317", "ftp://a:1", "http://a:99999", "http://a:x"])
def test_an_endpoint_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(CliError, match="must be an address such as"):
        environment(url, {})


def test_exit_code_and_arguments_are_the_commands_own(cli: Any) -> None:
    done = cli(
        "run", "--no-agent", sys.executable, "-c", "import sys; sys.exit(len(sys.argv))", "--json", "--", "x"
    )
    assert done.returncode == 4  # -c, --json, --, x


def test_the_command_has_the_process_and_its_signals() -> None:
    code = SHOW + "; import sys, time; sys.stdout.flush(); time.sleep(60)"
    process = subprocess.Popen(
        [sys.executable, "-m", "stratoscope.cli.main", "run", "--no-agent", "--", sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    with process:
        seen = json.loads(process.stdout.readline())
        process.send_signal(signal.SIGTERM)
    assert seen["pid"] == process.pid
    assert process.returncode == -signal.SIGTERM


def test_sigpipe_is_not_left_ignored(cli: Any) -> None:
    done = cli("run", "--no-agent", "--", "sh", "-c", "grep SigIgn /proc/self/status")
    assert int(done.stdout.split()[1], 16) & 1 << (signal.SIGPIPE - 1) == 0


def test_an_unknown_command_is_127_and_starts_nothing(cli: Any, tmp_path: Path) -> None:
    done = cli("run", "--", "no-such-command-here", "serve")
    assert done.returncode == 127
    assert "no-such-command-here: command not found" in done.stderr
    assert not (tmp_path / "state").exists()


def test_no_command_is_a_usage_error(cli: Any) -> None:
    for arguments in (["run"], ["run", "--"]):
        done = cli(*arguments)
        assert done.returncode == 2
        assert "stratoscope run -- vllm serve MODEL" in done.stderr


def test_a_far_endpoint_without_an_answer_is_said_and_the_command_runs(cli: Any) -> None:
    # 192.0.2.0/24 is reserved for documentation: nobody answers there.
    done = cli("run", "--agent-endpoint", "http://192.0.2.1:4317", "--", sys.executable, "-c", "print('ran')")
    assert done.stdout == "ran\n"
    assert "nothing answers at http://192.0.2.1:4317" in done.stderr


def test_an_agent_that_answers_is_used(cli: Any, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        done = cli("run", "--agent-endpoint", url, "--", "true")
    assert done.returncode == 0
    assert f"sending telemetry to {url}" in done.stderr
    assert not (tmp_path / "state").exists()


def test_an_agent_is_started_and_ends_after_the_command(cli: Any, tmp_path: Path) -> None:
    pytest.importorskip("grpc")
    port = free_port()
    config = tmp_path / "agent.yaml"
    config.write_text(AGENT_CONFIG.format(port=port))
    code = f"import socket; socket.create_connection(('127.0.0.1', {port}), 5); print('reached')"
    endpoint = f"http://127.0.0.1:{port}"
    done = cli(
        "run", "--agent-endpoint", endpoint, "--agent-config", str(config), "--", sys.executable, "-c", code
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "reached\n"
    assert "agent started (process " in done.stderr
    pid_file = tmp_path / "state" / "stratoscope" / f"agent-{port}.pid"
    assert eventually(lambda: not pid_file.exists(), LINGER_S + 30)
    pid = int(done.stderr.split("(process ")[1].split(",")[0])
    assert eventually(lambda: not alive(pid))
    assert "has stopped" in pid_file.with_suffix(".log").read_text()


def test_a_kept_agent_stays(cli: Any, tmp_path: Path) -> None:
    pytest.importorskip("grpc")
    port = free_port()
    config = tmp_path / "agent.yaml"
    config.write_text(AGENT_CONFIG.format(port=port))
    endpoint = f"http://127.0.0.1:{port}"
    done = cli(
        "run", "--keep-agent", "--agent-endpoint", endpoint, "--agent-config", str(config), "--", "true"
    )
    assert done.returncode == 0, done.stderr
    pid = int((tmp_path / "state" / "stratoscope" / f"agent-{port}.pid").read_text())
    try:
        time.sleep(LINGER_S + 1)  # longer than an agent that goes with its command would stay
        assert alive(pid)
        assert f"kill {pid}" in done.stderr
    finally:
        os.kill(pid, signal.SIGTERM)
    assert eventually(lambda: not alive(pid))


def test_an_agent_that_does_not_start_says_why(cli: Any, tmp_path: Path) -> None:
    config = tmp_path / "agent.yaml"
    config.write_text("receivers: {otlp: {protocls: {}}}\n")
    endpoint = f"http://127.0.0.1:{free_port()}"
    done = cli("run", "--agent-endpoint", endpoint, "--agent-config", str(config), "--", "echo", "ran")
    assert done.returncode == 1
    assert "ran" not in done.stdout
    assert "--no-agent" in done.stderr
    assert "receivers.otlp.protocls" in done.stderr


def test_agent_exit_with_names_a_process_that_exists(cli: Any) -> None:
    done = cli("agent", "--exit-with", "4194305")
    assert done.returncode == 2
    assert "no such process" in done.stderr


def test_agent_check_and_print_config(cli: Any, tmp_path: Path) -> None:
    config = tmp_path / "agent.yaml"
    config.write_text(AGENT_CONFIG.format(port=1))
    assert cli("agent", "-c", str(config), "--check").returncode == 0
    shown = cli("agent", "-c", str(config), "--set", "exporters.nop=null", "--print-config")
    assert shown.returncode == 0, shown.stderr
    assert "127.0.0.1:1" in shown.stdout
    bad = cli("agent", "-c", str(tmp_path / "none.yaml"), "--check")
    assert bad.returncode == 2
    assert "none.yaml" in bad.stderr
