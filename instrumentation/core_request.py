"""One engine request as the engine core sees it."""

from __future__ import annotations

from array import array
from typing import Any

from . import semconv as sc
from .trace_context import TraceContext

MAX_EVENTS = 4096  # rows; a request needs one a prompt chunk, skip or preemption
BLOCKED_STATUS = {
    "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR": int(sc.WaitReason.GRAMMAR),
    "WAITING_FOR_FSM": int(sc.WaitReason.GRAMMAR),  # its name before vLLM 0.16
    "WAITING_FOR_REMOTE_KVS": int(sc.WaitReason.KV_TRANSFER),
}


class EngineRecord:
    """Times (monotonic ns), step numbers and events of one engine request.

    ``request`` is vLLM's own object; the flush thread reads options and counts from it after the
    engine is done with it.
    """

    __slots__ = (
        "arrival_step",
        "cached_tokens",
        "context",
        "context_base",
        "end_ns",
        "ended",
        "events",
        "events_dropped",
        "first_output_step",
        "first_step",
        "last_step",
        "last_wait",
        "lost_until",
        "position",
        "preemptions",
        "prefill_until",
        "preprocessed_ns",
        "queued_ns",
        "received_ns",
        "recomputed_tokens",
        "request",
    )  # fmt: skip

    def __init__(
        self, request: Any, context: TraceContext, received: int, preprocessed: int, queued: int, step: int
    ) -> None:
        self.request = request
        self.context = context
        self.received_ns = received
        self.preprocessed_ns = preprocessed
        self.queued_ns = queued
        self.arrival_step = step
        self.first_step = self.first_output_step = self.last_step = -1
        self.end_ns = 0
        self.ended = False
        self.events = array("q")
        self.events_dropped = 0
        self.cached_tokens = 0
        self.preemptions = 0
        self.recomputed_tokens = 0
        self.position = 0  # tokens computed so far, while in prefill
        self.prefill_until = 0
        self.lost_until = 0  # tokens below this had been computed before a preemption
        self.context_base = 0
        self.last_wait = 0

    @property
    def waits_for_itself(self) -> bool:
        """True if it may wait for something of its own: a grammar, remote KV."""
        return self._own_wait() != 0 or getattr(self.request, "kv_transfer_params", None) is not None

    def _own_wait(self) -> int:
        return BLOCKED_STATUS.get(getattr(self.request.status, "name", ""), 0)

    def note_blocked(self, step: int, kind: int) -> None:
        """Add an event when the reason that it waits for by itself changed."""
        wait = self._own_wait()
        if wait != self.last_wait:
            self.last_wait = wait
            self.event(step, kind, wait)

    def event(self, step: int, kind: int, value: int) -> None:
        """Append one row of semconv.EVENT_COLUMNS."""
        if len(self.events) >= 3 * MAX_EVENTS:
            self.events_dropped += 1
            return
        self.events.extend((step, kind, value))
        if kind == sc.EventKind.PREEMPTED:
            self.preemptions += 1

    def enter_context(self, step: int) -> int:
        """Tokens that it adds to the batch's context from ``step`` on."""
        self.context_base = self.prefill_until - step
        return self.prefill_until

    def leave_context(self, step: int) -> int:
        """Tokens that it takes out of the batch's context when it leaves before ``step``."""
        if self.position < self.prefill_until:
            return 0  # still in prefill: it was never added
        return self.context_base + step - 1

    def close(self, end_ns: int, last_step: int) -> None:
        """Its last event happened."""
        self.end_ns = end_ns
        self.last_step = last_step if self.first_step >= 0 else -1
