"""Puts the demonstration together: model, agent, vLLM, load, result; and takes it down again."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stratoscope.cli import console as console_module
from stratoscope.cli.errors import INTERRUPTED, OK, PROBLEM, USAGE, CliError
from stratoscope.cli.source import AgentSource
from stratoscope.demo import load, tiny_model
from stratoscope.demo.display import Display
from stratoscope.demo.load import ClientRequest
from stratoscope.demo.ports import free_ports, is_free
from stratoscope.demo.process import ManagedProcess, ProcessError
from stratoscope.demo.result import client_document, machine, problems
from stratoscope.demo.scenario import SCENARIOS, Scenario
from stratoscope.demo.server import MODEL_NAME, READY_TIMEOUT_S, ServerOptions, VllmServer
from stratoscope.demo.workload import ask

if TYPE_CHECKING:
    from rich.console import Console

API_PORT = 9464
VISIBLE_TIMEOUT_S = 30.0
MATRIX_EVERY_S = 1.0


@dataclasses.dataclass(frozen=True)
class Running:
    """What is up while the load runs."""

    server: VllmServer
    agent: ManagedProcess
    source: AgentSource
    grpc_port: int


def main(args: argparse.Namespace) -> int:
    """``stratoscope demo``; returns its exit code. Whatever happens, nothing is left running."""
    signal.signal(signal.SIGTERM, _interrupt)
    display = Display(console_module.make_console(stderr=args.json == "-"))
    work_dir = args.work_dir or _cache_dir()
    log_dir = args.keep_logs or work_dir / "logs" / str(os.getpid())
    scenario = _scenario(args)
    failed = True
    try:
        with contextlib.ExitStack() as stack:
            running = start(
                stack, scenario.server, work_dir, log_dir, display, port=args.port, api_port=args.api_port
            )
            code = _measure(running, scenario, args, display)
            failed = code != OK
            if not args.once:
                _stay(running, display)
    except ProcessError as error:
        raise CliError(str(error), PROBLEM) from error
    except KeyboardInterrupt:
        failed = False
        display.say("stopped")
        return INTERRUPTED
    finally:
        if args.keep_logs is None and not failed:
            shutil.rmtree(log_dir, ignore_errors=True)
        elif failed:
            display.say(f"logs: {log_dir}", "dim")
    return code


def start(
    stack: contextlib.ExitStack,
    options: ServerOptions,
    work_dir: Path,
    log_dir: Path,
    display: Display,
    *,
    port: int | None = None,
    api_port: int | None = None,
) -> Running:
    """Start everything; ``stack`` stops it, vLLM first, so that its last words still arrive.

    Raises :class:`ProcessError` with the end of the log of what did not start.
    """
    with display.step("tiny model") as tell:
        model_dir = tiny_model.ensure(work_dir, tell)
    grpc_port, http_port, free_api, free_port = free_ports(4)
    api_port = api_port or (API_PORT if is_free(API_PORT) else free_api)
    with display.step("agent") as tell:
        agent = ManagedProcess(
            "the agent", _agent_command(grpc_port, http_port, api_port), _agent_env(), log_dir / "agent.log"
        )
        stack.callback(agent.stop)
        agent.wait_ready(f"http://127.0.0.1:{api_port}/healthz", 60.0)
    with display.step("vLLM with the hook") as tell:
        server = VllmServer(
            model_dir, port or free_port, options, f"http://127.0.0.1:{grpc_port}", log_dir / "vllm.log"
        )
        stack.callback(_stop, server, display)
        server.wait_ready(server.health_url, READY_TIMEOUT_S, lambda _: tell(server.log_tail(1)))
    return Running(server, agent, AgentSource(f"http://127.0.0.1:{api_port}"), grpc_port)


async def drive(
    running: Running,
    scenario: Scenario,
    *,
    seed: int,
    requests: int | None,
    duration_s: float | None,
    display: Display,
) -> list[ClientRequest]:
    """Send the load; on a terminal the matrix is shown as it grows."""
    with display.load(
        f"load: {scenario.concurrency} clients", requests if duration_s is None else None
    ) as view:
        refresh = asyncio.create_task(_refresh(running.source, view.show)) if view.live is not None else None
        try:
            return await load.drive(
                running.server.base_url,
                lambda index: ask(scenario.mix, MODEL_NAME, seed, index),
                scenario.concurrency,
                requests=requests,
                duration_s=duration_s,
                done=view.done,
            )
        finally:
            if refresh is not None:
                refresh.cancel()


def wait_visible(source: AgentSource, results: Sequence[ClientRequest]) -> tuple[dict[str, float], float]:
    """Wait until the agent knows every request that was answered, or for 30 s.

    Returns the server's latency in ms by trace id, and the seconds that it took.
    """
    wanted = {r.trace_id for r in results if r.status}
    started = time.monotonic()
    while True:
        known = {row["trace_id"]: row["e2e_ms"] for row in source.requests(len(results) + 100)}
        waited_s = time.monotonic() - started
        if wanted <= known.keys() or waited_s > VISIBLE_TIMEOUT_S:
            return {trace_id: known[trace_id] for trace_id in wanted & known.keys()}, waited_s
        time.sleep(0.25)


def _measure(running: Running, scenario: Scenario, args: argparse.Namespace, display: Display) -> int:
    requests = scenario.requests if args.duration is None else args.requests
    display.say(f"{scenario.title}; expect {scenario.expect}.", "dim")
    results = asyncio.run(
        drive(running, scenario, seed=args.seed, requests=requests, duration_s=args.duration, display=display)
    )
    if (code := running.server.returncode()) is not None:
        raise ProcessError(
            f"vLLM ended with status {code} under load. Its log ends:\n{running.server.log_tail()}"
        )
    with display.step("last requests reach the matrix"):
        server_e2e_ms, visible_s = wait_visible(running.source, results)
    result = running.source.summary()
    result["client"] = client_document(results, server_e2e_ms) | {"visible_after_s": round(visible_s, 3)}
    result["scenario"] = _scenario_document(scenario, args)
    result["machine"] = machine()
    slowest = [running.source.request(row["trace_id"]) for row in result["slowest"][:1]]
    console_module.show(
        lambda console: _paint(console, result, slowest), args.svg, "stratoscope demo", args.json == "-"
    )
    _write_json(result, args.json)
    found = problems(result, results)
    for problem in found:
        display.say(f"problem: {problem}", "bold red")
    return PROBLEM if found else OK


def _paint(console: Console, result: dict[str, Any], slowest: list[dict[str, Any]]) -> None:
    from stratoscope.cli.matrix import view
    from stratoscope.cli.render_request import print_request
    from stratoscope.cli.render_summary import slowest_table
    from stratoscope.cli.text import percent

    console.print()
    console.print(view(result, "e2e", console.width))
    console.print()
    console.print(slowest_table(result["slowest"][:5], console.width))
    for document in slowest:
        console.print()
        print_request(console, document)
    outside = result["client"]["outside_server_share_mean"]
    if outside is not None:
        console.print(f"\nof the clients' latency, {percent(outside)} passed outside the server", style="dim")


def _stay(running: Running, display: Display) -> None:
    url = running.source.url
    display.say("")
    display.say(f"results: {url}/api/v1/summary, and in another terminal:", "bold")
    flag = "" if url.endswith(f":{API_PORT}") else f" --url {url}"
    display.say(f"  stratoscope matrix --phase ttft{flag}\n  stratoscope why --slowest 1{flag}")
    display.say(f"vLLM: {running.server.base_url}/v1 (model {MODEL_NAME}). Ctrl-C stops everything.")
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            for process in (running.server, running.agent):
                if (code := process.returncode()) is not None:
                    raise ProcessError(f"{process.name} ended with status {code}:\n{process.log_tail()}")
            time.sleep(0.5)


async def _refresh(source: AgentSource, show: Callable[[Any], None]) -> None:
    from stratoscope.cli.matrix import view

    while True:
        with contextlib.suppress(CliError):  # a busy agent; the next round will do
            document = await asyncio.to_thread(source.summary)
            show(view(document, "e2e", shutil.get_terminal_size().columns))
        await asyncio.sleep(MATRIX_EVERY_S)


def _scenario(args: argparse.Namespace) -> Scenario:
    scenario = SCENARIOS[args.scenario]
    try:
        extra = tuple(shlex.split(args.vllm_args))
    except ValueError as error:
        raise CliError(f"--vllm-args {args.vllm_args!r}: {error}", USAGE) from error
    server = dataclasses.replace(
        scenario.server,
        tensor_parallel_size=args.tensor_parallel_size,
        api_server_count=args.api_server_count,
        async_scheduling=args.async_scheduling,
        extra_args=extra,
    )
    return dataclasses.replace(
        scenario,
        server=server,
        requests=args.requests or scenario.requests,
        concurrency=args.concurrency or scenario.concurrency,
    )


def _scenario_document(scenario: Scenario, args: argparse.Namespace) -> dict[str, Any]:
    server = dataclasses.asdict(scenario.server)
    del server["env"]
    return {
        "name": scenario.name,
        "title": scenario.title,
        "concurrency": scenario.concurrency,
        "seed": args.seed,
        "server": server,
    }


def _write_json(result: dict[str, Any], path: str | None) -> None:
    if path == "-":
        console_module.print_json(result)
    elif path is not None:
        try:
            Path(path).write_text(json.dumps(result, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        except OSError as error:
            raise CliError(f"--json {path}: cannot be written: {error.strerror or error}", PROBLEM) from error


def _agent_command(grpc_port: int, http_port: int, api_port: int) -> list[str]:
    command = [sys.executable, "-m", "stratoscope.cli.main", "agent", "--exit-with", str(os.getpid())]
    for key, port in (
        ("receivers.otlp.protocols.grpc.endpoint", grpc_port),
        ("receivers.otlp.protocols.http.endpoint", http_port),
        ("extensions.api.endpoint", api_port),
    ):
        command += ["--set", f"{key}=127.0.0.1:{port}"]
    return command


def _agent_env() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}


def _stop(server: VllmServer, display: Display) -> None:
    with display.step("stopping"):
        server.stop()


def _cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "stratoscope" / "demo"


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
