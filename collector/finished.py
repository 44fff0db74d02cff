"""A request that is over and attributed: what the store keeps and every view is made from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stratoscope.attribution.segment import Segmented
from stratoscope.attribution.tables import Int64
from stratoscope.attribution.waterfall import Interference


@dataclass(frozen=True, slots=True)
class Neighbour:
    """Another request whose prompt tokens were in this one's steps, and what that cost it."""

    trace_id: str
    duration_ns: int
    tokens: int
    mechanism: str = "prefill_interference"


@dataclass(frozen=True, slots=True)
class Finished:
    """One request. ``cells_ns`` int64 (len(PHASES), N_CELLS); ``latency_ns`` int64 (len(PHASES),).

    ``attributes`` holds plain values for people: model, route, status, operation, outcome, streaming,
    input_tokens, cached_tokens, output_tokens, preemptions, recomputed_tokens, finish_reason, choices, lora,
    engine_uids (list), process_uid, request_ids (list), api, error_type. ``wall_offset_ns`` turns
    its monotonic times into Unix time. ``resource`` is the serialised OTLP Resource of its API server.
    ``interference``: the steps in which other requests' prompts slowed it, costliest first (bounded).
    """

    trace_id: str
    span_id: str
    segmented: Segmented
    cells_ns: Int64
    latency_ns: Int64
    attributes: dict[str, Any]
    wall_offset_ns: int = 0
    resource: bytes = b""
    interference: tuple[Interference, ...] = ()

    @property
    def end_wall_ns(self) -> int:
        """When its latency ended, Unix time in ns."""
        return self.segmented.end_ns + self.wall_offset_ns
