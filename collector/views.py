"""The JSON documents, the same from the API, the demo and the offline analysis (``docs/api.md``).

``source`` is an :class:`~stratoscope.collector.attributor.Attributor`, or the attribution processor,
which has the same methods.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, Final, Protocol

import numpy as np

from stratoscope.attribution.attribute import E2E, ITL, TTFT, Attributed
from stratoscope.attribution.matrix import conservation, label_matrix, quantile_ns
from stratoscope.attribution.matrix import matrix as matrix_rows
from stratoscope.attribution.tables import Int64
from stratoscope.attribution.taxonomy import CELLS, PHASES
from stratoscope.attribution.waterfall import waterfall
from stratoscope.instrumentation import semconv as sc

from .attributor import Attributor
from .explain import explain
from .store import BUCKET_EDGES_NS, N_BUCKETS, RequestStore, Row, attributed

SCHEMA: Final = "stratoscope/1"
_SLOWEST = 10
_TOP_CAUSES = 5
_OUTCOMES = (sc.Outcome.OK, sc.Outcome.ABORTED, sc.Outcome.ERROR, sc.Outcome.UNFINISHED)
Document = dict[str, Any]


class Source(Protocol):
    """What has an attributor: the attribution processor."""

    @property
    def attributor(self) -> Attributor:
        """The object that holds the requests."""


def _of(source: Attributor | Source) -> Attributor:
    return source if isinstance(source, Attributor) else source.attributor


def _since_ns(window_s: float | None) -> int:
    return 0 if window_s is None else time.time_ns() - int(window_s * 1e9)


def summary(source: Attributor | Source, window_s: float | None = None, model: str | None = None) -> Document:
    """Everything at a glance; ``window_s`` None means all that is stored in detail."""
    core = _of(source)
    with core.lock:
        rows = core.store.rows(_since_ns(window_s), model)
        table = attributed(rows)
        kept = conservation(table)
        slowest = sorted(rows, key=lambda row: -int(row.latency_ns[E2E]))[:_SLOWEST]
        return {
            "schema": SCHEMA,
            "requests": len(rows),
            "outcomes": _outcomes(rows),
            "window": _window(rows, window_s),
            "latency": _latency(table, rows),
            "conservation": {
                "max_abs_residual_ns": kept.max_abs_residual_ns,
                "unattributed_share_mean": kept.unattributed_share_mean,
                "unattributed_share_p99": kept.unattributed_share_p99,
            },
            "matrix": [_matrix_row(row) for row in matrix_rows(table, core.options.bands)],
            "labels": [
                {"phase": r.phase, "band": r.band, "layer": r.layer, "label": r.label, "seconds": r.seconds}
                for r in label_matrix(table, core.options.bands)
            ],
            "slowest": [_request_row(row) for row in slowest],
            "hook": _hook(core.hook_status()),
            "versions": dict(core.versions),
            "engines": core.engines(),
        }


def matrix(
    source: Attributor | Source,
    window_s: float | None = None,
    model: str | None = None,
    phase: str | None = None,
) -> Document:
    """The attribution matrix. A window beyond what is kept in detail comes from the per-minute sums,
    with latency buckets as bands: ``approximate`` is true then, since minutes are not cut. The sums know
    no models: with ``model`` only what is kept in detail is counted, and ``approximate`` says so."""
    core = _of(source)
    with core.lock:
        since_ns = _since_ns(window_s)
        covered = core.store.covers_since_wall_ns()
        approximate = window_s is not None and bool(covered) and since_ns < covered
        if approximate and model is None:
            found = _history(core.store, since_ns)
            requests = sum(count for _, _, count, _, _ in core.store.minutes(since_ns))
        else:
            rows = core.store.rows(since_ns, model)
            found = [_matrix_row(row) for row in matrix_rows(attributed(rows), core.options.bands)]
            requests = len(rows)
    wanted = [row for row in found if phase is None or row["phase"] == phase]
    return {"schema": SCHEMA, "requests": requests, "approximate": approximate, "matrix": wanted}


def requests(
    source: Attributor | Source,
    sort: str = "slowest",
    limit: int = 20,
    offset: int = 0,
    outcome: str | None = None,
    model: str | None = None,
) -> Document:
    """A page of the stored requests, ``slowest`` or ``recent`` first."""
    core = _of(source)
    with core.lock:
        rows = core.store.rows(0, model, outcome)
    if sort == "slowest":
        rows.sort(key=lambda row: -int(row.latency_ns[E2E]))
    else:
        rows.reverse()
    page = [_request_row(row) for row in rows[offset : offset + limit]]
    return {"schema": SCHEMA, "total": len(rows), "requests": page}


def request(source: Attributor | Source, trace_id: str) -> Document | None:
    """One request in full, or ``None`` if it is not stored."""
    core = _of(source)
    with core.lock:
        row = core.store.find(trace_id)
        if row is None:
            return None
        finished = row.finished
        near = core.neighbours(finished) if finished is not None else []
    lines: list[Document] = []
    if finished is not None:
        origin = finished.segmented.arrival_ns
        for line in waterfall(finished.segmented):
            layer, cause = line.cell.split(".", 1)
            lines.append(
                {
                    "start_ms": (line.start_ns - origin) / 1e6,
                    "duration_ms": line.duration_ns / 1e6,
                    "group": line.group,
                    "layer": layer,
                    "cause": cause,
                    "steps": line.steps,
                    "note": ", ".join(line.reasons),
                }
            )
    neighbours = [
        {"trace_id": n.trace_id, "seconds": n.duration_ns / 1e9, "tokens": n.tokens, "mechanism": n.mechanism}
        for n in near
    ]
    phases = {
        phase: {"seconds": int(row.latency_ns[at]) / 1e9, "causes": causes(row.cells_ns[at])}
        for at, phase in enumerate(PHASES)
    }
    return {
        "schema": SCHEMA,
        "trace_id": row.trace_id,
        "attributes": {
            **row.attributes,
            "e2e_ms": int(row.latency_ns[E2E]) / 1e6,
            "ttft_ms": int(row.latency_ns[TTFT]) / 1e6,
            "end_unix_s": row.end_wall_ns / 1e9,
        },
        "phases": phases,
        "waterfall": lines,
        "neighbours": neighbours,
        "explanation": explain(row.attributes, phases, neighbours),
    }


def causes(cells_ns: Int64, limit: int | None = None) -> list[Document]:
    """The causes with time in them, the largest first, with their share of the sum."""
    total = int(cells_ns.sum())
    order = np.argsort(-cells_ns, kind="stable")
    found = [
        {
            "layer": CELLS[index].layer,
            "cause": CELLS[index].cause,
            "seconds": int(cells_ns[index]) / 1e9,
            "share": int(cells_ns[index]) / total,
        }
        for index in order.tolist()
        if cells_ns[index] > 0
    ]
    return found[:limit]


def _request_row(row: Row) -> Document:
    keys = (
        "outcome", "model", "route", "streaming", "input_tokens", "cached_tokens", "output_tokens",
        "preemptions", "finish_reason", "lora", "choices",
    )  # fmt: skip
    return {
        "trace_id": row.trace_id,
        "end_unix_s": row.end_wall_ns / 1e9,
        "e2e_ms": int(row.latency_ns[E2E]) / 1e6,
        "ttft_ms": int(row.latency_ns[TTFT]) / 1e6,
        **{name: row.attributes.get(name) for name in keys},
        "top_causes": causes(row.cells_ns[E2E], _TOP_CAUSES),
    }


def _matrix_row(row: Any) -> Document:
    return {
        "phase": row.phase, "band": row.band, "layer": row.layer, "cause": row.cause, "seconds": row.seconds,
        "share": row.share, "requests": row.requests,
    }  # fmt: skip


def _outcomes(rows: Iterable[Row]) -> dict[str, int]:
    counts = dict.fromkeys(_OUTCOMES, 0)
    for row in rows:
        outcome = str(row.attributes.get("outcome"))
        counts[outcome] = counts.get(outcome, 0) + 1
    return counts


def _window(rows: list[Row], window_s: float | None) -> Document:
    ends = [row.end_wall_ns for row in rows]
    return {
        "seconds": window_s,
        "from_unix_s": min(ends) / 1e9 if ends else None,
        "to_unix_s": max(ends) / 1e9 if ends else None,
    }


def _latency(table: Attributed, rows: list[Row]) -> Document:
    """Percentiles over requests; of ITL, each request counts with the mean gap between its flushes."""
    gaps = np.array([int(row.attributes.get("itl_gaps", 0)) for row in rows], np.int64)
    found: Document = {}
    for name, at in (("ttft", TTFT), ("itl", ITL), ("e2e", E2E)):
        values = table.latency_ns[:, at]
        if name == "itl":
            values = values[gaps > 0] // gaps[gaps > 0]  # requests that stream more than one token
        found[name] = {"count": len(values), "mean_ms": None, "p50_ms": None, "p90_ms": None, "p99_ms": None}
        if len(values):
            found[name]["mean_ms"] = float(values.mean()) / 1e6
            for percent in (50, 90, 99):
                found[name][f"p{percent}_ms"] = quantile_ns(values, percent) / 1e6
    return found


def _history(store: RequestStore, since_ns: int) -> list[Document]:
    cells = np.zeros((N_BUCKETS, len(PHASES), len(CELLS)), np.int64)
    counts = np.zeros(N_BUCKETS, np.int64)
    for _, bucket, number, minute_cells, _ in store.minutes(since_ns):
        cells[bucket] += minute_cells
        counts[bucket] += number
    found = []
    for bucket in np.flatnonzero(counts).tolist():
        low = BUCKET_EDGES_NS[bucket] // 1_000_000
        band = (
            f"{low}-{BUCKET_EDGES_NS[bucket + 1] // 1_000_000} ms" if bucket + 1 < N_BUCKETS else f">{low} ms"
        )
        for at, phase in enumerate(PHASES):
            for cause in causes(cells[bucket, at]):
                found.append({"phase": phase, "band": band, **cause, "requests": int(counts[bucket])})
    return found


def _hook(processes: list[Document]) -> Document:
    """The hook's account over all processes. A step's critical path runs through the engine core and
    one worker rank, so the ranks' time is averaged and added."""

    def total(name: str, *roles: str) -> int:
        return sum(int(p.get(name, 0)) for p in processes if not roles or p["role"] in roles)

    steps = total("steps")
    workers = [p for p in processes if p["role"] == "worker"]
    core_ns = total("critical_ns", "engine_core")
    worker_ns = total("critical_ns", "worker") / max(len(workers), 1)
    served = total("requests", "api_server") or total("requests")
    return {
        "us_per_step": (core_ns + worker_ns) / steps / 1e3 if steps else None,
        "us_per_step_core": core_ns / steps / 1e3 if steps else None,
        "us_per_step_worker": worker_ns / steps / 1e3 if steps else None,
        "us_per_step_overlapped": total("overlapped_ns") / steps / 1e3 if steps else None,
        "us_per_request": total("request_ns") / served / 1e3 if served else None,
        "dropped": total("dropped"),
        "errors": total("errors"),
        "steps": steps,
        "requests": served,
        "processes": processes,
    }
