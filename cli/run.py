"""``stratoscope run -- vllm serve ...``: an agent beside it, the environment set, then exec.

The command replaces this process, so signals and the exit code are its own. The agent notices the
end of that process, waits for the last telemetry, and stops too, unless ``--keep-agent`` is given.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import socket
import sys
import urllib.parse
from collections.abc import Mapping

from stratoscope.cli import background
from stratoscope.cli.errors import NOT_FOUND, USAGE, CliError
from stratoscope.cli.options import add_command, is_loopback

DEFAULT_ENDPOINT = "http://127.0.0.1:4317"
DEFAULT_HTTP_ENDPOINT = "http://127.0.0.1:4318"
API_PORT = 9464
_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
_PROTOCOL = "OTEL_EXPORTER_OTLP_PROTOCOL"

_EXAMPLES = """\
  stratoscope run -- vllm serve meta-llama/Llama-3.1-8B-Instruct
  stratoscope run --keep-agent -- python my_offline_batch.py
  stratoscope run --agent-endpoint http://10.0.0.7:4317 -- vllm serve MODEL
"""


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = add_command(subparsers, "run", "start a vLLM command with telemetry on, and an agent", _EXAMPLES)
    parser.usage = "stratoscope run [options] [--] COMMAND [ARGUMENT ...]"
    parser.add_argument(
        "--agent-endpoint",
        metavar="URL",
        help=f"where telemetry goes (default: ${_ENDPOINT}, else {DEFAULT_ENDPOINT})",
    )
    parser.add_argument(
        "--no-agent", action="store_true", help="never start an agent, only set the environment"
    )
    parser.add_argument(
        "--keep-agent", action="store_true", help="the agent stays after the command has ended"
    )
    parser.add_argument("--agent-config", metavar="FILE", help="configuration for the agent that is started")
    parser.add_argument("command_line", nargs=argparse.REMAINDER, metavar="COMMAND", help="what to run")
    parser.set_defaults(handler=main)


def main(args: argparse.Namespace) -> int:
    """Does not return if all goes well: the command takes this process's place."""
    command = args.command_line[1:] if args.command_line[:1] == ["--"] else args.command_line
    if not command:
        raise CliError("which command? For example: stratoscope run -- vllm serve MODEL", USAGE)
    program = shutil.which(command[0])
    if program is None:
        raise CliError(f"{command[0]}: command not found; is the environment that has it active?", NOT_FOUND)
    env = environment(args.agent_endpoint, os.environ)
    if not args.no_agent:
        _ensure_agent(env[_ENDPOINT], env[_PROTOCOL], args.agent_config, args.keep_agent)
    sys.stdout.flush()
    sys.stderr.flush()
    os.environ.update(env)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and exec would hand that on
    try:
        os.execv(program, command)
    except OSError as error:
        raise CliError(f"{program}: cannot be run: {error.strerror or error}", 126) from error


def environment(endpoint: str | None, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that turn the hook on. What the user has set stays, unless ``endpoint`` is given.

    Raises :class:`CliError` for an address that is none.
    """
    protocol = environ.get(_PROTOCOL)
    usual = DEFAULT_HTTP_ENDPOINT if protocol == "http/protobuf" else DEFAULT_ENDPOINT
    url = endpoint or environ.get(_ENDPOINT) or usual
    _host_port(url)
    if not protocol:
        protocol = "http/protobuf" if ":4318" in url else "grpc"
    return {
        _ENDPOINT: url,
        _PROTOCOL: protocol,
        "OTEL_SERVICE_NAME": environ.get("OTEL_SERVICE_NAME") or "vllm",
    }


def _host_port(url: str) -> tuple[str, int]:
    parts = urllib.parse.urlsplit(url if "://" in url else f"//{url}")
    try:
        port = parts.port
    except ValueError:
        port = -1
    if not parts.hostname or port == -1 or parts.scheme not in ("", "http", "https"):
        raise CliError(f"the agent's endpoint {url!r} must be an address such as {DEFAULT_ENDPOINT}", USAGE)
    return parts.hostname, port or {"https": 443, "http": 80}.get(parts.scheme, 4317)


def _ensure_agent(endpoint: str, protocol: str, config: str | None, keep: bool) -> None:
    """Use the agent that answers at ``endpoint``, else start one if that is this machine."""
    host, port = _host_port(endpoint)
    if background.answers(host, port):
        _say(f"sending telemetry to {endpoint}")
        return
    if not is_loopback(host):
        _say(f"nothing answers at {endpoint}: the command runs, but its telemetry is dropped until then")
        return
    arguments = [] if keep else ["--exit-with", str(os.getpid())]
    ready = [(host, port)]
    api = "see its configuration"
    if config is not None:
        arguments += ["--config", config]
    else:
        api_port = _free(API_PORT)
        arguments += _listen(host, port, protocol, api_port)
        ready.append(("127.0.0.1", api_port))
        api = f"http://127.0.0.1:{api_port}"
    log_path = background.state_dir() / f"agent-{port}.log"
    pid_path = log_path.with_suffix(".pid")
    pid = background.start_agent([*arguments, "--pid-file", str(pid_path)], log_path, ready)
    stays = f"stays until `kill {pid}`" if keep else "stops after the command; --keep-agent keeps it"
    _say(f"agent started (process {pid}, {stays}); log: {log_path}")
    hint = "" if api.endswith(f":{API_PORT}") or config else f" --url {api}"
    _say(f"results: {api}; in another terminal: stratoscope why --slowest 1{hint}")


def _listen(host: str, port: int, protocol: str, api_port: int) -> list[str]:
    """``--set`` options: the wanted protocol at the wanted address, the other one where there is room."""
    at = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    wanted, other, usual = ("grpc", "http", 4318) if protocol == "grpc" else ("http", "grpc", 4317)
    other_port = _free(usual) if usual != port else 0
    return [
        *("--set", f"receivers.otlp.protocols.{wanted}.endpoint={at}"),
        *("--set", f"receivers.otlp.protocols.{other}.endpoint=127.0.0.1:{other_port}"),
        *("--set", f"extensions.api.endpoint=127.0.0.1:{api_port}"),
    ]


def _free(wanted: int) -> int:
    """``wanted`` if nothing listens there, else a free port."""
    for port in (wanted, 0):
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(sock.getsockname()[1])
    raise CliError("no TCP port is free on 127.0.0.1", USAGE)


def _say(sentence: str) -> None:
    print(f"stratoscope: {sentence}", file=sys.stderr)
