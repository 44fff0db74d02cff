"""A child process with a log file, that can be waited for and is always gone in the end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

POLL_S = 0.25
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # loopback: never a proxy


class ProcessError(Exception):
    """A child process died or did not get ready; the text ends with the tail of its log."""


class ManagedProcess:
    """Runs ``command`` in a process group of its own with its output in ``log_path``."""

    def __init__(self, name: str, command: Sequence[str], env: Mapping[str, str], log_path: Path) -> None:
        self.name, self.log_path = name, log_path
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab") as log:
            self._process = subprocess.Popen(
                list(command),
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C in the terminal is ours to pass on, in order
            )

    @property
    def pid(self) -> int:
        """Process id; also the id of its process group."""
        return self._process.pid

    def returncode(self) -> int | None:
        """Exit status, or ``None`` while it runs."""
        return self._process.poll()

    def log_tail(self, lines: int = 25) -> str:
        """The last lines of its output."""
        with self.log_path.open("rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - 65536))
            text = log.read().decode("utf-8", "replace")
        return "\n".join(text.splitlines()[-lines:])

    def wait_ready(
        self, url: str, timeout_s: float, progress: Callable[[float], None] = lambda _: None
    ) -> None:
        """Return once ``url`` answers 200. ``progress`` is told the seconds so far.

        Raises :class:`ProcessError` when the process ends first, or after ``timeout_s``.
        """
        started = time.monotonic()
        while True:
            elapsed_s = time.monotonic() - started
            progress(elapsed_s)
            if (code := self.returncode()) is not None:
                raise ProcessError(
                    f"{self.name} ended with status {code} before it was ready."
                    f" The end of {self.log_path}:\n{self.log_tail()}"
                )
            if _answers(url):
                return
            if elapsed_s > timeout_s:
                raise ProcessError(
                    f"{self.name} did not answer at {url} within {timeout_s:.0f} s."
                    f" The end of {self.log_path}:\n{self.log_tail()}"
                )
            time.sleep(POLL_S)

    def stop(self, timeout_s: float = 20.0) -> int | None:
        """SIGTERM, wait, and SIGKILL for whatever of its group is left. Returns its exit status."""
        if self.returncode() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout_s)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        return self.returncode()


def _answers(url: str) -> bool:
    try:
        with _DIRECT.open(url, timeout=2) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError, ValueError):
        return False
