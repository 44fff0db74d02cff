"""What is held of each engine and each process, within bounds, while requests are joined to it."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

import numpy as np

from stratoscope.attribution.tables import Int64, OutputTable, StepTable, WorkerStepTable
from stratoscope.collector.history import TableHistory
from stratoscope.collector.records import EngineSpan, Process, Window
from stratoscope.instrumentation import semconv as sc

_MAX_PREFILLS: Final = 200_000  # rows of 32 bytes an engine
_MAX_RANKS: Final = 1024
_PROMPT_KINDS: Final = (int(sc.EventKind.PREFILL), int(sc.EventKind.RECOMPUTE))
S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on what is held; a ``window_s`` of 0 is without end (offline)."""

    window_s: float = 600.0  # age of step, worker and output rows
    max_rows: int = 300_000  # of each such table
    max_table_bytes: int = 256 << 20  # of all such tables together
    max_pending: int = 20_000  # requests that wait to be joined, and open ones
    max_sources: int = 1024  # engines, and processes


class Prefills:
    """Who had prompt tokens in which step of an engine: the neighbours to name."""

    def __init__(self) -> None:
        self._rows = array("q")  # step, tokens, trace id as two halves

    def add(self, span: EngineSpan) -> None:
        """Note the prompt chunks of an engine request."""
        events = span.request.events
        if not len(events):
            return
        chunks = events[np.isin(events[:, 1], _PROMPT_KINDS)]
        high, low = np.frombuffer(span.trace_id, ">i8").tolist()
        for step, _, tokens in chunks[:_MAX_PREFILLS].tolist():
            self._rows.extend((step, tokens, high, low))
        if len(self._rows) > 8 * _MAX_PREFILLS:
            del self._rows[: 4 * _MAX_PREFILLS]

    def of(self, steps: Int64) -> list[tuple[int, int, str]]:
        """(step, tokens, trace id) of every known prompt chunk in ``steps``."""
        if not self._rows:
            return []
        rows = np.array(self._rows, np.int64).reshape(-1, 4)
        return [
            (step, tokens, np.array([high, low], ">i8").tobytes().hex())
            for step, tokens, high, low in rows[np.isin(rows[:, 0], steps)].tolist()
        ]


class EngineState:
    """One engine core and its worker ranks."""

    def __init__(self, uid: str, limits: Limits, now_s: float) -> None:
        self.uid = uid
        self.index = 0
        self.process: Process | None = None
        self.clock_domain = ""
        self.first_s = self.last_s = now_s
        self.steps = TableHistory(StepTable, _STEP_TIMES, limits.max_rows)
        self.workers: dict[int, TableHistory[WorkerStepTable]] = {}
        self.worker_domains: dict[int, str] = {}
        self.marks_ns: dict[int | None, int] = {}  # by rank; None: the core
        self.prefills = Prefills()
        self._limits = limits

    def add_steps(self, window: Window, now_s: float) -> int:
        """Take a window of steps; returns the number of old rows that had to go."""
        self.index, self.process = window.engine_index, window.process
        self.clock_domain = window.process.clock_domain
        self._advance(None, window.watermark_ns)
        assert isinstance(window.table, StepTable)
        return self.steps.add(window.table, now_s)

    def add_worker_steps(self, window: Window, now_s: float) -> int:
        """Take a window of one rank's executions; returns the number of old rows that had to go."""
        history = self.workers.get(window.rank)
        if history is None:
            if len(self.workers) >= _MAX_RANKS:
                return len(window.table)
            history = TableHistory(WorkerStepTable, _WORKER_TIMES, self._limits.max_rows)
            self.workers[window.rank] = history
        self.worker_domains[window.rank] = window.process.clock_domain
        self._advance(window.rank, window.watermark_ns)
        assert isinstance(window.table, WorkerStepTable)
        return history.add(window.table, now_s)

    def complete_until(self, time_ns: int) -> bool:
        """True if the core and every known rank, at least one, have sent all up to ``time_ns``."""
        marks = self.marks_ns
        return None in marks and len(marks) > 1 and min(marks.values()) >= time_ns

    def executions(self, from_ns: int, to_ns: int) -> dict[int, WorkerStepTable]:
        """By rank, without ranks whose clock cannot be compared with the core's."""
        return {
            rank: history.between(from_ns, to_ns)
            for rank, history in self.workers.items()
            if self.worker_domains[rank] == self.clock_domain
        }

    @property
    def histories(self) -> list[TableHistory[Any]]:
        """All its tables."""
        return [self.steps, *self.workers.values()]

    def trim(self, before_s: float) -> None:
        """Forget rows that arrived before ``before_s``."""
        for history in self.histories:
            history.trim(before_s)

    def _advance(self, who: int | None, mark_ns: int) -> None:
        self.marks_ns[who] = max(self.marks_ns.get(who, 0), mark_ns)


_ROLES: Final = ("api_server", "engine_core", "worker")
_STEP_TIMES: Final = ("input_start_ns", "sched_start_ns", "dispatch_end_ns", "update_end_ns")
_WORKER_TIMES: Final = ("exec_start_ns", "exec_end_ns", "sample_end_ns")
_OUTPUT_TIMES: Final = ("engine_ts_ns", "end_ns")


@dataclass(slots=True)
class OpenRequest:
    """A request that a process has said is open."""

    trace_id: bytes
    span_id: bytes
    arrival_ns: int
    seen_ns: int  # the watermark at which it was still open
    seen_s: float


@dataclass(slots=True)
class ProcessState:
    """One process: its outputs and open requests, and the hook's account of itself."""

    process: Process
    outputs: TableHistory[OutputTable]
    first_s: float
    last_s: float
    roles: dict[str, None] = field(default_factory=dict)  # a set in order: one process may have several
    account: dict[str, int] = field(default_factory=dict)
    account_ns: int = 0  # the watermark of that account
    missing: tuple[str, ...] = ()
    worker_rows: int = 0
    mark_ns: int = 0
    outputs_mark_ns: int = 0
    open: dict[bytes, OpenRequest] = field(default_factory=dict)

    @classmethod
    def new(cls, process: Process, limits: Limits, now_s: float) -> ProcessState:
        """A process of which nothing is known yet."""
        history = TableHistory(OutputTable, _OUTPUT_TIMES, limits.max_rows)
        return cls(process, history, now_s, now_s)

    def note(self, window: Window) -> None:
        """Take over role, watermark and account of any window."""
        if window.role in _ROLES:
            self.roles[window.role] = None
        self.mark_ns = max(self.mark_ns, window.watermark_ns)
        if window.watermark_ns >= self.account_ns:
            self.account_ns = window.watermark_ns
            self.account = window.account
            self.missing = window.missing

    def complete_until(self, time_ns: int) -> bool:
        """True if it has sent all outputs up to ``time_ns``."""
        return (self.outputs_mark_ns or self.mark_ns) >= time_ns


def trace_id_of(high: int, low: int) -> bytes:
    """16 bytes of two int64 halves."""
    return np.array([high, low], ">i8").tobytes()


class Bounded(OrderedDict[str, S], Generic[S]):
    """States by uid; the one that was silent longest is forgotten for a new one above ``limit``."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self.forgotten = 0

    def touch(self, uid: str, state: S) -> None:
        """Keep ``state`` as the newest."""
        self[uid] = state
        self.move_to_end(uid)
        while len(self) > self.limit:
            self.popitem(last=False)
            self.forgotten += 1
