"""An engine's time, cut into pieces that say what the engine did.

The rules are in :mod:`.rules`; here they are put together, with what a request needs to look up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .charge import CHARGED_CELLS, split_execution
from .layers import NEVER_NS, flatten, overlay
from .pieces import Pieces
from .rules import (
    EXEC,
    HOST_GAP,
    SAMPLING,
    believable,
    holes,
    host_track,
    in_order,
    ordered_times,
    rank_intervals,
)
from .tables import Bool, Int64, StepTable, WorkerStepTable
from .taxonomy import CELL_INDEX

_SKIPPED = CELL_INDEX["framework.skipped"]
_PIPELINE = CELL_INDEX["framework.wait_pipeline"]


@dataclass(frozen=True)
class Track:
    """Pieces [edges[i], edges[i+1]) with their kind (EXEC or a cell index) and step row (-1: none)."""

    edges: Int64
    kind: Int64
    row: Int64

    @property
    def is_device(self) -> Bool:
        """Which pieces are execution or sampling."""
        device: Bool = (self.kind == EXEC) | (self.kind == SAMPLING)
        return device


@dataclass(frozen=True)
class EngineTimeline:
    """One engine's steps (believable rows only, times in order) and its time cut into pieces.

    ``track`` is the whole rule; ``host`` is the same without rules 1 and 2. Both run without a
    gap from the first schedule or input to the last update. ``hole`` is true for a row whose
    predecessor's number is not one less. Arrays are indexed by row.
    """

    step: Int64
    sched_start_ns: Int64
    sched_end_ns: Int64
    update_start_ns: Int64
    update_end_ns: Int64
    has_output: Bool
    prefill_tokens: Int64
    decode_tokens: Int64
    wait_reason: Int64
    hole: Bool
    track: Track
    host: Track
    device_start_ns: Int64
    device_row: Int64

    def __len__(self) -> int:
        return len(self.step)

    def row_at(self, step: int) -> int:
        """The row of ``step``, or of the next known step; ``len(self)`` if there is none."""
        return int(self.step.searchsorted(step))

    def knows(self, step: int) -> bool:
        """True if the step has a row."""
        row = self.row_at(step)
        return row < len(self) and int(self.step[row]) == step

    @cached_property
    def decoding(self) -> Pieces:
        """The whole track as it is for a request that only decodes, in every step of it."""
        track, nobody = self.track, np.zeros(len(self.track.kind), np.bool_)
        return charge_track(self, track.edges, track.kind, track.row, nobody, nobody)

    @cached_property
    def hosting(self) -> Pieces:
        """The host track as pieces."""
        track = self.host
        return Pieces(track.edges, track.kind, self.steps_of(track.row), np.zeros_like(track.row))

    def decoding_from(self, step: int) -> int:
        """When the workers are done with ``step`` and all before it; NEVER_NS if they never are."""
        row = int(self.step.searchsorted(step, "right")) - 1
        index = int(self._settled_row.searchsorted(row, "right"))
        return int(self.device_start_ns[index]) if index < len(self.device_start_ns) else NEVER_NS

    @cached_property
    def _settled_row(self) -> Int64:
        """For each device piece: the smallest row from there on."""
        return np.minimum.accumulate(self.track.row[self.track.is_device][::-1])[::-1]

    def steps_of(self, row: Int64) -> Int64:
        """Step numbers of rows; -1 stays -1."""
        return self._padded_step[row]

    def sched_end_at(self, steps: Int64) -> Int64:
        """End of schedule() of each step (or the next known one); NEVER_NS beyond the last."""
        return self._padded_sched_end[self.step.searchsorted(steps)]

    def device_after(self, steps: Int64) -> Int64:
        """When the workers turn to a step later than each of ``steps``; NEVER_NS if they do not."""
        last_row = self.step.searchsorted(steps, "right") - 1
        return self._padded_device_start[self.device_row.searchsorted(last_row, "right")]

    # Padded once, so that a look-up costs nothing that grows with the window.

    @cached_property
    def _padded_step(self) -> Int64:
        return np.append(self.step, -1)

    @cached_property
    def _padded_sched_end(self) -> Int64:
        return np.append(self.sched_end_ns, NEVER_NS)

    @cached_property
    def _padded_device_start(self) -> Int64:
        return np.append(self.device_start_ns, NEVER_NS)

    @classmethod
    def build(cls, steps: StepTable, workers: Mapping[int, WorkerStepTable]) -> EngineTimeline:
        """Build from one engine's steps and the executions of all its ranks (by rank).

        Rows whose own times contradict each other by more than a millisecond, or which stand out
        of their neighbours' order, are left out: their time then shows as missing.
        """
        rows = steps.where(believable(steps))
        rows = rows.where(in_order(rows["sched_start_ns"]))
        rows = rows.where(in_order(rows["update_end_ns"]))
        times = ordered_times(rows)
        executions = [rank_intervals(rows, times, table) for table in workers.values()]
        host = host_track(rows, times, executions)
        track = overlay(
            host, [pair[1] for pair in executions], [pair[0] for pair in executions], background=HOST_GAP
        )
        tracks = [Track(*flatten(*layered)) for layered in (track, host)]
        device = tracks[0].is_device
        step = rows["step"]
        return cls(
            step=step,
            sched_start_ns=times["sched_start_ns"],
            sched_end_ns=times["sched_end_ns"],
            update_start_ns=times["update_start_ns"],
            update_end_ns=times["update_end_ns"],
            has_output=rows["update_end_ns"] > 0,
            prefill_tokens=rows["prefill_tokens"],
            decode_tokens=rows["decode_tokens"],
            wait_reason=rows["wait_reason"],
            hole=holes(step),
            track=tracks[0],
            host=tracks[1],
            device_start_ns=tracks[0].edges[:-1][device],
            device_row=np.maximum.accumulate(tracks[0].row[device]),
        )


def charge_track(
    line: EngineTimeline,
    edges: Int64,
    kind: Int64,
    row: Int64,
    skipped: Bool,
    stranger: Bool,
    own: tuple[Int64, Int64] | None = None,
) -> Pieces:
    """Pieces of a track with execution divided among its causes, as consecutive pieces, so that
    clipping stays exact.

    ``skipped`` and ``stranger`` mark execution and sampling of steps that ran without the request,
    as one of the batch or not; ``own`` has its prompt and recomputed tokens for each piece.
    """
    lengths = edges[1:] - edges[:-1]
    works = (kind == EXEC) & ~skipped & ~stranger
    parts = np.zeros((len(kind), len(CHARGED_CELLS)), np.int64)
    parts[:, -1] = lengths
    rows = row[works]
    prompt, again = (values[works] for values in own) if own is not None else (np.zeros_like(rows),) * 2
    parts[works] = split_execution(
        lengths[works], line.prefill_tokens[rows], line.decode_tokens[rows], prompt, again
    )
    cell = np.empty(parts.shape, np.int64)
    cell[:] = CHARGED_CELLS
    cell[~works, -1] = kind[~works]
    cell[stranger, -1] = _PIPELINE
    cell[skipped, -1] = _SKIPPED
    piece, part = np.nonzero(parts)
    reached = np.cumsum(parts[piece, part])
    return Pieces(
        np.concatenate((edges[:1], edges[0] + reached)),
        cell[piece, part],
        line.steps_of(row)[piece],
        np.zeros(len(piece), np.int64),
    )


def empty_timeline() -> EngineTimeline:
    """The timeline of an engine of which nothing is known."""
    return EngineTimeline.build(StepTable.empty(), {})
