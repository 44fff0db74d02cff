"""Joins what the processes of a vLLM sent separately: requests with engines, steps, outputs.

An engine's span has the server's span as its parent; steps are found by the engine's uid, outputs
by the API server's process uid. A request is ready when all its engine spans are here and every
process that had a part in it has sent everything up to the request's end (its *watermark*), or
when ``join_timeout_s`` has passed since its server span came: then it is used as it is, and what is
missing becomes unattributed time. Nothing here reads a clock: ``now_s`` is passed in.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from stratoscope.attribution.records import ServerRequest
from stratoscope.attribution.tables import Int64, OutputTable, StepTable, Table, WorkerStepTable
from stratoscope.attribution.timeline import EngineTimeline
from stratoscope.attribution.window import EngineWindow
from stratoscope.instrumentation import semconv as sc

from .records import EngineSpan, Process, ServerSpan, Window, WorkerSpan

Key = tuple[bytes, bytes]  # trace id, server span id
_HORIZON_SLACK_NS = 5_000_000_000  # requests younger than a flush may not be known yet
_REMEMBERED = 65536  # finished keys, to know a repeated delivery


@dataclass(slots=True)
class Limits:
    """Bounds of what is held while it waits; all counts."""

    join_timeout_s: float = 3.0
    unfinished_after_s: float = 30.0
    window_s: float = 600.0
    max_pending: int = 20_000
    max_open: int = 50_000


@dataclass(slots=True)
class ProcessState:
    """The last that is known of a process."""

    process: Process
    role: str = ""
    seen_s: float = 0.0
    watermark_ns: int = 0
    account: dict[str, int] = field(default_factory=dict)
    missing: tuple[str, ...] = ()


@dataclass(slots=True)
class EngineState:
    """One engine core with its worker ranks; ``marks`` has a watermark a rank, -1 is the core."""

    uid: str
    clock_domain: str
    index: int = 0
    window: EngineWindow = field(default_factory=EngineWindow)
    marks: dict[int, int] = field(default_factory=dict)
    chunks: dict[int, list[tuple[bytes, int]]] = field(default_factory=dict)  # step: (trace id, tokens)
    steps_seen: int = 0
    seen_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Open:
    """A request that its API server said is open: since when, and when that was last said."""

    arrival_ns: int
    process_uid: str
    seen_ns: int
    seen_s: float


@dataclass(slots=True)
class Pending:
    """A request whose server span, engine spans, or both, are here."""

    server: ServerSpan | None = None
    server_s: float = 0.0
    first_s: float = 0.0
    engines: dict[str, EngineSpan] = field(default_factory=dict)
    ranks: dict[str, set[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Joined:
    """A request ready to be attributed."""

    key: Key
    server: ServerSpan
    request: ServerRequest
    engines: tuple[EngineSpan, ...]


class Assembler:
    """Not safe for use by several threads; its owner holds a lock."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.processes: dict[str, ProcessState] = {}
        self.engines: dict[str, EngineState] = {}
        self.outputs: dict[str, OutputTable] = {}
        self.pending: OrderedDict[Key, Pending] = OrderedDict()
        self.open: dict[Key, Open] = {}
        self.counts: dict[str, int] = dict.fromkeys(
            ("duplicates", "late", "evicted_pending", "evicted_open", "timed_out"), 0
        )
        self._done: set[Key] = set()
        self._done_order: deque[Key] = deque()

    # --- taking in ------------------------------------------------------------------------------

    def take(self, record: ServerSpan | EngineSpan | WorkerSpan | Window, now_s: float) -> None:
        """Add one record."""
        state = self._process(record.process, now_s)
        if isinstance(record, Window):
            self._take_window(record, state, now_s)
        elif isinstance(record, ServerSpan):
            state.role = state.role or "api_server"
            self._take_server(record, now_s)
        elif isinstance(record, EngineSpan):
            self._take_engine(record, now_s)
        else:
            self._take_worker(record, now_s)

    def _process(self, process: Process, now_s: float) -> ProcessState:
        state = self.processes.get(process.uid)
        if state is None:
            state = self.processes[process.uid] = ProcessState(process)
        state.seen_s = now_s
        return state

    def _engine(self, uid: str, process: Process, now_s: float) -> EngineState:
        engine = self.engines.get(uid)
        if engine is None:
            engine = self.engines[uid] = EngineState(uid, process.clock_domain)
        engine.seen_s = now_s
        return engine

    def _take_window(self, window: Window, state: ProcessState, now_s: float) -> None:
        state.role = window.role or state.role
        if window.watermark_ns >= state.watermark_ns:
            state.watermark_ns = window.watermark_ns
            state.account, state.missing = window.account, window.missing
        table = window.table
        if isinstance(table, OutputTable):
            known = self.outputs.get(window.process.uid)
            self.outputs[window.process.uid] = OutputTable.concat(
                [known, table] if known is not None else [table]
            )
        elif not isinstance(table, Table):
            self._take_open(window, table, now_s)
        else:
            engine = self._engine(window.engine_uid, window.process, now_s)
            rank = window.rank if isinstance(table, WorkerStepTable) else -1
            engine.marks[rank] = max(engine.marks.get(rank, 0), window.watermark_ns)
            if isinstance(table, WorkerStepTable):
                engine.window.append_worker(rank, table)
            elif isinstance(table, StepTable):
                engine.index = window.engine_index
                engine.steps_seen += len(table)
                engine.window.append_steps(table)

    def _take_open(self, window: Window, rows: Int64, now_s: float) -> None:
        mask = (1 << 64) - 1
        for high, low, span, arrival in rows.tolist():
            trace_id = (high & mask) << 64 | (low & mask)
            key = (trace_id.to_bytes(16, "big"), (span & mask).to_bytes(8, "big"))
            pending = self.pending.get(key)
            if key in self._done or (pending is not None and pending.server is not None):
                continue
            if key not in self.open and len(self.open) >= self.limits.max_open:
                self.counts["evicted_open"] += 1
                continue
            self.open[key] = Open(arrival, window.process.uid, window.watermark_ns, now_s)

    def _wait(self, key: Key, now_s: float) -> Pending | None:
        if key in self._done:
            self.counts["duplicates"] += 1
            return None
        pending = self.pending.get(key)
        if pending is None:
            while len(self.pending) >= self.limits.max_pending:
                self.pending.popitem(last=False)
                self.counts["evicted_pending"] += 1
            pending = self.pending[key] = Pending(first_s=now_s)
        return pending

    def _take_server(self, span: ServerSpan, now_s: float) -> None:
        key = (span.trace_id, span.span_id)
        self.open.pop(key, None)
        pending = self._wait(key, now_s)
        if pending is None:
            return
        if pending.server is not None:
            self.counts["duplicates"] += 1
            return
        pending.server, pending.server_s = span, now_s

    def _take_engine(self, span: EngineSpan, now_s: float) -> None:
        self._engine(span.request.engine_uid, span.process, now_s)
        self._note_chunks(span)
        key = (span.trace_id, span.parent_id)
        if key in self._done:
            self.counts["late"] += 1
            return
        pending = self._wait(key, now_s)
        if pending is not None:
            if span.request.request_id in pending.engines:
                self.counts["duplicates"] += 1
            pending.engines[span.request.request_id] = span

    def _note_chunks(self, span: EngineSpan) -> None:
        engine = self.engines[span.request.engine_uid]
        for step, kind, value in span.request.events.tolist():
            if kind in (sc.EventKind.PREFILL, sc.EventKind.RECOMPUTE):
                entries = engine.chunks.setdefault(step, [])
                if (span.trace_id, value) not in entries:
                    entries.append((span.trace_id, value))

    def _take_worker(self, span: WorkerSpan, now_s: float) -> None:
        key = (span.trace_id, span.parent_id)
        if key in self._done:
            return
        pending = self._wait(key, now_s)
        if pending is not None:
            pending.ranks.setdefault(span.engine_uid, set()).add(span.rank)

    # --- giving out -----------------------------------------------------------------------------

    def ready(self, now_s: float, at_end: bool = False) -> Iterator[Joined]:
        """Requests that can be attributed now; with ``at_end`` all that have a server span."""
        self._give_up_on_silent(now_s, at_end)
        for key in list(self.pending):
            pending = self.pending[key]
            if pending.server is None:
                # Engine spans whose server span never came: the API server died or sends elsewhere.
                if at_end or now_s - pending.first_s > self.limits.unfinished_after_s * 4:
                    del self.pending[key]
                    self.counts["evicted_pending"] += 1
                continue
            complete = self._complete(pending)
            if not complete and not at_end and now_s - pending.server_s < self.limits.join_timeout_s:
                continue
            if not complete:
                self.counts["timed_out"] += 1
            del self.pending[key]
            self._remember(key)
            yield self._join(key, pending)

    def _complete(self, pending: Pending) -> bool:
        server = pending.server
        assert server is not None
        if len(pending.engines) < server.request.n_engine_requests:
            return False
        if server.request.n_engine_requests == 0:
            return True
        state = self.processes[server.process.uid]
        if state.watermark_ns < server.request.last_byte_ns:
            return False
        for span in pending.engines.values():
            marks = self.engines[span.request.engine_uid].marks
            if -1 not in marks or len(marks) < 2:
                return False
            if any(mark < span.request.finished_ns for mark in marks.values()):
                return False
        return True

    def _join(self, key: Key, pending: Pending) -> Joined:
        server = pending.server
        assert server is not None
        # Times of another clock mean nothing here: such a record counts as missing.
        engines = tuple(
            span
            for span in pending.engines.values()
            if span.process.clock_domain == server.process.clock_domain
        )
        found = [span.request for span in engines]
        requests = tuple(sorted(found, key=lambda request: (request.queued_ns, request.request_id)))
        return Joined(key, server, replace(server.request, engines=requests), engines)

    def _remember(self, key: Key) -> None:
        self._done.add(key)
        self._done_order.append(key)
        if len(self._done_order) > _REMEMBERED:
            self._done.discard(self._done_order.popleft())

    def _give_up_on_silent(self, now_s: float, at_end: bool) -> None:
        """Open requests that nobody has mentioned for a while (or any, at the end) never finished."""
        for key, known in list(self.open.items()):
            if not at_end and now_s - known.seen_s < self.limits.unfinished_after_s:
                continue
            del self.open[key]
            state = self.processes.get(known.process_uid)
            if state is None:
                continue
            arrival_ns, end_ns = known.arrival_ns, max(known.seen_ns, known.arrival_ns)
            pending = self._wait(key, now_s)
            if pending is None or pending.server is not None:
                continue
            request = ServerRequest(
                arrival_ns=arrival_ns, end_ns=end_ns, outcome=sc.Outcome.UNFINISHED,
                process_uid=known.process_uid, submit_ns=arrival_ns,
                n_engine_requests=max(len(pending.engines), 1),
            )  # fmt: skip
            pending.server = ServerSpan(key[0], key[1], state.process, request, facts={})
            pending.server_s = now_s

    # --- for the attribution ----------------------------------------------------------------------

    def timelines(self) -> dict[str, EngineTimeline]:
        """Timelines by engine uid."""
        return {uid: engine.window.timeline for uid, engine in self.engines.items()}

    def trim(self, now_s: float) -> None:
        """Forget steps and outputs that no request still to come can refer to."""
        horizons = self._horizons(now_s)
        for uid, engine in list(self.engines.items()):
            if engine.clock_domain not in horizons:
                continue
            horizon_ns = horizons[engine.clock_domain]
            engine.window.trim(horizon_ns)
            timeline = engine.window.timeline
            first = int(timeline.step[0]) if len(timeline.step) else None
            if first is not None and engine.chunks:
                engine.chunks = {step: who for step, who in engine.chunks.items() if step >= first - 20_000}
            if now_s - engine.seen_s > self.limits.window_s and not len(engine.window):
                del self.engines[uid]
        for uid, table in list(self.outputs.items()):
            state = self.processes.get(uid)
            horizon = horizons.get(state.process.clock_domain) if state is not None else None
            if horizon is not None:
                self.outputs[uid] = table.where(table["end_ns"] >= horizon)
        for uid, state in list(self.processes.items()):
            if now_s - state.seen_s > self.limits.window_s:
                del self.processes[uid]
                self.outputs.pop(uid, None)

    def _horizons(self, now_s: float) -> dict[str, int]:
        """By clock domain: the earliest time that a request still to come may refer to."""
        latest: dict[str, int] = {}
        earliest: dict[str, int] = {}
        for state in self.processes.values():
            domain = state.process.clock_domain
            latest[domain] = max(latest.get(domain, 0), state.watermark_ns)
            alive = now_s - state.seen_s < self.limits.unfinished_after_s
            if state.role == "api_server" and alive and state.watermark_ns:
                mark = state.watermark_ns - _HORIZON_SLACK_NS
                earliest[domain] = min(earliest.get(domain, mark), mark)
        servers = [p.server for p in self.pending.values() if p.server is not None]
        waiting = [(span.process.clock_domain, span.request.arrival_ns) for span in servers]
        waiting += [
            (span.process.clock_domain, span.request.core_received_ns - _HORIZON_SLACK_NS)
            for p in self.pending.values()
            for span in p.engines.values()
        ]
        for known in self.open.values():
            if known.process_uid in self.processes:
                domain = self.processes[known.process_uid].process.clock_domain
                waiting.append((domain, known.arrival_ns))
        for domain, time_ns in waiting:
            earliest[domain] = min(earliest.get(domain, time_ns), time_ns)
        oldest = int(self.limits.window_s * 1e9)
        return {
            domain: max(earliest.get(domain, mark - _HORIZON_SLACK_NS), mark - oldest)
            for domain, mark in latest.items()
        }
