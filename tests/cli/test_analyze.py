"""``analyze`` and ``--file`` on the telemetry of a real vLLM: 40 requests, too few KV blocks, two aborts.

``data/recording.jsonl.gz`` is what an agent's ``file`` exporter wrote of a run of the demo's
``kv-starved`` scenario; it also keeps later versions honest about reading older telemetry.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("stratoscope.collector.analyze")
RECORDING = Path(__file__).parent / "data" / "recording.jsonl.gz"


def test_the_recording_is_explained_offline(cli: Any) -> None:
    done = cli("analyze", str(RECORDING))
    assert done.returncode == 0, done.stderr
    for words in (
        "40 requests: 38 ok, 2 aborted",
        "to the nanosecond",
        "wait_kv_blocks",
        "preempted",
        "slowest",
    ):
        assert words in done.stdout
    assert max(map(len, (line.rstrip() for line in done.stdout.splitlines()))) <= 80


def test_json_is_one_document_with_the_promised_keys(cli: Any) -> None:
    done = cli("analyze", str(RECORDING), "--json", "--slowest", "3")
    document = json.loads(done.stdout)
    assert done.returncode == 0
    assert document["requests"] == 40
    assert document["conservation"]["max_abs_residual_ns"] == 0
    assert len(document["slowest"]) == 3
    assert document["problems"] == []
    assert {"us_per_step", "us_per_request", "dropped"} <= document["hook"].keys()
    for phase in ("e2e", "ttft", "decode"):
        rows = [row for row in document["matrix"] if row["phase"] == phase]
        for band in {row["band"] for row in rows}:
            assert sum(row["share"] for row in rows if row["band"] == band) == pytest.approx(1.0)


def test_matrix_and_why_read_the_same_files(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(gzip.decompress(RECORDING.read_bytes()))
    summary = json.loads(cli("analyze", str(RECORDING), "--json").stdout)
    matrix = json.loads(cli("matrix", "--json", "--file", str(tmp_path)).stdout)
    assert matrix["matrix"] == summary["matrix"]
    (request,) = json.loads(cli("why", "--slowest", "1", "--json", "--file", str(tmp_path)).stdout)[
        "requests"
    ]
    slowest = summary["slowest"][0]
    assert request["trace_id"] == slowest["trace_id"]
    total_ms = sum(row["duration_ms"] for row in request["waterfall"])
    assert total_ms == pytest.approx(slowest["e2e_ms"], abs=1e-5)
    shown = cli("why", slowest["trace_id"][:10], "--file", str(RECORDING))
    assert shown.returncode == 0, shown.stderr
    assert all(sentence[:40] in shown.stdout for sentence in request["explanation"])


def test_an_unknown_request_is_exit_code_3(cli: Any) -> None:
    done = cli("why", "0" * 31 + "1", "--file", str(RECORDING))
    assert done.returncode == 3
    assert "no request with trace id" in done.stderr


def test_more_unattributed_than_allowed_is_exit_code_1(cli: Any, tmp_path: Path) -> None:
    assert cli("analyze", str(RECORDING), "--fail-on-unattributed", "1%").returncode == 0
    # Lose the workers' tables: their time has no evidence any more.
    kept = [
        line
        for line in gzip.decompress(RECORDING.read_bytes()).decode().splitlines()
        if "window.worker_steps" not in line
    ]
    path = tmp_path / "lost.jsonl"
    path.write_text("\n".join(kept))
    done = cli("analyze", str(path), "--fail-on-unattributed", "1%", "--json")
    assert done.returncode == 1
    conservation = json.loads(done.stdout)["conservation"]
    assert conservation["max_abs_residual_ns"] == 0
    assert conservation["unattributed_share_mean"] > 0.01
    assert cli("analyze", str(path)).returncode == 0


def test_what_cannot_be_read_is_named_and_the_rest_is_used(cli: Any, tmp_path: Path) -> None:
    lines = gzip.decompress(RECORDING.read_bytes()).decode().splitlines()
    path = tmp_path / "cut.jsonl"
    path.write_text("\n".join([*lines, lines[0][:100]]))
    done = cli("analyze", str(path), "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["requests"] == 40
    assert f"{path}:{len(lines) + 1}: " in done.stderr


@pytest.mark.parametrize("content", [None, b"", b"not otlp"])
def test_nothing_to_read_is_exit_code_3(cli: Any, tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "x.json"
    if content is not None:
        path.write_bytes(content)
    done = cli("analyze", str(path), "--json")
    assert done.returncode == 3
    assert str(path) in done.stderr
    assert done.stdout == ""


def test_files_and_url_exclude_each_other(cli: Any) -> None:
    done = cli("matrix", "--url", "http://x", "--file", str(RECORDING))
    assert done.returncode == 2
    assert "not allowed with argument" in done.stderr
