"""``stratoscope agent``: run the agent in the foreground."""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from stratoscope.cli.errors import PROBLEM, USAGE, CliError
from stratoscope.cli.options import add_command

LINGER_S = 5.0  # what a dying vLLM has sent last is still on its way
INSTALL_HINT = "pip install 'stratoscope[agent]'"

_EXAMPLES = """\
  stratoscope agent                                   listen on 127.0.0.1:4317 and :4318, serve :9464
  stratoscope agent -c agent.yaml                     a configuration of your own
  stratoscope agent -c agent.yaml --check             is it valid?
  stratoscope agent --print-config > agent.yaml       the defaults, to start from
  stratoscope agent --set extensions.api.endpoint=0.0.0.0:9464
"""


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = add_command(subparsers, "agent", "receive telemetry, attribute it, serve the results", _EXAMPLES)
    parser.add_argument(
        "-c", "--config", metavar="FILE", help="YAML in the OpenTelemetry Collector's vocabulary"
    )
    parser.add_argument("--check", action="store_true", help="only say whether the configuration is valid")
    parser.add_argument("--print-config", action="store_true", help="print the configuration and stop")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="overrides",
        help="override one key of the configuration; may be repeated",
    )
    parser.add_argument(
        "--exit-with", type=int, metavar="PID", help=f"stop {LINGER_S:.0f} s after that process has ended"
    )
    parser.add_argument("--pid-file", metavar="FILE", help="write the process id there; removed at the end")
    parser.set_defaults(handler=main)


def main(args: argparse.Namespace) -> int:
    """Run until SIGTERM or SIGINT; returns the agent's exit code."""
    try:
        from stratoscope.collector import agent
    except ImportError as error:
        raise missing(error) from error
    if args.exit_with is not None and not (args.check or args.print_config):
        _exit_with(args.exit_with)
    with _pid_file(args.pid_file):
        try:
            return agent.run(args.config, args.overrides, check=args.check, print_config=args.print_config)
        except ImportError as error:  # a component's own requirement
            raise missing(error) from error


def missing(error: ImportError) -> CliError:
    """What to say when the agent's packages are not installed."""
    return CliError(f"the agent needs packages that are not installed here ({error}): {INSTALL_HINT}", USAGE)


def _exit_with(pid: int) -> None:
    """Send ourselves SIGTERM once process ``pid`` has ended. Raises :class:`CliError`."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError as error:
        raise CliError(f"--exit-with {pid}: there is no such process", USAGE) from error
    except (AttributeError, OSError):  # not Linux, or an old kernel
        handle = -1

    def watch() -> None:
        if handle >= 0:
            poll = select.poll()
            poll.register(handle, select.POLLIN)
            poll.poll()
        else:
            while _exists(pid):
                time.sleep(1.0)
        time.sleep(LINGER_S)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="exit-with", daemon=True).start()


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


@contextlib.contextmanager
def _pid_file(path: str | None) -> Iterator[None]:
    if path is None:
        yield
        return
    file = Path(path)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{os.getpid()}\n")
    except OSError as error:
        raise CliError(f"--pid-file {path}: cannot be written: {error.strerror or error}", PROBLEM) from error
    try:
        yield
    finally:
        with contextlib.suppress(OSError, ValueError):
            if int(file.read_text()) == os.getpid():
                file.unlink()
