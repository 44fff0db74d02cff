"""Inter-token latency: the gaps between a streaming request's token flushes, cut into cells."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .outputs import Outputs, concat
from .pieces import sum_cells, sum_windows
from .stay import EngineStay
from .tables import Bool, Int64
from .taxonomy import CELL_INDEX, N_CELLS

_PATH = np.array(
    [CELL_INDEX[f"framework.{c}"] for c in ("ipc_response", "output_processing", "stream_wait", "flush")],
    np.int64,
)


def itl_cells(
    starts_ns: Int64, ends_ns: Int64, stays: Sequence[EngineStay], outputs: Sequence[Outputs]
) -> Int64:
    """Ns of each cell over the gaps [end of flush k-1, end of flush k], int64 of shape (N_CELLS,).

    ``starts_ns`` and ``ends_ns`` are the token flushes, disjoint and in order; ``outputs[i]`` are
    those of ``stays[i]``. The sum is exactly the last flush's end minus the first one's. For each gap:

    1. Take the latest output that the server had begun to process when the flush began.
    2. From the flush before to the moment the engine had that output: the engine's pieces.
    3. From there to the flush's end: response IPC, output processing, stream_wait, flush.
    """
    cells = np.zeros(N_CELLS, np.int64)
    if len(ends_ns) < 2:
        return cells
    before, start, end = ends_ns[:-1], starts_ns[1:], ends_ns[1:]
    merged = concat(outputs)
    owner = np.repeat(np.arange(len(outputs)), [len(found) for found in outputs])
    order = np.lexsort((merged.ready_ns, merged.start_ns))
    chosen = np.searchsorted(merged.start_ns[order], start, "right") - 1
    has = chosen >= 0
    pick = order[np.maximum(chosen, 0)]
    ready = np.clip(merged.ready_ns[pick], before, start)
    ready = np.where(has, ready, before)
    for index, stay in enumerate(stays):
        mine = has & (owner[pick] == index) & (ready > before)
        if mine.any():
            cells += _engine_cells(stay, before[mine], ready[mine], merged.step[pick[mine]])
    return cells + _path_cells(ready, start, end, merged, pick, has)


def _engine_cells(stay: EngineStay, starts_ns: Int64, ends_ns: Int64, steps: Int64) -> Int64:
    turn = np.clip(stay.timeline.device_after(steps), starts_ns, ends_ns)
    whole = stay.segments(int(starts_ns[0]), int(ends_ns[-1]))
    cells = sum_windows(whole, starts_ns, turn)
    if (turn < ends_ns).any():
        cells += sum_windows(stay.host_segments(int(turn[0]), int(ends_ns[-1])), turn, ends_ns)
    return cells


def _path_cells(ready: Int64, start: Int64, end: Int64, merged: Outputs, pick: Int64, has: Bool) -> Int64:
    began = np.clip(merged.start_ns[pick], ready, start)
    ended = np.clip(merged.end_ns[pick], began, start)
    points = np.stack((ready, np.where(has, began, ready), np.where(has, ended, ready), start, end), 1)
    labels = np.broadcast_to(_PATH, (len(ready), 4)).copy()
    missing = merged.missing[pick]
    lost = has & (missing >= 0)
    labels[lost, 2] = missing[lost]
    return sum_cells(labels.ravel(), np.diff(points, axis=1).ravel())
