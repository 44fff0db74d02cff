"""Requests as the two sides saw them: the API server's lifecycle and the engine's step numbers.

Times are monotonic ns; 0 means "not recorded". Field names are those of ``semconv`` without their
prefix.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from stratoscope.instrumentation import semconv as sc

from .tables import Int64, clean_time, clean_times

_NO_STEPS = -1


def _no_events() -> Int64:
    return np.zeros((0, len(sc.EVENT_COLUMNS)), np.int64)


def _no_flushes() -> Int64:
    return np.zeros((0, len(sc.FLUSH_COLUMNS)), np.int64)


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One ``request.engine`` record. ``events`` has shape (m, 3): step, kind, value."""

    engine_uid: str
    engine_index: int = 0
    request_id: str = ""
    core_received_ns: int = 0
    core_preprocessed_ns: int = 0
    queued_ns: int = 0
    finished_ns: int = 0
    arrival_step: int = _NO_STEPS
    first_step: int = _NO_STEPS
    first_output_step: int = _NO_STEPS
    last_step: int = _NO_STEPS
    events: Int64 = field(default_factory=_no_events)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ServerRequest:
    """One ``request.server`` record with the engine records that belong to it.

    ``flushes`` has shape (n, 2): start and end of each send. ``process_uid`` finds the output
    table. ``n_engine_requests`` is what the server submitted, ``engines`` what the engines reported.
    """

    arrival_ns: int
    end_ns: int
    last_byte_ns: int = 0
    outcome: str = sc.Outcome.OK
    streaming: bool = False
    api: str = "http"
    process_uid: str = ""
    body_ns: int = 0
    template_start_ns: int = 0
    template_end_ns: int = 0
    tokenize_start_ns: int = 0
    tokenize_end_ns: int = 0
    submit_ns: int = 0
    n_engine_requests: int = 0
    flushes: Int64 = field(default_factory=_no_flushes)
    flushes_dropped: int = 0
    engines: tuple[EngineRequest, ...] = ()

    @property
    def span_ns(self) -> tuple[int, int]:
        """(arrival, end of latency): the last byte for a finished request, else its end.

        A request without a usable arrival starts with the first time that is known; an end before
        the arrival makes a latency of 0.
        """
        times = [clean_time(t) for t in (self.arrival_ns, self.body_ns, self.submit_ns, self.end_ns)]
        arrival = next((time for time in times if time), 0)
        end = clean_time(self.end_ns)
        if self.outcome == sc.Outcome.OK:
            end = clean_time(self.last_byte_ns) or end
        return arrival, max(end, arrival)

    def clean_flushes(self) -> tuple[Int64, Int64]:
        """(starts, ends) of the sends, in order, without overlap."""
        flushes = np.asarray(self.flushes, np.int64).reshape(-1, 2)
        start, end = clean_times(flushes[:, 0]), clean_times(flushes[:, 1])
        usable = (start > 0) & (end >= start)
        if not usable.all():
            start, end = start[usable], end[usable]
        if len(start) > 1:
            if (start[1:] < start[:-1]).any():
                order = np.argsort(start, kind="stable")
                start, end = start[order], end[order]
            end = np.maximum.accumulate(end)
            start = np.maximum(start, np.concatenate(([0], end[:-1])))
        return start, end
