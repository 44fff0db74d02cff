"""``stratoscope demo`` from start to Ctrl-C, as a user runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stratoscope.cli import http

pytest.importorskip("vllm")
LIMIT_S = 400.0


def group(pid: int) -> set[int]:
    """Processes of the session that ``pid`` leads, or that descend from it."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found = {pid}
    while grown := {child for child, parent in parents.items() if parent in found} - found:
        found |= grown
    return found - {pid}


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_it_shows_writes_serves_and_leaves_nothing_behind(tmp_path: Path) -> None:
    out, svg, log = tmp_path / "out.json", tmp_path / "out.svg", tmp_path / "demo.log"
    command = [sys.executable, "-m", "stratoscope.cli.main", "demo", "--scenario", "interference"]
    command += ["--requests", "40", "--concurrency", "8", "--json", str(out), "--svg", str(svg)]
    command += ["--work-dir", str(tmp_path / "work"), "--keep-logs", str(tmp_path / "logs")]
    environment = {**os.environ, "COLUMNS": "100"}
    with log.open("w") as stdout, subprocess.Popen(command, stdout=stdout, env=environment) as demo:
        try:
            deadline = time.monotonic() + LIMIT_S
            while "Ctrl-C stops everything" not in log.read_text():
                assert demo.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.5)
            text = log.read_text()
            url = text.split("results: ")[1].split("/api/v1")[0]
            served = http.get_json(url, "/api/v1/summary")
            children = group(demo.pid)
            demo.send_signal(signal.SIGINT)
            assert demo.wait(60) == 0
        finally:
            if demo.poll() is None:
                demo.terminate()
                demo.wait(60)

    result = json.loads(out.read_text())
    assert result["requests"] == served["requests"] == 40
    assert result["outcomes"]["ok"] == 40
    assert result["conservation"]["max_abs_residual_ns"] == 0
    client = result["client"]
    assert client["requests"] == 40
    assert client["trace_ids_seen_share"] == client["requests_seen_share"] == 1.0
    assert 0 < client["outside_server_share_mean"] < 1
    assert result["scenario"]["name"] == "interference"
    assert {row["phase"] for row in result["matrix"]} == {"e2e", "ttft", "decode", "itl"}
    assert any(row["cause"] == "prefill_interference" for row in result["matrix"])
    assert result["versions"]["vllm"]
    for words in (
        "40 requests: 40 ok",
        "prefill_interference",
        "to the nanosecond",
        "its steps also computed",
    ):
        assert words in text
    assert "prefill_interference" in svg.read_text()
    assert len(children) >= 3  # agent, API server, engine core, ...
    assert not [pid for pid in children if alive(pid)]
    assert {path.name for path in (tmp_path / "logs").iterdir()} == {"agent.log", "vllm.log"}


def test_a_server_that_does_not_start_is_said_with_its_log(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "stratoscope.cli.main",
        "demo",
        "--once",
        "--work-dir",
        str(tmp_path / "work"),
    ]
    done = subprocess.run(
        [*command, "--vllm-args=--no-such-option"],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 1
    assert "stratoscope demo: vLLM ended with status 2 before it was ready" in done.stderr
    assert "--no-such-option" in done.stderr
    assert "Traceback" not in done.stderr
