"""Child processes: ready or an error with their log, and gone in the end, grandchildren too."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stratoscope.demo.ports import free_ports, is_free
from stratoscope.demo.process import ManagedProcess, ProcessError

SERVER = (
    "import http.server, sys;"
    " http.server.test(http.server.SimpleHTTPRequestHandler, port=int(sys.argv[1]), bind='127.0.0.1')"
)
Start = Callable[..., ManagedProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[ManagedProcess] = []

    def run(code: str, *arguments: str) -> ManagedProcess:
        command = [sys.executable, "-u", "-c", code, *arguments]
        started.append(ManagedProcess("the child", command, os.environ, tmp_path / "logs" / "child.log"))
        return started[-1]

    yield run
    for process in started:
        process.stop(1.0)


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def wait_for(path: Path, text: str) -> str:
    deadline = time.monotonic() + 30
    while not (path.exists() and text in path.read_text()):
        assert time.monotonic() < deadline, f"{text!r} never came into {path}"
        time.sleep(0.02)
    return path.read_text()


def test_ready_is_when_the_address_answers(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # must not be asked for a loopback address
    (port,) = free_ports(1)
    process = start(SERVER, str(port))
    told: list[float] = []
    process.wait_ready(f"http://127.0.0.1:{port}/", 30.0, told.append)
    assert told == sorted(told)
    assert process.returncode() is None
    assert not is_free(port)
    process.stop()
    assert process.returncode() is not None
    assert is_free(port)


def test_a_death_before_that_is_an_error_with_the_logs_end(start: Start) -> None:
    process = start("import sys; print('\\n'.join(map(str, range(100)))); sys.exit('out of luck')")
    with pytest.raises(ProcessError) as caught:
        process.wait_ready("http://127.0.0.1:9/", 30.0)
    assert "the child ended with status 1 before it was ready" in str(caught.value)
    assert str(caught.value).endswith("out of luck")
    assert "99" in str(caught.value)
    assert "\n50\n" not in str(caught.value)  # the end, not all of it


def test_taking_too_long_is_an_error(start: Start) -> None:
    process = start("import time; print('dozing'); time.sleep(60)")
    wait_for(process.log_path, "dozing")
    with pytest.raises(ProcessError, match=r"did not answer at http://127.0.0.1:9/ within 0 s(.|\n)*dozing"):
        process.wait_ready("http://127.0.0.1:9/", 0.2)


def test_stopping_takes_the_deaf_and_their_children_along(start: Start) -> None:
    process = start(
        "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); child = os.fork()\n"
        "if child: print('child', child, 'end')\n"
        "time.sleep(60)"
    )
    child = int(wait_for(process.log_path, " end").split()[1])
    assert alive(child)
    assert process.stop(0.3) == -9
    deadline = time.monotonic() + 30
    while alive(child) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive(child)


def test_stopping_twice_is_harmless(start: Start) -> None:
    process = start("pass")
    deadline = time.monotonic() + 30
    while process.returncode() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert process.stop() == 0
    assert process.stop() == 0


def test_free_ports_differ() -> None:
    assert len(set(free_ports(8))) == 8
