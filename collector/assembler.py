"""Joins what the processes say of one request, and decides when to stop waiting for more.

A request is complete when its server span is here, as many engine spans as it submitted, and the
watermarks of its API server, its engines and each of their known worker ranks have passed its end.
It is finished with what there is after ``join_timeout_s``; attribution then says what is missing.
A request that is only known to be open, from a process that has gone silent, is finished as
``unfinished``.

Nothing here reads a clock: callers pass ``now_s``, seconds that only grow. For one thread.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from stratoscope.attribution.records import ServerRequest
from stratoscope.attribution.tables import OutputTable, clean_time
from stratoscope.attribution.timeline import EngineTimeline
from stratoscope.collector.engine_state import (
    Bounded,
    EngineState,
    Limits,
    OpenRequest,
    ProcessState,
    trace_id_of,
)
from stratoscope.collector.records import EngineSpan, ServerSpan, SpanRecord, WorkerSpan, Window
from stratoscope.instrumentation import semconv as sc

Key = tuple[bytes, bytes]  # trace id, span id of the server span
_MAX_DONE = 20_000


@dataclass(slots=True)
class Joined:
    """A request with all that was found of it. ``complete``: nothing was given up on."""

    server: ServerSpan
    request: ServerRequest
    engines: list[EngineSpan]
    workers: list[WorkerSpan]
    complete: bool

    @property
    def span_ns(self) -> tuple[int, int]:
        """(arrival, end), monotonic ns."""
        return self.request.span_ns


@dataclass(slots=True)
class _Parts:
    """What has arrived of one request. ``since_s``: its server span, else its first part."""

    since_s: float
    server: ServerSpan | None = None
    engines: dict[bytes, EngineSpan] = field(default_factory=dict)
    workers: dict[bytes, WorkerSpan] = field(default_factory=dict)
    settled: bool = False  # complete at the tick before: stragglers of the same flush are here too


class Assembler:
    """Takes records, gives joined requests, keeps the tables that they need."""

    def __init__(
        self, limits: Limits | None = None, join_timeout_s: float = 3.0, unfinished_after_s: float = 30.0
    ) -> None:
        self.limits = limits or Limits()
        self.join_timeout_s, self.unfinished_after_s = join_timeout_s, unfinished_after_s
        self.engines: Bounded[EngineState] = Bounded(self.limits.max_sources)
        self.processes: Bounded[ProcessState] = Bounded(self.limits.max_sources)
        self.counts: Counter[str] = Counter()
        self._servers: OrderedDict[Key, _Parts] = OrderedDict()  # with a server span
        self._orphans: OrderedDict[Key, _Parts] = OrderedDict()  # without
        self._done: OrderedDict[Key, frozenset[bytes]] = OrderedDict()
        self._windows: OrderedDict[bytes, None] = OrderedDict()

    # --- in -------------------------------------------------------------------------------------------

    def add(self, record: SpanRecord, now_s: float) -> None:
        """Take one record. The same one again changes nothing."""
        process = self._process(record, now_s)
        if isinstance(record, Window):
            self._add_window(record, process, now_s)
        elif isinstance(record, ServerSpan):
            self._add_server(record, process, now_s)
        else:
            self._add_part(record, now_s)

    def _process(self, record: SpanRecord, now_s: float) -> ProcessState:
        state = self.processes.get(record.process.uid)
        if state is None:
            state = ProcessState.new(record.process, self.limits, now_s)
        state.last_s = now_s
        self.processes.touch(record.process.uid, state)
        return state

    def _engine(self, uid: str, now_s: float) -> EngineState:
        state = self.engines.get(uid) or EngineState(uid, self.limits, now_s)
        state.last_s = now_s
        self.engines.touch(uid, state)
        return state

    def _add_server(self, span: ServerSpan, process: ProcessState, now_s: float) -> None:
        key = (span.trace_id, span.span_id)
        process.open.pop(span.span_id, None)
        if self._is_done(key, span.span_id) or key in self._servers:
            self.counts["duplicates"] += key in self._servers
            return
        parts = self._orphans.pop(key, None) or _Parts(now_s)
        parts.since_s, parts.server = now_s, span
        self._servers[key] = parts

    def _add_part(self, span: EngineSpan | WorkerSpan, now_s: float) -> None:
        key = (span.trace_id, span.parent_id)
        if self._is_done(key, span.span_id):
            return
        parts = self._servers.get(key) or self._orphans.get(key)
        if parts is None:
            parts = self._orphans[key] = _Parts(now_s)
            while len(self._orphans) > self.limits.max_pending:
                self._orphans.popitem(last=False)
                self.counts["orphans_evicted"] += 1
        if span.span_id in parts.engines or span.span_id in parts.workers:
            self.counts["duplicates"] += 1
        elif isinstance(span, WorkerSpan):
            parts.workers[span.span_id] = span
        else:
            parts.engines[span.span_id] = span
            self._engine(span.request.engine_uid, now_s).prefills.add(span)

    def _is_done(self, key: Key, span_id: bytes) -> bool:
        used = self._done.get(key)
        if used is None:
            return False
        self.counts["duplicates" if span_id in used else "late_spans"] += 1
        return True

    def _add_window(self, window: Window, process: ProcessState, now_s: float) -> None:
        if window.span_id in self._windows:
            self.counts["duplicates"] += 1
            return
        self._windows[window.span_id] = None
        if len(self._windows) > _MAX_DONE:
            self._windows.popitem(last=False)
        process.note(window)
        evicted = 0
        if window.kind == sc.Record.STEPS:
            evicted = self._engine(window.engine_uid, now_s).add_steps(window, now_s)
        elif window.kind == sc.Record.WORKER_STEPS:
            process.worker_rows += len(window.table)
            evicted = self._engine(window.engine_uid, now_s).add_worker_steps(window, now_s)
        elif isinstance(window.table, OutputTable):
            process.outputs_mark_ns = max(process.outputs_mark_ns, window.watermark_ns)
            evicted = process.outputs.add(window.table, now_s)
        else:
            self._add_open(window, process, now_s)
        self.counts["rows_evicted"] += evicted

    def _add_open(self, window: Window, process: ProcessState, now_s: float) -> None:
        rows = window.table[: self.limits.max_pending].tolist()  # type: ignore[index]
        for high, low, span, arrival_ns in rows:
            trace_id, span_id = trace_id_of(high, low), span.to_bytes(8, "big", signed=True)
            key = (trace_id, span_id)
            known = process.open.get(span_id)
            if known is not None:
                known.seen_s, known.seen_ns = now_s, max(known.seen_ns, window.watermark_ns)
            elif key not in self._servers and key not in self._done and clean_time(arrival_ns):
                if len(process.open) >= self.limits.max_pending:
                    self.counts["open_evicted"] += 1
                    continue
                process.open[span_id] = OpenRequest(trace_id, span_id, arrival_ns, window.watermark_ns, now_s)

    # --- out ------------------------------------------------------------------------------------------

    def ready(self, now_s: float) -> list[Joined]:
        """Requests to finish now, by the end of their latency; forgets what is too old to be needed."""
        found = [self._finish(key, parts, complete) for key, parts, complete in self._due(now_s)]
        found += self._unfinished(now_s)
        self._trim(now_s)
        return _in_order(found)

    def close(self) -> list[Joined]:
        """All that is left, at the end of the input or at shutdown."""
        found = [
            self._finish(key, parts, self._is_complete(parts)) for key, parts in list(self._servers.items())
        ]
        for process in self.processes.values():
            found += [self._give_up(process, request) for request in process.open.values()]
            process.open.clear()
        self.counts["orphans_evicted"] += len(self._orphans)
        self._orphans.clear()
        return _in_order(found)

    @property
    def pending(self) -> int:
        """Requests whose server span is here and which are not finished yet."""
        return len(self._servers)

    @property
    def open(self) -> int:
        """Requests known to be open."""
        return sum(len(process.open) for process in self.processes.values())

    def tables(
        self, group: Iterable[Joined]
    ) -> tuple[Mapping[str, EngineTimeline], Mapping[str, OutputTable]]:
        """Timelines by engine uid and outputs by process uid, for the time of these requests."""
        spans: dict[str, tuple[int, int]] = {}
        outputs: dict[str, tuple[int, int]] = {}
        for joined in group:
            for uid in {engine.engine_uid for engine in joined.request.engines}:
                spans[uid] = _wider(spans.get(uid), joined.span_ns)
            uid = joined.request.process_uid
            outputs[uid] = _wider(outputs.get(uid), joined.span_ns)
        lines = {}
        for uid, span in spans.items():
            state = self.engines.get(uid)
            if state is not None:
                lines[uid] = EngineTimeline.build(state.steps.between(*span), state.executions(*span))
        return lines, {
            uid: self.processes[uid].outputs.between(*span)
            for uid, span in outputs.items()
            if uid in self.processes
        }

    # --- parts ----------------------------------------------------------------------------------------

    def _due(self, now_s: float) -> list[tuple[Key, _Parts, bool]]:
        due = []
        for key, parts in self._servers.items():
            if self._is_complete(parts) and not self._is_young(parts, now_s):
                if parts.settled:
                    due.append((key, parts, True))
                parts.settled = True
            elif now_s - parts.since_s >= self.join_timeout_s:
                due.append((key, parts, self._is_complete(parts)))
        excess = len(self._servers) - len(due) - self.limits.max_pending
        if excess > 0:
            taken = {key for key, _, _ in due}
            rest = [(k, p, False) for k, p in self._servers.items() if k not in taken][:excess]
            self.counts["pending_evicted"] += len(rest)
            due += rest
        return due

    def _is_complete(self, parts: _Parts) -> bool:
        server = parts.server
        assert server is not None
        request = server.request
        if len(parts.engines) < request.n_engine_requests:
            return False
        if not parts.engines:
            return True
        process = self.processes.get(server.process.uid)
        if process is None or not process.complete_until(request.span_ns[1]):
            return False
        for engine in parts.engines.values():
            state = self.engines.get(engine.request.engine_uid)
            if state is None or not state.complete_until(clean_time(engine.request.finished_ns)):
                return False
        return True

    def _is_young(self, parts: _Parts, now_s: float) -> bool:
        """An engine heard of only just now may have ranks that have not reported yet."""
        states = (self.engines.get(engine.request.engine_uid) for engine in parts.engines.values())
        return any(state is not None and now_s - state.first_s < self.join_timeout_s for state in states)

    def _finish(self, key: Key, parts: _Parts, complete: bool) -> Joined:
        server = parts.server
        assert server is not None
        engines = [e for e in parts.engines.values() if e.process.clock_domain == server.process.clock_domain]
        if len(engines) < len(parts.engines):
            self.counts["other_clock"] += len(parts.engines) - len(engines)
        engines.sort(key=lambda span: (span.request.core_received_ns, span.span_id))
        workers = sorted(parts.workers.values(), key=lambda span: (span.rank, span.span_id))
        request = replace(server.request, engines=tuple(span.request for span in engines))
        self._forget(key, parts)
        self.counts["joined" if complete else "joined_incomplete"] += 1
        return Joined(server, request, engines, workers, complete)

    def _forget(self, key: Key, parts: _Parts) -> None:
        self._servers.pop(key, None)
        self._orphans.pop(key, None)
        self._done[key] = frozenset((key[1], *parts.engines, *parts.workers))
        if len(self._done) > _MAX_DONE:
            self._done.popitem(last=False)

    def _unfinished(self, now_s: float) -> Iterator[Joined]:
        for process in self.processes.values():
            silent = now_s - process.last_s > self.unfinished_after_s
            for request in list(process.open.values()):
                if now_s - request.seen_s <= self.unfinished_after_s:
                    continue
                del process.open[request.span_id]
                if silent:
                    yield self._give_up(process, request)
                else:  # it ended, and the record that says how was lost
                    self.counts["server_spans_lost"] += 1

    def _give_up(self, process: ProcessState, open_request: OpenRequest) -> Joined:
        """An open request of a process that will not say how it ended."""
        key = (open_request.trace_id, open_request.span_id)
        parts = self._orphans.get(key) or _Parts(open_request.seen_s)
        request = ServerRequest(
            arrival_ns=open_request.arrival_ns,
            end_ns=max(open_request.seen_ns, open_request.arrival_ns),
            outcome=sc.Outcome.UNFINISHED,
            process_uid=process.process.uid,
            # How many it had submitted is not known; with one, all that is not known is unattributed.
            n_engine_requests=max(len(parts.engines), 1),
        )
        parts.server = ServerSpan(*key, process.process, request, {})
        return self._finish(key, parts, complete=False)

    def _trim(self, now_s: float) -> None:
        histories = [history for engine in self.engines.values() for history in engine.histories]
        histories += [process.outputs for process in self.processes.values()]
        excess = sum(history.size_bytes for history in histories) - self.limits.max_table_bytes
        while excess > 0:
            largest = max(histories, key=lambda history: history.size_bytes)
            before = largest.size_bytes
            self.counts["rows_evicted"] += largest.drop_first()
            excess -= before - largest.size_bytes
        if not self.limits.window_s:
            return
        before_s = now_s - self.limits.window_s
        for engine in self.engines.values():
            engine.trim(before_s)
        for process in self.processes.values():
            process.outputs.trim(before_s)
        while self._orphans and next(iter(self._orphans.values())).since_s < before_s:
            self._orphans.popitem(last=False)
            self.counts["orphans_evicted"] += 1


def _wider(span: tuple[int, int] | None, other: tuple[int, int]) -> tuple[int, int]:
    return other if span is None else (min(span[0], other[0]), max(span[1], other[1]))


def _in_order(found: list[Joined]) -> list[Joined]:
    return sorted(found, key=lambda j: (j.span_ns[1], j.server.trace_id, j.server.span_id))
