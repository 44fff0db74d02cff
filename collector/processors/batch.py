"""The ``batch`` processor: makes few large requests of many small ones.

Serialised export requests are merged by concatenating them, which protobuf defines as merging
(repeated fields append): the bytes that came in are the bytes that go out. Only a batch above
``send_batch_max_size`` is taken apart.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from stratoscope.collector.component import Batch, Consumer, Context, Factory, Kind, Refused, Signal
from stratoscope.collector.config_schema import Duration, Range, key
from stratoscope.collector.otlp import REQUEST
from stratoscope.collector.processors.split import split

log = logging.getLogger(__name__)
MAX_PENDING_BYTES = 64 << 20


@dataclass(frozen=True)
class Config:
    """``processors.batch``"""

    timeout: Annotated[float, Duration(max_s=3600)] = key(
        0.2, "Longest time that data waits; 0 sends at once."
    )
    send_batch_size: Annotated[int, Range(0)] = key(8192, "Spans, points or records that make a batch full.")
    send_batch_max_size: Annotated[int, Range(0)] = key(0, "Largest batch in the same unit; 0: no limit.")
    send_batch_max_bytes: Annotated[int, Range(0)] = key(
        3 << 20, "Stop merging above this serialised size (gRPC servers often take 4 MiB); 0: no limit."
    )

    def validate(self) -> Iterable[tuple[str, str]]:
        """The maximum cannot be below the trigger."""
        if 0 < self.send_batch_max_size < self.send_batch_size:
            yield (
                "send_batch_max_size",
                f"must be 0, or greater than or equal to send_batch_size ({self.send_batch_size}),"
                f" got {self.send_batch_max_size}",
            )


class MergedBatch(Batch):
    """Concatenated batches. The message is parsed only if someone asks: exporters need the bytes."""

    __slots__ = ("_message",)

    def __init__(self, signal: Signal, raw: bytes, items: int) -> None:
        self.signal, self.raw, self.items = signal, raw, items
        self._message: Any = None

    @property
    def message(self) -> Any:
        """The parsed request."""
        if self._message is None:
            self._message = REQUEST[self.signal].FromString(self.raw)
        return self._message


def merge(batches: list[Batch]) -> Batch:
    """One batch of several of the same signal; the only one itself, if there is one."""
    if len(batches) == 1:
        return batches[0]
    return MergedBatch(batches[0].signal, b"".join(b.raw for b in batches), sum(b.items for b in batches))


class BatchProcessor:
    """Collects on the callers' threads, sends from one of its own."""

    def __init__(self, name: str, config: Config, next: Consumer, context: Context, signal: Signal) -> None:
        self._config, self._next, self._signal = config, next, signal
        self._pending: list[Batch] = []
        self._items = self._bytes = 0
        self._oldest_s = 0.0
        self._closing = False
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=f"{name}-{signal}", daemon=True)
        telemetry, labels = context.telemetry, ("processor", "signal")
        self._labels = (name, signal.value)
        self._sent = telemetry.counter("processor_batch_sent", "Batches sent on.", labels)
        self._dropped = telemetry.item_counters(
            "processor_dropped", "Items lost in a processor.", ("processor",)
        )[signal]

    def start(self) -> None:
        """Start the sending thread."""
        self._thread.start()

    def consume(self, batch: Batch) -> None:
        """Keep ``batch`` until it is sent. Raises a retryable :class:`Refused` when too much waits."""
        with self._wake:
            if self._closing:
                raise Refused("the agent is shutting down", retryable=True)
            if self._pending and self._bytes + len(batch.raw) > MAX_PENDING_BYTES:
                raise Refused("the batch processor is full: its exporters are too slow", retryable=True)
            if not self._pending:
                self._oldest_s = time.monotonic()
            self._pending.append(batch)
            self._items += batch.items
            self._bytes += len(batch.raw)
            if len(self._pending) == 1 or self._full():
                self._wake.notify()

    def shutdown(self, timeout_s: float) -> None:
        """Send what is pending."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning("%s: did not flush within %.1f s", self._labels[0], timeout_s)

    def _full(self) -> bool:
        config = self._config
        return self._items >= config.send_batch_size or 0 < config.send_batch_max_bytes <= self._bytes

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._due():
                    if self._closing and not self._pending:
                        return
                    left_s = self._oldest_s + self._config.timeout - time.monotonic()
                    self._wake.wait(max(0.0, left_s) if self._pending else None)
                pending, self._pending = self._pending, []
                self._items = self._bytes = 0
            for batch in self._cut(pending):
                self._send(batch)

    def _due(self) -> bool:
        if not self._pending:
            return False
        return self._closing or self._full() or time.monotonic() >= self._oldest_s + self._config.timeout

    def _cut(self, pending: list[Batch]) -> Iterator[Batch]:
        """Merge in order of arrival, starting anew at every limit."""
        max_items, max_bytes = self._config.send_batch_max_size, self._config.send_batch_max_bytes
        group: list[Batch] = []
        items = size = 0
        for whole in pending:
            for batch in split(whole, max_items) if 0 < max_items < whole.items else (whole,):
                over_items = 0 < max_items < items + batch.items
                over_bytes = 0 < max_bytes < size + len(batch.raw)
                if group and (over_items or over_bytes):
                    yield merge(group)
                    group, items, size = [], 0, 0
                group.append(batch)
                items += batch.items
                size += len(batch.raw)
        if group:
            yield merge(group)

    def _send(self, batch: Batch) -> None:
        try:
            self._next.consume(batch)
            self._sent.labels(*self._labels).inc()
        except Refused as error:
            self._dropped.labels(self._labels[0]).inc(batch.items)
            log.warning(
                "%s: %d %s items dropped: %s", self._labels[0], batch.items, self._signal, error.reason
            )
        except Exception:  # the thread must live: what failed is logged and counted
            self._dropped.labels(self._labels[0]).inc(batch.items)
            log.exception("%s: %d %s items dropped", self._labels[0], batch.items, self._signal)


def build(name: str, config: Config, next: Consumer, context: Context, signal: Signal) -> BatchProcessor:
    """Make the processor of one pipeline."""
    return BatchProcessor(name, config, next, context, signal)


factory = Factory(Kind.PROCESSOR, "batch", Config, build)
