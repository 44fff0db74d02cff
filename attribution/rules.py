"""What an engine did at any instant: the rules by which its time is cut.

The method, one rule for synchronous and asynchronous scheduling. At any instant:

1. If any worker rank executes a step, it is execution of that step (of the earliest, if several).
   The device's interval extends the host's where CUDA events were recorded.
2. Else, if any rank samples: sampling of that step.
3. Else what the engine core's one thread does: input_processing, schedule, dispatch, update.
4. Else, between the end of a step's dispatch and the start of its update: ``dispatch`` until its
   first rank starts, ``result_ipc`` afterwards; ``workers_missing`` if no rank recorded the step.
5. Else ``steps_missing`` where step numbers have a hole, from the last known update to the next
   known schedule (with batch queue: to the next known step's first execution).
6. Else ``host_gap``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from stratoscope.instrumentation import semconv as sc

from .layers import NEVER_NS, Layer, overlay
from .pieces import CLOCK_SLACK_NS
from .tables import Bool, Int64, StepTable, WorkerStepTable
from .taxonomy import CELL_INDEX

EXEC: Final = -1  # the kind of execution pieces; every other kind is a cell index
SAMPLING: Final = CELL_INDEX["model.sampling"]
_INPUT = CELL_INDEX["framework.input_processing"]
_SCHEDULE = CELL_INDEX["framework.schedule"]
_DISPATCH = CELL_INDEX["framework.dispatch"]
_UPDATE = CELL_INDEX["framework.update"]
_RESULT_IPC = CELL_INDEX["framework.result_ipc"]
HOST_GAP: Final = CELL_INDEX["framework.host_gap"]
_WORKERS_MISSING = CELL_INDEX["unattributed.workers_missing"]
_STEPS_MISSING = CELL_INDEX["unattributed.steps_missing"]


def believable(steps: StepTable) -> Bool:
    start, end = steps["sched_start_ns"], steps["sched_end_ns"]
    dispatch, update = steps["dispatch_end_ns"], steps["update_start_ns"]
    done, slack = steps["update_end_ns"], CLOCK_SLACK_NS
    usable: Bool = (
        (start > 0)
        & (end >= start - slack)
        & ((dispatch == 0) | (dispatch >= end - slack))
        & ((update == 0) == (done == 0))
        & ((update == 0) | (update >= np.maximum(end, dispatch) - slack))
        & (done >= update - slack)
    )
    return usable


def in_order(times_ns: Int64) -> Bool:
    """Which rows to keep so that times grow with the step number (0 = not recorded, always kept).

    Either the rows that lie too late for their followers are wrong, or those that lie too early
    for their predecessors: the smaller group is.
    """
    known = times_ns > 0
    if len(times_ns) < 2:
        return np.ones(len(times_ns), np.bool_)
    low = np.where(known, times_ns, NEVER_NS)
    least_after = np.append(np.minimum.accumulate(low[::-1])[::-1][1:], NEVER_NS)
    most_before = np.concatenate(([0], np.maximum.accumulate(times_ns)[:-1]))
    late = known & (times_ns > least_after + CLOCK_SLACK_NS)
    early = known & (times_ns < most_before - CLOCK_SLACK_NS)
    keep: Bool = ~(late if late.sum() <= early.sum() else early)
    return keep


def ordered_times(rows: StepTable) -> dict[str, Int64]:
    """The step times with small contradictions clamped, within a row and from row to row."""
    names = ("sched_start_ns", "sched_end_ns", "dispatch_end_ns", "update_start_ns", "update_end_ns")
    times = {}
    before = np.zeros(len(rows), np.int64)
    for name in names:
        before = np.maximum(rows[name], before)
        times[name] = np.maximum.accumulate(before) if len(before) else before
    return times


def holes(step: Int64) -> Bool:
    hole = np.zeros(len(step), np.bool_)
    hole[1:] = np.diff(step) != 1
    return hole


def rank_intervals(
    rows: StepTable, times: Mapping[str, Int64], table: WorkerStepTable
) -> tuple[Layer, Layer]:
    """(execution, sampling) of one rank: disjoint, in order, each inside its own step."""
    row = np.searchsorted(rows["step"], table["step"])
    known = row < len(rows)
    known[known] = rows["step"][row[known]] == table["step"][known]
    row, table = row[known], table.where(known)
    earliest = times["sched_start_ns"]
    following = np.append(times["sched_start_ns"][1:], NEVER_NS)
    latest = np.where(rows["update_end_ns"] > 0, times["update_end_ns"], following)[row]
    earliest = earliest[row]
    start, end = table["exec_start_ns"], table["exec_end_ns"]
    device_start, device_end = table["device_start_ns"], table["device_end_ns"]
    device = (device_start > 0) & (device_end >= device_start) & (start > 0)
    start = np.where(device, np.minimum(start, device_start), start)
    end = np.where(device, np.maximum(end, device_end), end)
    return (
        _inside(start, end, row, earliest, latest, EXEC),
        _inside(table["sample_start_ns"], table["sample_end_ns"], row, earliest, latest, SAMPLING),
    )


def _inside(start: Int64, end: Int64, row: Int64, earliest: Int64, latest: Int64, kind: int) -> Layer:
    usable = (start > 0) & (end >= start)
    usable &= (start >= earliest - CLOCK_SLACK_NS) & (end <= latest + CLOCK_SLACK_NS)
    start, end = np.maximum(start, earliest)[usable], np.minimum(end, latest)[usable]
    row = row[usable]
    return Layer(start, end, np.full(len(row), kind, np.int64), row).disjoint()


def host_track(
    rows: StepTable, times: Mapping[str, Int64], executions: list[tuple[Layer, Layer]]
) -> tuple[Int64, Int64, Int64]:
    """Rules 3 to 6: (edges, kind, row), unmerged."""
    count = len(rows)
    index = np.arange(count, dtype=np.int64)
    done = rows["update_end_ns"] > 0
    sched_start, sched_end = times["sched_start_ns"], times["sched_end_ns"]
    dispatch_end, update_start = times["dispatch_end_ns"], times["update_start_ns"]
    first_exec = np.full(count, NEVER_NS, np.int64)
    last_work = np.zeros(count, np.int64)
    for pair in executions:
        for layer in pair:
            np.minimum.at(first_exec, layer.row, layer.start)
            np.maximum.at(last_work, layer.row, layer.end)
    worked = last_work > 0
    flight_end = np.where(done, update_start, np.maximum(last_work, dispatch_end))
    flight = Layer(dispatch_end, flight_end, np.zeros(count, np.int64), index).disjoint(drop_empty=False)
    started = np.clip(first_exec, flight.start, flight.end)
    waiting_kind = np.where(worked, _DISPATCH, _WORKERS_MISSING)
    in_flight = Layer(
        np.stack((flight.start, started), 1).ravel(),
        np.stack((started, flight.end), 1).ravel(),
        np.stack((waiting_kind, np.full(count, _RESULT_IPC)), 1).ravel(),
        np.repeat(index, 2),
    ).disjoint()
    return overlay(
        None,
        [in_flight, _lost_steps(rows, times, first_exec)],
        [_host_phases(rows, sched_start, sched_end, dispatch_end, times, done)],
        background=HOST_GAP,
    )


def _lost_steps(rows: StepTable, times: Mapping[str, Int64], first_exec: Int64) -> Layer:
    """Rule 5: the stretches of time that belong to lost rows."""
    after = np.flatnonzero(holes(rows["step"]))
    until = times["sched_start_ns"][after]
    queued = (rows["flags"][after] & int(sc.StepFlag.BATCH_QUEUE)) > 0
    resumed = np.minimum(first_exec, times["update_start_ns"])[after]
    until = np.where(queued, np.maximum(until, resumed), until)
    kind = np.full(len(after), _STEPS_MISSING, np.int64)
    return Layer(times["update_end_ns"][after - 1], until, kind, np.full(len(after), -1, np.int64)).disjoint()


def _host_phases(
    rows: StepTable,
    sched_start: Int64,
    sched_end: Int64,
    dispatch_end: Int64,
    times: Mapping[str, Int64],
    done: Bool,
) -> Layer:
    """Rule 3: what the core's thread does, by start time."""
    index = np.arange(len(rows), dtype=np.int64)
    input_start, input_end = rows["input_start_ns"], np.minimum(rows["input_end_ns"], sched_start)
    before = np.concatenate(([0], sched_end[:-1])) if len(rows) else sched_end
    took_input = (input_start > 0) & (input_end > input_start) & (input_start >= before - CLOCK_SLACK_NS)
    parts = (
        (np.maximum(input_start, before)[took_input], input_end[took_input], _INPUT, index[took_input]),
        (sched_start, sched_end, _SCHEDULE, index),
        (sched_end, dispatch_end, _DISPATCH, index),
        (times["update_start_ns"][done], times["update_end_ns"][done], _UPDATE, index[done]),
    )
    start = np.concatenate([part[0] for part in parts])
    order = np.argsort(start, kind="stable")
    return Layer(
        start[order],
        np.concatenate([part[1] for part in parts])[order],
        np.concatenate([np.full(len(part[0]), part[2], np.int64) for part in parts])[order],
        np.concatenate([part[3] for part in parts])[order],
    ).disjoint()
