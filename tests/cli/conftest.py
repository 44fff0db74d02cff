"""Runs the real command as a subprocess, against documents chosen by the test.

The commands' tests against a real agent are in ``tests/integration``; here the documents may be
huge, hostile, empty or missing.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

DATA = Path(__file__).parent / "data"
Serving = Callable[[dict[str, Any]], AbstractContextManager[tuple[str, list[str]]]]
Run = Callable[..., subprocess.CompletedProcess[str]]
_ENV = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith(("OTEL_", "STRATOSCOPE_"))
    and name not in ("NO_COLOR", "COLUMNS", "FORCE_COLOR", "TERM")
}


@pytest.fixture
def cli(tmp_path: Path) -> Run:
    """``cli("matrix", "--json", STRATOSCOPE_URL=...)`` runs ``stratoscope matrix --json``."""

    def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "stratoscope.cli.main", *arguments],
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=60,
            stdin=subprocess.DEVNULL,
            env={**_ENV, "COLUMNS": "80", "XDG_STATE_HOME": str(tmp_path / "state"), **env},
        )

    return run


@pytest.fixture
def documents() -> dict[str, Any]:
    """What an agent with 240 requests answers, by path."""
    summary = json.loads((DATA / "summary.json").read_text())
    request = json.loads((DATA / "request.json").read_text())
    found: dict[str, Any] = {"/api/v1/summary": summary, "/api/v1/requests": {"requests": summary["slowest"]}}
    for row in summary["slowest"]:
        found[f"/api/v1/requests/{row['trace_id']}"] = {**copy.deepcopy(request), "trace_id": row["trace_id"]}
    return found


@pytest.fixture
def serving() -> Serving:
    """``with serving(documents) as (url, asked)``: see :func:`_serving`."""
    return _serving


@contextmanager
def _serving(documents: dict[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """Serve ``documents`` by path (without query). Yields the URL and the list of paths asked for.

    A document that is ``bytes`` is sent as it is; an ``int`` is an HTTP status.
    """
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            document = documents.get(self.path.partition("?")[0], 404)
            status = document if isinstance(document, int) else 200
            if isinstance(document, int):
                document = {"error": f"no document at {self.path}"}
            body = document if isinstance(document, bytes) else json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
