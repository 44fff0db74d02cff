"""Starts an agent that outlives the process that wanted it, or says why it did not start."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from stratoscope.cli.errors import PROBLEM, CliError

START_TIMEOUT_S = 30.0


def state_dir() -> Path:
    """``$XDG_STATE_HOME/stratoscope``, for logs and pid files."""
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "stratoscope"


def answers(host: str, port: int, timeout_s: float = 1.0) -> bool:
    """Whether something accepts TCP connections at ``host:port``."""
    try:
        with socket.create_connection((host, port), timeout_s):
            return True
    except OSError:
        return False


def start_agent(arguments: Sequence[str], log_path: Path, ready: Sequence[tuple[str, int]]) -> int:
    """Run ``stratoscope agent`` detached, until all of ``ready`` accept connections; returns its pid.

    Raises :class:`CliError` with the end of its log when it ends first or takes too long.
    """
    log_path.parent.mkdir(parents=True, exist_ok=True)
    begins = log_path.stat().st_size if log_path.exists() else 0
    command = [sys.executable, "-m", "stratoscope.cli.main", "agent", *arguments]
    pid = _spawn_detached(command, log_path)
    deadline = time.monotonic() + START_TIMEOUT_S
    while not all(answers(host, port) for host, port in ready):
        if _ended(pid) or time.monotonic() > deadline:
            with log_path.open("rb") as log:
                log.seek(begins)
                words = log.read().decode("utf-8", "replace").strip()
            raise CliError(
                f"the agent did not start; pass --no-agent to run without one. Its log, {log_path}, ends:\n"
                + "\n".join(words.splitlines()[-12:]),
                PROBLEM,
            )
        time.sleep(0.1)
    return pid


def _spawn_detached(command: Sequence[str], log_path: Path) -> int:
    """Start ``command`` as nobody's child, so that whatever this process becomes by exec neither
    has to reap it nor takes it for a process of its own."""
    readable, writable = os.pipe()
    middle = os.fork()
    if middle == 0:
        try:
            with log_path.open("ab") as log:
                process = subprocess.Popen(
                    list(command),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env=_environment(),
                )
            os.write(writable, str(process.pid).encode())
        finally:
            os._exit(0)
    os.close(writable)
    os.waitpid(middle, 0)
    with os.fdopen(readable) as pipe:
        text = pipe.read()
    if not text:
        raise CliError(f"the agent could not be started: {command[0]} did not run", PROBLEM)
    return int(text)


def _environment() -> dict[str, str]:
    # OTEL_* variables are meant for vLLM; an agent that exported to itself would go in circles.
    return {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}


def _ended(pid: int) -> bool:
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        return bool(poll.poll(0))
    finally:
        os.close(handle)
