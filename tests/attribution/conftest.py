"""Hand-made engines: times are given in whole milliseconds, tables are packed as on the wire."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from stratoscope.attribution.attribute import attribute_segmented, cells_of
from stratoscope.attribution.records import EngineRequest, ServerRequest
from stratoscope.attribution.segment import Segmented, segment_request
from stratoscope.attribution.tables import OutputTable, StepTable, WorkerStepTable
from stratoscope.attribution.taxonomy import CELL_NAMES, PHASES
from stratoscope.attribution.timeline import EngineTimeline
from stratoscope.instrumentation import semconv as sc

MS = 1_000_000
Span = tuple[int, int]


def pack(columns: Sequence[str], rows: Sequence[dict[str, int]]) -> bytes:
    return np.array([[row.get(name, 0) for name in columns] for row in rows], "<i8").tobytes()


class Scene:
    """One engine ("e") and one API server process ("p")."""

    def __init__(self) -> None:
        self.steps: list[dict[str, int]] = []
        self.workers: dict[int, list[dict[str, int]]] = {}
        self.rows: list[dict[str, int]] = []

    def step(
        self,
        number: int,
        sched: Span,
        dispatch: int,
        update: Span,
        execs: Sequence[Span] = (),
        samples: Sequence[Span] = (),
        device: Sequence[Span] = (),
        taken: Span = (0, 0),
        **counts: int,
    ) -> None:
        times = {
            "sched_start_ns": sched[0], "sched_end_ns": sched[1], "dispatch_end_ns": dispatch,
            "update_start_ns": update[0], "update_end_ns": update[1],
            "input_start_ns": taken[0], "input_end_ns": taken[1],
        }  # fmt: skip
        self.steps.append({"step": number, **{k: v * MS for k, v in times.items()}, **counts})
        for rank, (start, end) in enumerate(execs):
            row = {"exec_start_ns": start * MS, "exec_end_ns": end * MS}
            if samples:
                row |= {"sample_start_ns": samples[rank][0] * MS, "sample_end_ns": samples[rank][1] * MS}
            if device:
                row |= {"device_start_ns": device[rank][0] * MS, "device_end_ns": device[rank][1] * MS}
            self.workers.setdefault(rank, []).append({"step": number, **row})

    def output(self, stamp: int, start: int, end: int, index: int = 0) -> None:
        self.rows.append(
            {"engine_ts_ns": stamp * MS, "start_ns": start * MS, "end_ns": end * MS, "engine_index": index}
        )

    @property
    def timeline(self) -> EngineTimeline:
        return EngineTimeline.build(
            StepTable.from_rows(sc.STEP_COLUMNS, pack(sc.STEP_COLUMNS, self.steps)),
            {
                rank: WorkerStepTable.from_rows(sc.WORKER_STEP_COLUMNS, pack(sc.WORKER_STEP_COLUMNS, rows))
                for rank, rows in self.workers.items()
            },
        )

    @property
    def outputs(self) -> OutputTable:
        return OutputTable.from_rows(sc.OUTPUT_COLUMNS, pack(sc.OUTPUT_COLUMNS, self.rows))

    def segment(self, request: ServerRequest) -> Segmented:
        return segment_request(request, {"e": self.timeline}, {"p": self.outputs})

    def track(self) -> list[tuple[int, int, str, int]]:
        """The timeline in ms: (start, end, cell or "exec", step)."""
        line = self.timeline
        track = line.track
        names = [*(name.split(".")[1] for name in CELL_NAMES), "exec"]
        return [
            (int(a) // MS, int(b) // MS, names[k], int(line.steps_of(r)))
            for a, b, k, r in zip(track.edges, track.edges[1:], track.kind, track.row, strict=False)
        ]  # fmt: skip


def engine_request(events: Sequence[tuple[int, int, int]] = (), **fields: Any) -> EngineRequest:
    times = {name: value * MS for name, value in fields.items() if name.endswith("_ns")}
    table = np.array(events, np.int64).reshape(-1, 3)
    return EngineRequest("e", events=table, **{**fields, **times})


def server_request(
    engines: Sequence[EngineRequest] = (), flushes: Sequence[Span] = (), streaming: bool = True, **fields: Any
) -> ServerRequest:
    times = {name: value * MS for name, value in fields.items() if name.endswith("_ns")}
    table = np.array(flushes, np.int64).reshape(-1, 2) * MS
    values: dict[str, Any] = {"n_engine_requests": len(engines), **fields, **times}
    return ServerRequest(
        engines=tuple(engines), flushes=table, streaming=streaming, process_uid="p", **values
    )


def milliseconds(segmented: Segmented, phase: str) -> dict[str, float]:
    """Ms by cause of one phase; also checks that nothing is lost in any phase."""
    assert (attribute_segmented([segmented]).residual_ns == 0).all()
    cells = cells_of(segmented)[PHASES.index(phase)]
    return {CELL_NAMES[i].split(".")[1]: cells[i] / MS for i in np.flatnonzero(cells).tolist()}


@pytest.fixture
def scene() -> Scene:
    return Scene()


@pytest.fixture
def engine() -> Callable[..., EngineRequest]:
    """Builds an engine record; times in ms, ``events`` as (step, kind, value)."""
    return engine_request


@pytest.fixture
def server() -> Callable[..., ServerRequest]:
    """Builds a server record; times in ms."""
    return server_request


@pytest.fixture
def spent() -> Callable[[Segmented, str], dict[str, float]]:
    """``spent(segmented, phase)``: ms by cause."""
    return milliseconds
