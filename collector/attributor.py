"""From OTLP messages to finished, attributed requests in the store: the agent's core.

The live processor drives it from a thread, the offline analysis from files: both see the same.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stratoscope.attribution.attribute import cells_of, latency_of
from stratoscope.attribution.matrix import LatencyBands, PercentileBands
from stratoscope.attribution.segment import Segmented, segment_request
from stratoscope.attribution.waterfall import interference

from .assembler import Assembler, Joined, Limits
from .finished import Finished, Neighbour
from .records import RecordParser
from .store import RequestStore

_MAX_INTERFERENCE = 64
_MAX_NEIGHBOURS = 16
_TRIM_EVERY_S = 5.0  # a trim rebuilds the timelines
_RECENT_STEPS = 2000


@dataclass(slots=True)
class Options:
    """What the configuration decides; see ``processors.attribution``."""

    limits: Limits
    bands: PercentileBands | LatencyBands
    max_requests: int = 50_000


class Attributor:
    """Thread-safe: one lock around the join state and the store."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.lock = threading.RLock()
        self.assembler = Assembler(options.limits)
        self.store = RequestStore(options.max_requests)
        self.rejected = 0
        self.reject_reasons: deque[str] = deque(maxlen=20)  # the newest
        self._parser = RecordParser()
        self._trim_due_s = 0.0
        self.versions: dict[str, str] = {}
        self._listeners: list[Callable[[Finished], None]] = []

    def on_finished(self, callback: Callable[[Finished], None]) -> None:
        """Call ``callback`` with each finished request, on the thread that drives this object."""
        self._listeners.append(callback)

    def take(self, message: Any, now_s: float) -> None:
        """Add an ExportTraceServiceRequest. Bad records are counted in ``rejected``."""
        with self.lock:
            parsed = self._parser.parse(message)
            self.rejected += parsed.rejected
            self.reject_reasons.extend(parsed.reasons)
            for record in parsed.records:
                self.versions.update(record.process.versions)
                self.assembler.take(record, now_s)

    def finish(self, now_s: float, at_end: bool = False) -> list[Finished]:
        """Attribute and store the requests that are ready; then forget what nobody needs."""
        finished: list[Finished] = []
        with self.lock:
            ready = list(self.assembler.ready(now_s, at_end))
            if ready:
                timelines = self.assembler.timelines()
                for joined in ready:
                    finished.append(self._attribute(joined, timelines))
                for request in finished:
                    self.store.add(request)
            if not at_end and now_s >= self._trim_due_s:
                self.assembler.trim(now_s)
                self._trim_due_s = now_s + _TRIM_EVERY_S
        for request in finished:
            for listener in self._listeners:
                listener(request)
        return finished

    def _attribute(self, joined: Joined, timelines: Any) -> Finished:
        segmented = segment_request(joined.request, timelines, self.assembler.outputs)
        hits = interference(segmented, timelines)[:_MAX_INTERFERENCE]
        return Finished(
            trace_id=joined.key[0].hex(),
            span_id=joined.key[1].hex(),
            segmented=segmented,
            cells_ns=cells_of(segmented),
            latency_ns=latency_of(segmented),
            attributes={**_attributes(joined), "itl_gaps": _gaps(segmented)},
            wall_offset_ns=joined.server.process.wall_offset_ns,
            resource=joined.server.process.resource,
            interference=tuple(hits),
        )

    # --- for the views --------------------------------------------------------------------------

    def neighbours(self, finished: Finished) -> list[Neighbour]:
        """The requests whose prompts were in this one's steps, by what they cost it."""
        cost: Counter[bytes] = Counter()
        tokens: Counter[bytes] = Counter()
        own = bytes.fromhex(finished.trace_id)
        with self.lock:
            for hit in finished.interference:
                engine = self.assembler.engines.get(hit.engine_uid)
                if engine is None or hit.other_prefill_tokens <= 0:
                    continue
                for trace_id, count in engine.chunks.get(hit.step, ()):
                    if trace_id != own:
                        cost[trace_id] += hit.duration_ns * count // hit.other_prefill_tokens
                        tokens[trace_id] += count
        return [
            Neighbour(trace_id.hex(), duration_ns, tokens[trace_id])
            for trace_id, duration_ns in cost.most_common(_MAX_NEIGHBOURS)
        ]

    def hook_status(self) -> list[dict[str, Any]]:
        """One row a process: its role and the hook's own account."""
        with self.lock:
            return [
                {
                    "process_uid": uid,
                    "role": state.role,
                    "instance": state.process.instance,
                    "missing": list(state.missing),
                    **state.account,
                }
                for uid, state in self.assembler.processes.items()
                if state.account
            ]

    def engines(self) -> list[dict[str, Any]]:
        """One row an engine core that was heard of."""
        with self.lock:
            return [
                {
                    "engine_uid": engine.uid,
                    "index": engine.index,
                    "steps": engine.steps_seen,
                    "ranks": sorted(rank for rank in engine.marks if rank >= 0),
                }
                for engine in self.assembler.engines.values()
            ]

    def steps(self, engine_uid: str | None, limit: int) -> list[dict[str, Any]]:
        """The newest rows of the step tables still held, newest first, at most ``limit``."""
        rows: list[dict[str, Any]] = []
        with self.lock:
            for uid, engine in self.assembler.engines.items():
                if engine_uid is None or uid == engine_uid:
                    rows += [
                        {"engine_uid": uid, **row} for row in engine.window.rows(min(limit, _RECENT_STEPS))
                    ]
        rows.sort(key=lambda row: -row["sched_start_ns"])
        return rows[:limit]

    def status(self) -> dict[str, Any]:
        """What is held and what was lost."""
        with self.lock:
            return {
                "pending": len(self.assembler.pending),
                "open": len(self.assembler.open),
                "processes": len(self.assembler.processes),
                "engines": len(self.assembler.engines),
                "stored": len(self.store),
                "finished_total": self.store.total,
                "step_rows_held": sum(len(engine.window) for engine in self.assembler.engines.values()),
                **self.assembler.counts,
                "rejected": self.rejected,
                "reject_reasons": list(self.reject_reasons),
            }


def _gaps(segmented: Segmented) -> int:
    """How many gaps between token flushes its ``itl`` phase is made of."""
    _, ends = segmented.request.clean_flushes()
    return int(((ends > segmented.itl_from_ns) & (ends <= segmented.itl_to_ns)).sum())


def _attributes(joined: Joined) -> dict[str, Any]:
    """Values for people, over all engine requests of one request."""
    request, found = joined.request, dict(joined.server.facts)
    found.update(api=request.api, outcome=request.outcome, streaming=request.streaming)
    requests = request.engines
    for span in joined.engines:
        for name, value in span.facts.items():
            if not found.get(name):
                found[name] = value
    found["input_tokens"] = sum({r.request_id.split("_", 1)[-1]: r.prompt_tokens for r in requests}.values())
    found["cached_tokens"] = sum(r.cached_tokens for r in requests)
    found["output_tokens"] = sum(r.output_tokens for r in requests)
    found["preemptions"] = sum(r.preemptions for r in requests)
    found["recomputed_tokens"] = sum(r.recomputed_tokens for r in requests)
    found["engine_uids"] = sorted({r.engine_uid for r in requests})
    found["request_ids"] = [r.request_id for r in requests]
    found["process_uid"] = joined.server.process.uid
    return {name: value for name, value in found.items() if value not in (None, "")}
