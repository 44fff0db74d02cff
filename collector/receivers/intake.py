"""What both OTLP transports do with a decoded request: count it and hand it on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from stratoscope.collector.component import Consumer, Refused, Signal
from stratoscope.collector.otlp import Decoded, PayloadError
from stratoscope.collector.telemetry import Telemetry

log = logging.getLogger(__name__)
RETRY_AFTER_S = 1.0


class Intake:
    """Feeds the pipelines of one receiver and one transport. Thread-safe."""

    def __init__(
        self, name: str, transport: str, consumers: Mapping[Signal, Consumer], telemetry: Telemetry
    ) -> None:
        self.signals = frozenset(consumers)
        self._consumers = consumers
        self._labels = (name, transport)
        labels = ("receiver", "transport")
        self._accepted = telemetry.item_counters(
            "receiver_accepted", "Items that entered a pipeline.", labels
        )
        self._refused = telemetry.item_counters(
            "receiver_refused", "Items that a pipeline refused; the sender was told.", labels
        )
        self._rejected = telemetry.item_counters(
            "receiver_rejected", "Invalid items taken out of otherwise valid requests.", labels
        )
        self._bad = telemetry.counter(
            "receiver_invalid_requests", "Requests that could not be decoded.", (*labels, "signal", "error")
        )

    def take(self, signal: Signal, decode: Callable[[], Decoded]) -> Decoded:
        """Decode and hand on. Raises :class:`PayloadError` or :class:`Refused`, nothing else."""
        try:
            decoded = decode()
        except PayloadError as error:
            self.count_bad(signal, error)
            raise
        batch = decoded.batch
        if decoded.rejected:
            self._rejected[signal].labels(*self._labels).inc(decoded.rejected)
        if batch.items:
            try:
                self._consumers[signal].consume(batch)
            except Refused:
                self._refused[signal].labels(*self._labels).inc(batch.items)
                raise
            except Exception as error:
                log.exception("%s: a %s pipeline failed", self._labels[0], signal)
                self._refused[signal].labels(*self._labels).inc(batch.items)
                raise Refused("internal error; see the agent's log", retryable=False) from error
            self._accepted[signal].labels(*self._labels).inc(batch.items)
        return decoded

    def count_bad(self, signal: Signal, error: PayloadError) -> None:
        """Count a request that never became a batch."""
        self._bad.labels(*self._labels, signal.value, type(error).__name__).inc()
