"""A bounded queue with retries in front of something that sends.

What the queue cannot take is refused at once; what cannot be delivered in time is dropped and
counted. Retrying waits exponentially longer, with jitter, and never less than the server asked.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

from stratoscope.collector.component import Batch, Context, Refused
from stratoscope.collector.config_schema import Duration, Range, key
from stratoscope.collector.telemetry import ITEM_NAME

log = logging.getLogger(__name__)
_MULTIPLIER = 1.5
_JITTER = 0.5  # each wait is drawn from interval * (1 +- _JITTER)
_LOG_PERIOD_S = 10.0


@dataclass(frozen=True)
class QueueConfig:
    """``sending_queue``"""

    enabled: bool = key(True, "Without a queue, a batch is sent on the thread that brings it.")
    queue_size: Annotated[int, Range(1)] = key(1000, "Most that may wait, in units of sizer.")
    sizer: Literal["requests", "items", "bytes"] = key("requests", "What queue_size counts.")
    num_consumers: Annotated[int, Range(1, 64)] = key(2, "How many requests are sent at once.")


@dataclass(frozen=True)
class RetryConfig:
    """``retry_on_failure``"""

    enabled: bool = key(True, "Without retries, a batch that fails is dropped.")
    initial_interval: Annotated[float, Duration(min_s=0.001)] = key(5.0, "First wait.")
    max_interval: Annotated[float, Duration(min_s=0.001)] = key(30.0, "Longest wait.")
    max_elapsed_time: Annotated[float, Duration()] = key(300.0, "When to give a batch up; 0: never.")


class SendError(Exception):
    """A batch was not delivered; ``retry_after_s`` is how long the server asked to wait."""

    def __init__(self, reason: str, retryable: bool, retry_after_s: float | None = None) -> None:
        super().__init__(reason)
        self.reason, self.retryable, self.retry_after_s = reason, retryable, retry_after_s


Send = Callable[[Batch, float], None]  # (batch, timeout_s); raises SendError


class QueuedSender:
    """Delivers batches with ``send`` from ``num_consumers`` threads."""

    def __init__(
        self,
        name: str,
        send: Send,
        timeout_s: float,
        queue: QueueConfig,
        retry: RetryConfig,
        context: Context,
    ) -> None:
        self._name, self._send, self._timeout_s = name, send, timeout_s
        self._queue, self._retry = queue, retry
        self._waiting: deque[Batch] = deque()
        self._size = 0
        self._wake = threading.Condition()
        self._closing = threading.Event()
        self._deadline_s = float("inf")
        self._last_log_s = float("-inf")
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{i}", daemon=True)
            for i in range(queue.num_consumers if queue.enabled else 0)
        ]
        telemetry = context.telemetry
        self._sent = telemetry.item_counters("exporter_sent", "Items delivered.", ("exporter",))
        self._failed = telemetry.item_counters(
            "exporter_send_failed", "Items lost by an exporter.", ("exporter",)
        )
        self._rejected = telemetry.item_counters(
            "exporter_enqueue_failed", "Items that a full queue refused.", ("exporter",)
        )
        self._retries = telemetry.counter(
            "exporter_retries", "Deliveries that will be tried again.", ("exporter",)
        )
        gauge = telemetry.gauge("exporter_queue_size", "What waits, in units of the sizer.", ("exporter",))
        gauge.labels(name).set_function(lambda: self._size)
        capacity = telemetry.gauge("exporter_queue_capacity", "Most that may wait.", ("exporter",))
        capacity.labels(name).set(queue.queue_size)

    def start(self) -> None:
        """Start the sending threads."""
        for thread in self._threads:
            thread.start()

    def consume(self, batch: Batch) -> None:
        """Queue ``batch``. Raises :class:`Refused` when the queue is full."""
        if not self._queue.enabled:
            self._deliver(batch)
            return
        cost = self._cost(batch)
        with self._wake:
            if self._closing.is_set():
                raise Refused(f"exporter {self._name} is shut down", retryable=True)
            if self._size + cost > self._queue.queue_size:
                self._rejected[batch.signal].labels(self._name).inc(batch.items)
                raise Refused(f"the sending queue of exporter {self._name} is full", retryable=True)
            self._waiting.append(batch)
            self._size += cost
            self._wake.notify()

    def shutdown(self, timeout_s: float) -> None:
        """Deliver what waits, trying each batch once, until ``timeout_s`` has passed; drop the rest."""
        self._deadline_s = time.monotonic() + timeout_s
        with self._wake:
            self._closing.set()
            self._wake.notify_all()
        for thread in self._threads:
            thread.join(max(0.0, self._deadline_s - time.monotonic()))
        with self._wake:
            left = list(self._waiting)
            self._waiting.clear()
            self._size = 0
        for batch in left:
            self._drop(batch, "the agent shut down before it could be sent")

    def _cost(self, batch: Batch) -> int:
        return {"requests": 1, "items": batch.items, "bytes": len(batch.raw)}[self._queue.sizer]

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._waiting:
                    if self._closing.is_set():
                        return
                    self._wake.wait()
                batch = self._waiting.popleft()
                self._size -= self._cost(batch)
            try:
                self._deliver(batch)
            except Exception:  # the thread must live: what failed is logged and counted
                log.exception("%s: unexpected error", self._name)
                self._drop(batch, "an unexpected error")

    def _deliver(self, batch: Batch) -> None:
        started_s = time.monotonic()
        interval_s = self._retry.initial_interval
        while True:
            timeout_s = min(self._timeout_s, self._deadline_s - time.monotonic())
            if timeout_s <= 0:
                return self._drop(batch, "the agent shut down before it could be sent")
            last_try = self._closing.is_set()
            try:
                self._send(batch, timeout_s)
            except SendError as error:
                wait_s = interval_s * random.uniform(1 - _JITTER, 1 + _JITTER)
                wait_s = max(wait_s, error.retry_after_s or 0.0)
                limit_s = self._retry.max_elapsed_time
                too_late = 0 < limit_s < time.monotonic() + wait_s - started_s
                if not error.retryable or not self._retry.enabled or last_try or too_late:
                    return self._drop(batch, error.reason)
                self._retries.labels(self._name).inc()
                self._log(f"{self._name}: {error.reason}; trying again in {wait_s:.1f} s")
                interval_s = min(interval_s * _MULTIPLIER, self._retry.max_interval)
                self._closing.wait(wait_s)
            else:
                self._sent[batch.signal].labels(self._name).inc(batch.items)
                return None

    def _drop(self, batch: Batch, reason: str) -> None:
        self._failed[batch.signal].labels(self._name).inc(batch.items)
        self._log(f"{self._name}: {batch.items} {ITEM_NAME[batch.signal]} dropped: {reason}")

    def _log(self, text: str) -> None:
        """Warn, but not for every batch of a dead backend; the counters have them all."""
        now_s = time.monotonic()
        if now_s - self._last_log_s >= _LOG_PERIOD_S:
            self._last_log_s = now_s
            log.warning("%s", text)
        else:
            log.debug("%s", text)
