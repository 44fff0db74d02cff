"""The agent's life: start everything or fail with a reason, run, flush on SIGTERM.

Exit codes: 0 after a clean shutdown, 1 when a component cannot start, 2 for a bad configuration.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable
from importlib import metadata
from types import FrameType
from typing import Any

from stratoscope.collector import config as config_module
from stratoscope.collector import pipeline
from stratoscope.collector.component import Component, Context, StartError
from stratoscope.collector.config import AgentConfig
from stratoscope.collector.config_file import ConfigError
from stratoscope.collector.telemetry import Telemetry

log = logging.getLogger(__name__)
EXIT_START, EXIT_CONFIG = 1, 2
_LOG_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


class Agent:
    """One agent in this process; several may live side by side (on different ports)."""

    def __init__(self, config: AgentConfig) -> None:
        self.config = config
        telemetry = Telemetry()
        self.context = Context(telemetry, telemetry.registry)
        self.context.started_wall_ns = time.time_ns()
        self.context.status.update(
            version=version(),
            pipelines={
                name: {"receivers": p.receivers, "processors": p.processors, "exporters": p.exporters}
                for name, (_, p) in config.pipelines.items()
            },
        )
        self.parts = pipeline.build(config, self.context)
        self._errors = telemetry.counter(
            "component_errors", "Unexpected exceptions in a component; see the log.", ("component",)
        )
        self._started: set[str] = set()
        self._stop = threading.Event()
        self._signals = 0

    def start(self) -> None:
        """Start all components, or none: what was started is shut down again.

        Raises :class:`StartError` naming the component or key.
        """
        for name, part in self.parts.start_order():
            try:
                part.start()
            except Exception as error:
                self.shutdown(1.0)
                if isinstance(error, StartError):
                    raise
                raise StartError(f"{name}: cannot start: {error}") from error
            self._started.add(name)
        log.info("stratoscope agent %s is ready: %s", version(), self._addresses())

    def handle_signals(self) -> None:
        """From now on SIGTERM and SIGINT end :meth:`run_until_signal`, a second one ends the process
        at once. Main thread only; before :meth:`start`, so that no signal finds it half started."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def run_until_signal(self) -> None:
        """Wait for a signal, then shut down."""
        self._stop.wait()
        self.shutdown()

    def shutdown(self, timeout_s: float | None = None) -> None:
        """Stop receiving, flush, stop; never raises. All parts share one deadline."""
        limit_s = self.config.service.shutdown_timeout if timeout_s is None else timeout_s
        deadline_s = time.monotonic() + limit_s
        for name, part in self.parts.stop_order():
            if name in self._started:
                self._started.discard(name)
                self._shutdown_one(name, part, max(0.0, deadline_s - time.monotonic()))

    def component(self, name: str) -> Any:
        """A component by its full name, such as ``receivers.otlp``. Raises ``KeyError``."""
        return dict(self.parts.stop_order())[name]

    def _shutdown_one(self, name: str, part: Component, timeout_s: float) -> None:
        try:
            part.shutdown(timeout_s)
        except Exception:
            self._errors.labels(name).inc()
            log.exception("%s: error while shutting down", name)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1
        if self._signals > 1:
            os._exit(128 + number)
        os.write(2, f"{signal.Signals(number).name}: flushing; send it again to quit at once\n".encode())
        self._stop.set()

    def _addresses(self) -> str:
        texts = []
        for kind in ("receivers", "extensions"):
            for name, _ in getattr(self.parts, kind):
                endpoints = _endpoints(self.config, name)
                texts.append(f"{name} at {', '.join(endpoints)}" if endpoints else name)
        return "; ".join(texts)


def version() -> str:
    """The installed version of Stratoscope; ``unknown`` in a bare source tree."""
    try:
        return metadata.version("stratoscope")
    except metadata.PackageNotFoundError:
        return "unknown"


def run(
    config_path: str | None = None,
    overrides: Iterable[str] = (),
    check: bool = False,
    print_config: bool = False,
) -> int:
    """What ``stratoscope agent`` does; returns the exit code.

    ``config_path`` ``None`` takes the default configuration; ``overrides`` are ``key=value``.
    ``check`` stops after validating, ``print_config`` after writing the configuration to stdout.
    """
    try:
        config = config_module.load(config_path, overrides)
    except ConfigError as error:
        print(f"stratoscope agent: the configuration has {len(error.problems)} problem(s):", file=sys.stderr)
        for problem in error.problems:
            print(f"  {problem}", file=sys.stderr)
        return EXIT_CONFIG
    if print_config:
        print(config_module.dump(config), end="")
        return 0
    if check:
        print("the configuration is valid")
        return 0
    level = {"warn": "warning"}.get(config.service.telemetry.logs.level, config.service.telemetry.logs.level)
    logging.basicConfig(level=level.upper(), format=_LOG_FORMAT, stream=sys.stderr)
    try:
        agent = Agent(config)
        agent.handle_signals()
        agent.start()
    except StartError as error:
        print(f"stratoscope agent: {error}", file=sys.stderr)
        return EXIT_START
    agent.run_until_signal()
    log.info("stratoscope agent has stopped")
    return 0


def main(config_path: str | None = None) -> int:
    """Run with a file, or with the defaults; returns the exit code."""
    return run(config_path)


def _endpoints(config: AgentConfig, full_name: str) -> list[str]:
    kind, _, component_id = full_name.partition(".")
    spec = next(by_id[component_id] for k, by_id in config.components.items() if k.value == kind)
    protocols = getattr(spec.config, "protocols", None)
    sources = [spec.config] if protocols is None else [protocols.grpc, protocols.http]
    return [source.endpoint for source in sources if hasattr(source, "endpoint")]
