"""An engine request's outputs: when the engine had each, and when the API server handled it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stratoscope.instrumentation import semconv as sc

from .pieces import STEPS_MISSING
from .stay import EngineStay
from .tables import Bool, Int64, OutputTable
from .taxonomy import CELL_INDEX

_STAMP_SLACK_NS = 1_000  # engine timestamps travel as float seconds
_SKIP = int(sc.EventKind.SKIPPED)
_OUTPUTS_MISSING = CELL_INDEX["unattributed.outputs_missing"]


@dataclass(frozen=True, slots=True)
class Outputs:
    """One row an output, by step; int64 of shape (n,).

    ``ready_ns`` is the end of the update that produced it, ``start_ns`` and ``end_ns`` when the API
    server processed it. ``missing`` is the unattributed cell that stands for its way to the client
    where a record of it is missing (then both times are ``ready_ns``), else -1.
    """

    step: Int64
    ready_ns: Int64
    start_ns: Int64
    end_ns: Int64
    missing: Int64

    def __len__(self) -> int:
        return len(self.step)

    def take(self, chosen: Bool) -> Outputs:
        """The outputs for which ``chosen`` is true."""
        return Outputs(*(values[chosen] for values in self.arrays))

    @property
    def arrays(self) -> tuple[Int64, ...]:
        """The columns, in the order of the fields."""
        return self.step, self.ready_ns, self.start_ns, self.end_ns, self.missing


def concat(parts: Sequence[Outputs]) -> Outputs:
    """The rows of all parts, one after another."""
    return Outputs(*(np.concatenate(columns) for columns in zip(*(p.arrays for p in parts), strict=True)))


def find_outputs(stay: EngineStay, table: OutputTable) -> Outputs:
    """The outputs of one engine request, from the first output step to the last step.

    Every step in which it took part gives one, except those that skipped it and prompt chunks that
    are not the last of their prefill. A first or last output whose step row was lost is kept, as
    missing, at the end of the step before it.
    """
    line, request = stay.timeline, stay.request
    first = request.first_output_step
    empty = np.zeros(0, np.int64)
    if first < 0:
        return Outputs(empty, empty, empty, empty, empty)
    last = max(request.last_step, first)
    rows = np.arange(line.row_at(first), line.row_at(last + 1))
    steps = line.step[rows]
    gives = line.has_output[rows] & ~stay.absent(steps)
    skips, _ = stay.of_kind(_SKIP)
    if len(skips):
        gives &= ~np.isin(steps, skips)
    part_way = _unfinished_chunks(stay)
    if len(part_way):
        gives &= ~np.isin(steps, part_way)
    rows, steps = rows[gives], steps[gives]
    from_ns, ready = line.update_start_ns[rows], line.update_end_ns[rows]
    found, start, end = table.of_engine(request.engine_index).lookup(
        from_ns - _STAMP_SLACK_NS, ready + _STAMP_SLACK_NS
    )
    start, end = np.where(found, start, ready), np.where(found, end, ready)
    outputs = Outputs(steps, ready, start, end, np.where(found, -1, _OUTPUTS_MISSING))
    if not line.knows(first):
        outputs = concat([_lost(stay, first), outputs])
    if last > first and not line.knows(last) and not len(skips[skips == last]):
        outputs = concat([outputs, _lost(stay, last)])
    return outputs


def _unfinished_chunks(stay: EngineStay) -> Int64:
    """Steps with a prompt chunk that another one follows, before it is preempted again."""
    chunks = stay.chunk_steps
    if len(chunks) < 2:
        return chunks[:0]
    _, back = stay.absences
    residency = back.searchsorted(chunks, "right")
    unfinished: Int64 = chunks[:-1][residency[1:] == residency[:-1]]
    return unfinished


def _lost(stay: EngineStay, step: int) -> Outputs:
    line = stay.timeline
    before = line.row_at(step) - 1
    ready = max(stay.queued_ns, int(line.update_end_ns[before]) if before >= 0 else 0)
    times = np.array([ready], np.int64)
    return Outputs(np.array([step], np.int64), times, times, times, np.array([STEPS_MISSING]))
