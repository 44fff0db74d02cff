"""The ``memory_limiter`` processor: refuses batches while the agent's memory is above a limit.

Refusal is retryable: senders keep the data and try again. Put it first in every pipeline. Memory
is the resident set of this process (/proc/self/statm); where there is no /proc, nothing is limited
and the log says so.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

from stratoscope.collector.component import Batch, Consumer, Context, Factory, Kind, Refused, Signal
from stratoscope.collector.config_schema import Duration, Range, key

log = logging.getLogger(__name__)
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_RECLAIM_PERIOD_S = 5.0


@dataclass(frozen=True)
class Config:
    """``processors.memory_limiter``"""

    limit_mib: Annotated[int, Range(128)] = key(1024, "Resident memory in MiB that is never to be exceeded.")
    spike_limit_mib: Annotated[int, Range(0)] = key(
        200, "Room in MiB below the limit: refusal begins at limit_mib - spike_limit_mib."
    )
    check_interval: Annotated[float, Duration(min_s=0.001, max_s=60)] = key(
        0.1, "How old a measurement may be."
    )

    def validate(self) -> Iterable[tuple[str, str]]:
        """The soft limit must lie above zero."""
        if self.spike_limit_mib >= self.limit_mib:
            yield (
                "spike_limit_mib",
                f"must be less than limit_mib ({self.limit_mib}), got {self.spike_limit_mib}",
            )


def resident_bytes() -> int | None:
    """Resident set size of this process; ``None`` where /proc is missing."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE_BYTES
    except OSError:
        return None


class MemoryLimiter:
    """Measures at most once per ``check_interval``, on the thread that brings a batch."""

    def __init__(self, config: Config, next: Consumer, context: Context) -> None:
        self._soft_bytes = (config.limit_mib - config.spike_limit_mib) << 20
        self._interval_s = config.check_interval
        self._next = next
        self._lock = threading.Lock()
        self._checked_s = self._reclaimed_s = float("-inf")
        self._rss_bytes: int = 0
        self._limiting = False
        telemetry = context.telemetry
        self._refusals = telemetry.counter(
            "processor_memory_limiter_refusals", "Batches refused for lack of memory."
        )
        telemetry.gauge("process_memory_rss", "Resident memory of the agent in bytes.").set_function(
            lambda: resident_bytes() or 0
        )
        telemetry.gauge("memory_limit_bytes", "Memory above which batches are refused.").set(self._soft_bytes)

    def start(self) -> None:
        """Say so once if there is nothing to measure."""
        if resident_bytes() is None:
            log.warning("memory_limiter: there is no /proc/self/statm here; memory is not limited")

    def consume(self, batch: Batch) -> None:
        """Pass on, or raise a retryable :class:`Refused`."""
        with self._lock:
            now_s = time.monotonic()
            if now_s - self._checked_s >= self._interval_s:
                self._checked_s = now_s
                self._check(now_s)
            limiting, rss_bytes = self._limiting, self._rss_bytes
        if limiting:
            self._refusals.inc()
            raise Refused(
                f"the agent uses {rss_bytes >> 20} MiB of memory, its limit is {self._soft_bytes >> 20} MiB"
                " (processors.memory_limiter); try again later",
                retryable=True,
            )
        self._next.consume(batch)

    def shutdown(self, timeout_s: float) -> None:
        """Nothing to release."""

    def _check(self, now_s: float) -> None:
        self._rss_bytes = resident_bytes() or 0
        if self._rss_bytes >= self._soft_bytes and now_s - self._reclaimed_s > _RECLAIM_PERIOD_S:
            self._reclaimed_s = now_s
            _reclaim()
            self._rss_bytes = resident_bytes() or 0
        limiting = self._rss_bytes >= self._soft_bytes
        if limiting != self._limiting:
            word = "refusing data" if limiting else "accepting data again"
            log.warning("memory_limiter: %d MiB resident, %s", self._rss_bytes >> 20, word)
        self._limiting = limiting


def _reclaim() -> None:
    """Collect garbage, and make glibc give freed pages back: else the limit would never be left."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def build(name: str, config: Config, next: Consumer, context: Context, signal: Signal) -> MemoryLimiter:
    """Make the processor of one pipeline."""
    return MemoryLimiter(config, next, context)


factory = Factory(Kind.PROCESSOR, "memory_limiter", Config, build)
