"""``matrix`` and ``why`` against chosen documents: what is shown, what is not, and the exit codes."""

from __future__ import annotations

import json
import socket
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
HOSTILE = "\x1b[31mred\x1b]0;title\x07 [bold]x[/] \u202egnp.exe \x9b2J"


def widest(text: str) -> int:
    from rich.cells import cell_len

    return max(cell_len(line.rstrip()) for line in text.splitlines())


def test_the_documents_here_are_what_an_agent_would_send(documents: Any) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    openapi = pytest.importorskip("stratoscope.collector.openapi").document()
    for path, document in documents.items():
        name = "Summary" if path.endswith("/summary") else "Request"
        if not path.endswith("/requests"):
            schema = {"$ref": f"#/components/schemas/{name}", "components": openapi["components"]}
            jsonschema.Draft202012Validator(schema).validate(document)


def test_matrix_shows_layers_causes_and_bands(cli: Any, serving: Any, documents: Any) -> None:
    with serving(documents) as (url, _):
        done = cli("matrix", "--url", url)
    assert done.returncode == 0, done.stderr
    for words in (
        "240 requests",
        "216 ok",
        "p0-50",
        "p50-90",
        "p90-100",
        "wait_slots",
        "unattributed",
        "132 s",
    ):
        assert words in done.stdout
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["model", "61.4%", "54.2%", "51.9%", "72.6", "s", "55.2%"] in rows
    assert "\x1b" not in done.stdout  # not a terminal: no colours


def test_small_causes_are_summed_up_unless_all_are_wanted(cli: Any, serving: Any, documents: Any) -> None:
    with serving(documents) as (url, _):
        short, full = cli("matrix", "--url", url), cli("matrix", "--url", url, "--all")
    assert "2 more causes" in short.stdout
    assert "core_input_queue" not in short.stdout
    assert "core_input_queue" in full.stdout
    assert "template" in full.stdout


def test_phase_picks_the_rows_of_that_phase(cli: Any, serving: Any, documents: Any) -> None:
    with serving(documents) as (url, _):
        ttft, none = (
            cli("matrix", "--url", url, "--phase", "ttft"),
            cli("matrix", "--url", url, "--phase", "itl"),
        )
    assert "time to first token" in ttft.stdout
    assert "52.7 s" in ttft.stdout  # 0.4 of 131.7
    assert "no time is recorded for between tokens" in none.stdout


def test_window_is_passed_on_in_seconds(cli: Any, serving: Any, documents: Any) -> None:
    with serving(documents) as (url, asked):
        assert cli("matrix", "--url", url, "--window", "5m", "--json").returncode == 0
    assert asked == ["/api/v1/summary?window=300.0"]


@pytest.mark.parametrize("columns", [60, 80, 100, 140])
def test_nothing_is_wider_than_the_terminal(cli: Any, serving: Any, documents: Any, columns: int) -> None:
    with serving(documents) as (url, _):
        for command in (["matrix"], ["why", TRACE_ID], ["why", "--slowest", "2"]):
            done = cli(*command, "--url", url, COLUMNS=str(columns))
            assert done.returncode == 0, done.stderr
            assert widest(done.stdout) <= columns


def test_json_is_the_agents_document_and_nothing_else(cli: Any, serving: Any, documents: Any) -> None:
    with serving(documents) as (url, _):
        matrix = cli("matrix", "--json", STRATOSCOPE_URL=url)
        why = cli("why", "--slowest", "2", "--json", STRATOSCOPE_URL=url)
    assert json.loads(matrix.stdout) == documents["/api/v1/summary"]
    shown = json.loads(why.stdout)["requests"]
    slowest = documents["/api/v1/summary"]["slowest"][:2]
    assert shown == [documents[f"/api/v1/requests/{row['trace_id']}"] for row in slowest]


def test_why_shows_the_waterfall_in_order_and_in_words(cli: Any, serving: Any, documents: Any) -> None:
    with serving(documents) as (url, _):
        done = cli("why", TRACE_ID.upper(), "--url", url)
    lines = done.stdout.splitlines()
    assert TRACE_ID in lines[0]
    assert "2.43 s" in lines[0]
    causes = [row["cause"] for row in documents[f"/api/v1/requests/{TRACE_ID}"]["waterfall"]]
    table = lines[lines.index(next(line for line in lines if line.startswith("─"))) + 1 :]
    assert [next(w for w in line.split() if w in causes) for line in table[: len(causes)]] == causes
    assert "waiting for a free slot" in done.stdout
    assert documents["/api/v1/summary"]["slowest"][1]["trace_id"] in done.stdout.split("in the same steps")[1]


def test_a_beginning_of_a_trace_id_is_enough_if_only_one_has_it(
    cli: Any, serving: Any, documents: Any
) -> None:
    rows = documents["/api/v1/requests"]["requests"]
    rows[1]["trace_id"], rows[2]["trace_id"] = "abcdef12" + "0" * 24, "abcdef13" + "0" * 24
    with serving(documents) as (url, _):
        one = cli("why", TRACE_ID[:12], "--url", url)
        several, none = cli("why", "abcdef1", "--url", url), cli("why", "123456", "--url", url)
    assert TRACE_ID in one.stdout
    assert (several.returncode, none.returncode) == (2, 3)
    assert "2 trace ids begin with abcdef1; give more digits" in several.stderr
    assert "no request's trace id begins with 123456" in none.stderr


def test_a_reason_that_the_cause_names_already_is_not_repeated(
    cli: Any, serving: Any, documents: Any
) -> None:
    rows = documents[f"/api/v1/requests/{TRACE_ID}"]["waterfall"]
    wait = next(row for row in rows if row["cause"] == "wait_slots")
    for note, shown in (("slots", False), ("slots, token budget", True)):
        wait["note"] = note
        with serving(documents) as (url, _):
            done = cli("why", TRACE_ID, "--url", url, COLUMNS="140")
        assert ("slots, token budget" in done.stdout) is shown
        assert ": slots\n" not in done.stdout
        assert ": slots " not in done.stdout


def test_bars_are_to_scale() -> None:
    from stratoscope.cli.render_request import bar

    assert bar(0, 50, 100, 10) == "█████     "
    assert bar(50, 50, 100, 10) == "     █████"
    assert bar(25, 30, 100, 10).rstrip() == "  ███"
    assert bar(0, 5, 100, 10).rstrip() == "▌"
    assert bar(99.99, 0.001, 100, 10) == "         ▏"  # never invisible
    assert bar(100, 0, 100, 10) == "         ▏"  # nor outside
    assert bar(0, 0, 0, 10) == " " * 10
    assert bar(50, 25, 100, 8, ascii_only=True) == "    ##  "


def test_long_waterfalls_keep_the_longest_and_count_the_rest(cli: Any, serving: Any, documents: Any) -> None:
    row = {"group": "decode", "layer": "model", "cause": "decode", "steps": 1, "note": ""}
    documents[f"/api/v1/requests/{TRACE_ID}"]["waterfall"] = [
        {**row, "start_ms": float(i), "duration_ms": 1.0, "cause": f"cause{i}"} for i in range(500)
    ]
    with serving(documents) as (url, _):
        short, full = cli("why", TRACE_ID, "--url", url), cli("why", TRACE_ID, "--url", url, "--all")
    assert "461 shorter" in short.stdout
    assert short.stdout.count("cause") == 39
    assert full.stdout.count("cause") == 500
    documents[f"/api/v1/requests/{TRACE_ID}"]["waterfall"] = [
        {**row, "start_ms": i * 0.01, "duration_ms": 0.01, "cause": f"cause{i}"} for i in range(25)
    ] + [{**row, "start_ms": 0.25, "duration_ms": 99.75, "cause": "cause25"}]
    with serving(documents) as (url, _):
        small = cli("why", TRACE_ID, "--url", url)
    assert "25 shorter" in small.stdout
    assert small.stdout.count("cause") == 1


def test_foreign_text_cannot_reach_the_terminal(cli: Any, serving: Any, documents: Any) -> None:
    summary, request = documents["/api/v1/summary"], documents[f"/api/v1/requests/{TRACE_ID}"]
    for row in summary["matrix"]:
        row["cause"] = HOSTILE if row["cause"] == "decode" else row["cause"]
    summary["outcomes"] = {HOSTILE: 3}
    request["attributes"]["model"] = HOSTILE
    request["explanation"] = [HOSTILE]
    request["neighbours"] = [{"trace_id": HOSTILE, "tokens": HOSTILE, "mechanism": HOSTILE, "seconds": 1}]
    request["waterfall"][0] |= {"cause": HOSTILE, "note": HOSTILE, "group": HOSTILE, "layer": HOSTILE}
    with serving(documents) as (url, _):
        outputs = [cli(*c, "--url", url).stdout for c in (["matrix"], ["why", TRACE_ID])]
    for text in outputs:
        assert "[bold]x[/]" in text  # shown as it is, not interpreted
        assert not set(text) & set("\x1b\x07\x9b\u202e")


def test_svg_has_the_same_words_in_colour(cli: Any, serving: Any, documents: Any, tmp_path: Path) -> None:
    path = tmp_path / "m.svg"
    with serving(documents) as (url, _):
        done = cli("matrix", "--url", url, "--svg", str(path), NO_COLOR="1")
        bad = cli("matrix", "--url", url, "--svg", str(tmp_path / "no" / "m.svg"))
    assert done.returncode == 0, done.stderr
    words = "".join(ET.parse(path).getroot().itertext())
    assert "wait_slots" in words
    assert "#4e9fe5" in path.read_text()
    assert "240 requests" in done.stdout
    assert bad.returncode == 1
    assert "cannot be written" in bad.stderr


def test_no_agent_is_a_sentence_and_exit_code_3(cli: Any) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        done = cli("matrix", "--url", url, http_proxy="http://127.0.0.1:1")
    assert done.returncode == 3
    assert done.stdout == ""
    assert done.stderr.startswith(
        f"stratoscope matrix: no agent answers at {url} (connection refused): start one"
    )
    assert "`stratoscope agent`" in done.stderr
    assert "--url" in done.stderr


@pytest.mark.parametrize(
    ("document", "code", "words"),
    [
        (b"<html>hello</html>", 3, "not JSON"),
        (404, 3, "no document"),
        (500, 3, "HTTP 500"),
        (400, 2, "HTTP 400"),
    ],
)
def test_a_wrong_answer_is_a_sentence(
    cli: Any, serving: Any, documents: Any, document: Any, code: int, words: str
) -> None:
    documents[f"/api/v1/requests/{TRACE_ID}"] = document
    with serving(documents) as (url, _):
        done = cli("why", TRACE_ID, "--url", url)
    assert done.returncode == code
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_no_request_yet_is_exit_code_3(cli: Any, serving: Any, documents: Any) -> None:
    documents["/api/v1/requests"] = {"requests": []}
    with serving(documents) as (url, _):
        done = cli("why", "--slowest", "1", "--url", url)
    assert done.returncode == 3
    assert "no finished request" in done.stderr


def test_an_empty_matrix_claims_nothing(cli: Any, serving: Any, documents: Any) -> None:
    documents["/api/v1/summary"] |= {"requests": 0, "matrix": [], "slowest": []}
    with serving(documents) as (url, _):
        done = cli("matrix", "--url", url)
    assert done.returncode == 3
    assert "no finished request is recorded yet" in done.stdout
    assert "nanosecond" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["why", "not-an-id"], "32 hex digits"),
        (["why"], "required"),
        (["why", "--slowest", "0"], "at least 1"),
        (["matrix", "--window", "soon"], "90s, 5m or 2h"),
        (["matrix", "--phase", "prefill"], "invalid choice"),
        (["matrix", "--watch", "--json"], "leave out --json"),
        (["matrix", "--url", "localhost:9464"], "http(s) address"),
        (["analyze", "x", "--fail-on-unattributed", "2"], "such as 0.01 or 1%"),
        (["nonsense"], "invalid choice"),
        ([], "required"),
    ],
)
def test_wrong_usage_is_exit_code_2(cli: Any, arguments: list[str], words: str) -> None:
    done = cli(*arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("command", ["demo", "run", "agent", "matrix", "why", "analyze"])
def test_help_has_examples_and_exit_codes(cli: Any, command: str) -> None:
    done = cli(command, "--help")
    assert done.returncode == 0
    assert f"stratoscope {command}" in done.stdout.split("examples:")[1]
    assert "exit codes:" in done.stdout


def test_a_closed_pipe_is_not_an_error(cli: Any, serving: Any, documents: Any) -> None:
    import subprocess
    import sys

    with serving(documents) as (url, _):
        command = f"{sys.executable} -m stratoscope.cli.main why --slowest 5 --json --url {url} | head -c 10"
        done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, timeout=60)
    assert done.returncode == 0
    assert done.stderr == b""


def test_a_terminal_without_utf8_gets_ascii(cli: Any, serving: Any, documents: Any) -> None:
    with serving(documents) as (url, _):
        done = cli("why", TRACE_ID, "--url", url, PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()
    assert "####" in done.stdout
