"""The ``attribution`` processor: passes traces on untouched and turns the hook's into the matrix.

Decoding and joining happen on a thread of its own behind a bounded queue, so a receiver never waits
for them; a full queue loses records for the attribution (counted), never for the exporters. One
processor serves all trace pipelines that name it.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from stratoscope.attribution.errors import BandError
from stratoscope.attribution.matrix import LatencyBands, PercentileBands
from stratoscope.collector.assembler import Limits
from stratoscope.collector.attributor import Attributor, Options
from stratoscope.collector.component import Batch, Consumer, Context, Factory, Kind, Refused, Signal
from stratoscope.collector.config_schema import Duration, Range, key
from stratoscope.collector.finished import Finished
from stratoscope.collector.store import RequestStore
from stratoscope.collector.synth import SlowestSelector, StepLedger, build, select

log = logging.getLogger(__name__)
_TICK_S = 0.25


@dataclass(frozen=True)
class SpansConfig:
    """``processors.attribution.spans``"""

    export: Literal["all", "slowest", "none"] = key(
        "slowest", "For which requests child spans (queue, prefill, decode, ...) are made and exported."
    )
    slowest_share: Annotated[float, Range(0.0, 1.0)] = key(
        0.05, "With slowest: the share of requests, by e2e latency."
    )


@dataclass(frozen=True)
class Config:
    """``processors.attribution``"""

    bands: list[str] = key(["0", "50", "90", "99", "100"], "Edges of the latency bands, in percent.")
    bands_ms: list[str] = key([], "Edges of the latency bands in ms; replaces bands.")
    join_timeout: Annotated[float, Duration(min_s=0.1, max_s=300)] = key(
        3.0, "How long a request waits for its missing parts before it is used without them."
    )
    unfinished_after: Annotated[float, Duration(min_s=1)] = key(
        30.0, "Silence of an API server after which its open requests count as unfinished."
    )
    window: Annotated[float, Duration(min_s=10)] = key(600.0, "Longest history of steps that is kept.")
    max_requests: Annotated[int, Range(100, 10_000_000)] = key(50_000, "Requests kept in detail.")
    max_pending: Annotated[int, Range(100, 10_000_000)] = key(20_000, "Requests waiting for their parts.")
    queue_size: Annotated[int, Range(1, 100_000)] = key(1000, "OTLP requests waiting to be read.")
    spans: SpansConfig = field(default_factory=SpansConfig, metadata={"help": "Child spans."})

    def validate(self) -> Iterable[tuple[str, str]]:
        """Bands must be increasing numbers."""
        try:
            self.parsed_bands()
        except (ValueError, BandError) as error:
            yield ("bands_ms" if self.bands_ms else "bands", str(error))

    def parsed_bands(self) -> PercentileBands | LatencyBands:
        """The bands. Raises ValueError or BandError with the reason."""
        if self.bands_ms:
            return LatencyBands(tuple(round(float(edge) * 1e6) for edge in self.bands_ms))
        return PercentileBands(tuple(float(edge) for edge in self.bands))


class AttributionProcessor:
    """See the module's text. ``attributor`` holds the state that the views read."""

    def __init__(self, config: Config, context: Context) -> None:
        limits = Limits(
            join_timeout_s=config.join_timeout, unfinished_after_s=config.unfinished_after,
            window_s=config.window, max_pending=config.max_pending,
        )  # fmt: skip
        self.attributor = Attributor(Options(limits, config.parsed_bands(), config.max_requests))
        self._config = config
        self._queue: queue.Queue[Batch] = queue.Queue(config.queue_size)
        self._next: list[Consumer] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._selector = SlowestSelector()
        self._ledger = StepLedger()
        telemetry = context.telemetry
        self._overrun = telemetry.counter(
            "attribution_overrun_spans", "Spans not attributed because the queue was full."
        )
        self._failed = telemetry.counter(
            "attribution_failures", "Exceptions caught in the attribution thread."
        )
        self._synth_lost = telemetry.counter(
            "attribution_refused_spans", "Synthesised spans that no exporter took."
        )
        for name, read in (
            ("attribution_finished_requests", lambda: self.attributor.store.total),
            ("attribution_pending_requests", lambda: len(self.attributor.assembler.pending)),
            ("attribution_rejected_records", lambda: self.attributor.rejected),
        ):
            telemetry.gauge(name, "See docs/agent.md.").set_function(read)

    # --- what views and the API use ---------------------------------------------------------------

    @property
    def store(self) -> RequestStore:
        """The finished requests; read it under ``attributor.lock``."""
        return self.attributor.store

    def status(self) -> dict[str, Any]:
        """What is held, waiting and lost."""
        return {**self.attributor.status(), "queued_batches": self._queue.qsize()}

    def steps(self, engine_uid: str | None, limit: int) -> list[dict[str, Any]]:
        """See :meth:`Attributor.steps`."""
        return self.attributor.steps(engine_uid, limit)

    def hook_status(self) -> list[dict[str, Any]]:
        """See :meth:`Attributor.hook_status`."""
        return self.attributor.hook_status()

    def on_finished(self, callback: Callable[[Finished], None]) -> None:
        """See :meth:`Attributor.on_finished`."""
        self.attributor.on_finished(callback)

    # --- pipeline -----------------------------------------------------------------------------------

    def add_pipeline(self, next: Consumer) -> None:
        """Synthesised spans go to the consumers of every pipeline."""
        self._next.append(next)

    def enqueue(self, batch: Batch) -> None:
        """Hand a batch to the attribution thread, or count it as overrun."""
        try:
            self._queue.put_nowait(batch)
        except queue.Full:
            self._overrun.inc(batch.items)

    def start(self) -> None:
        """Start the attribution thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="attribution", daemon=True)
            self._thread.start()

    def shutdown(self, timeout_s: float) -> None:
        """Take what is queued, finish what is ready, stop."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout_s)
            self._thread = None

    def _run(self) -> None:
        due_s = time.monotonic() + _TICK_S
        while True:
            try:
                batch = self._queue.get(timeout=max(due_s - time.monotonic(), 0.0) + 0.001)
                self._guard(lambda batch=batch: self.attributor.take(batch.message, time.monotonic()))  # type: ignore[misc]
            except queue.Empty:
                if self._stop.is_set():
                    break
            if time.monotonic() >= due_s:
                self._guard(self._finish)
                due_s = time.monotonic() + _TICK_S
        self._guard(lambda: self._finish(at_end=True))

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception:
            self._failed.inc()
            log.exception("attribution failed on one batch; going on with the next")

    def _finish(self, at_end: bool = False) -> None:
        finished = self.attributor.finish(time.monotonic(), at_end)
        spans = self._config.spans
        kept = select(finished, spans.export, spans.slowest_share, self._selector)
        if not kept or not self._next:
            return
        with self.attributor.lock:
            message = build(kept, self.attributor.assembler.timelines(), self._ledger)
        items = sum(len(s.spans) for r in message.resource_spans for s in r.scope_spans)
        batch = Batch(Signal.TRACES, message, message.SerializeToString(), items)
        for consumer in self._next:
            try:
                consumer.consume(batch)
            except Refused:
                self._synth_lost.inc(items)


class _Tap:
    """The processor's place in one pipeline."""

    def __init__(self, processor: AttributionProcessor, next: Consumer) -> None:
        self._processor, self._next = processor, next

    def consume(self, batch: Batch) -> None:
        """Forward first: attribution is nobody's reason to lose a span."""
        self._next.consume(batch)
        self._processor.enqueue(batch)

    def start(self) -> None:
        self._processor.start()

    def shutdown(self, timeout_s: float) -> None:
        self._processor.shutdown(timeout_s)


def _build(name: str, config: Config, next: Consumer, context: Context, signal: Signal) -> Consumer:
    if signal is not Signal.TRACES:
        return next
    if context.attribution is None:
        context.attribution = AttributionProcessor(config, context)
    context.attribution.add_pipeline(next)
    return _Tap(context.attribution, next)


factory = Factory(Kind.PROCESSOR, "attribution", Config, _build, frozenset({Signal.TRACES}))
