"""One engine request on its engine's timeline: queue, waiting, and every step from the first on."""

from __future__ import annotations

from functools import cached_property
from typing import Final

import numpy as np

from stratoscope.instrumentation import semconv as sc

from . import charge
from .layers import NEVER_NS
from .pieces import STEPS_MISSING, Pieces, clip, cut, fill, join, nothing, one
from .records import EngineRequest
from .rules import EXEC
from .tables import MAX_COUNT, Bool, Int64, clean_time
from .taxonomy import CELL_INDEX
from .timeline import EngineTimeline, charge_track

# Plain ints: an enum member costs a lookup each time.
_PREFILL, _RECOMPUTE = int(sc.EventKind.PREFILL), int(sc.EventKind.RECOMPUTE)
_PREEMPT, _RESUME = int(sc.EventKind.PREEMPTED), int(sc.EventKind.RESUMED)
_SKIP, _BLOCK = int(sc.EventKind.SKIPPED), int(sc.EventKind.BLOCKED)
_CORE_PREPROCESS = CELL_INDEX["framework.core_preprocess"]
_CORE_INPUT_QUEUE = CELL_INDEX["framework.core_input_queue"]
_STEP_BOUNDARY = CELL_INDEX["framework.wait_step_boundary"]
_SKIPPED = CELL_INDEX["framework.skipped"]
_PREEMPTED = CELL_INDEX["model.preempted"]

WAIT_CELLS: Final = np.full(max(sc.WaitReason) + 1, CELL_INDEX["framework.wait_other"], np.int64)
"""Cell of each WaitReason; NONE is ``wait_other``: it waits, and the scheduler shows no reason."""
for _reason, _cause in (
    (sc.WaitReason.SLOTS, "wait_slots"),
    (sc.WaitReason.TOKEN_BUDGET, "wait_token_budget"),
    (sc.WaitReason.KV_BLOCKS, "wait_kv_blocks"),
    (sc.WaitReason.PREEMPTION, "wait_kv_blocks"),
    (sc.WaitReason.KV_TRANSFER, "wait_kv_transfer"),
    (sc.WaitReason.ADAPTER, "wait_adapter"),
    (sc.WaitReason.GRAMMAR, "wait_grammar"),
    (sc.WaitReason.PAUSED, "wait_paused"),
):
    WAIT_CELLS[_reason] = CELL_INDEX[f"framework.{_cause}"]


class EngineStay:
    """An engine request's events, sorted and checked once, and cuts of its time at the engine."""

    def __init__(self, request: EngineRequest, timeline: EngineTimeline) -> None:
        self.request = request
        self.timeline = timeline
        events = np.asarray(request.events, np.int64).reshape(-1, 3)
        if len(events) > 1 and (events[1:, 0] < events[:-1, 0]).any():
            events = events[np.argsort(events[:, 0], kind="stable")]
        self._step, self._kind, self._value = events[:, 0], events[:, 1], events[:, 2]
        self.first_step = request.first_step
        self.queued_ns = clean_time(request.queued_ns)
        self.run_ns = NEVER_NS  # end of the schedule() that first took it
        if self.first_step >= 0:
            row = timeline.row_at(self.first_step)
            if row < len(timeline):
                self.run_ns = int(timeline.sched_end_ns[row])
        self._cached: tuple[int, int, Pieces] | None = None

    def of_kind(self, kind: int) -> tuple[Int64, Int64]:
        """(steps, values) of the events of one kind, by step."""
        if not len(self._kind):
            return self._step, self._value
        chosen = self._kind == kind
        return self._step[chosen], self._value[chosen]

    # --- membership ---------------------------------------------------------------------------------

    @cached_property
    def absences(self) -> tuple[Int64, Int64]:
        """Preemptions as step ranges [out, back); back is MAX for one that never ended."""
        out, back, away = [], [], False
        moves = (self._kind == _PREEMPT) | (self._kind == _RESUME)
        for step, kind in zip(self._step[moves].tolist(), self._kind[moves].tolist(), strict=True):
            if kind == _PREEMPT and not away:
                out.append(step)
            elif kind == _RESUME and away:
                back.append(step)
            else:
                continue
            away = not away
        if away:
            back.append(NEVER_NS)
        return np.array(out, np.int64), np.array(back, np.int64)

    def absent(self, steps: Int64) -> Bool:
        """Which of ``steps`` fall into a preemption."""
        out, back = self.absences
        if not len(out):
            return np.zeros(len(steps), np.bool_)
        index = out.searchsorted(steps, "right") - 1
        return (index >= 0) & (steps < back[index])

    @cached_property
    def chunk_steps(self) -> Int64:
        """Steps with prompt or recomputed tokens of its own, sorted, each once."""
        return np.unique(self._step[(self._kind == _PREFILL) | (self._kind == _RECOMPUTE)])

    def own_tokens(self, steps: Int64, kind: int) -> Int64:
        """Its own tokens of one kind (PREFILL or RECOMPUTE) in each of ``steps``."""
        at, values = self.of_kind(kind)
        return _value_at(at, np.minimum(np.maximum(values, 0), MAX_COUNT), steps)

    @property
    def last_step(self) -> int | None:
        """The last step that it took part in; None if it ended while preempted or never ran."""
        still_away = len(self.absences[1]) > 0 and self.absences[1][-1] == NEVER_NS
        return None if still_away or self.request.last_step < 0 else self.request.last_step

    # --- cuts -----------------------------------------------------------------------------------------

    def segments(self, start_ns: int, end_ns: int, last_step: int | None = None) -> Pieces:
        """Exactly [start_ns, end_ns) as pieces.

        With ``last_step``, time in which the workers already execute later steps is labelled by
        what the core's thread does: an output of ``last_step`` does not wait for those.
        """
        if end_ns <= start_ns:
            return nothing(start_ns)
        turn = end_ns
        if last_step is not None:
            turn = int(self.timeline.device_after(np.array([last_step]))[0])
            turn = min(max(turn, start_ns, self.run_ns), end_ns)
        whole = self._whole(start_ns, end_ns)
        if turn >= end_ns:
            return whole
        return join([clip(whole, start_ns, turn), self.host_segments(turn, end_ns)])

    def _whole(self, start_ns: int, end_ns: int) -> Pieces:
        if self._cached is not None and self._cached[0] <= start_ns and end_ns <= self._cached[1]:
            return fill(self._cached[2], start_ns, end_ns)
        run = min(max(self.run_ns, start_ns), end_ns)
        queued = min(max(self.queued_ns, start_ns), run)
        parts = [self._arriving(start_ns, queued)]
        if run > queued:
            parts.append(fill(self._waiting(), queued, run))
        if end_ns > run:
            parts.append(self._running(run, end_ns))
        pieces = join(parts)
        self._cached = (start_ns, end_ns, pieces)
        return pieces

    def _arriving(self, start_ns: int, end_ns: int) -> Pieces:
        """Before the queue, for a request whose arrival is not part of its server request's admission."""
        middle = min(max(clean_time(self.request.core_preprocessed_ns), start_ns), end_ns)
        return join([one(start_ns, middle, _CORE_PREPROCESS), one(middle, end_ns, _CORE_INPUT_QUEUE)])

    def host_segments(self, start_ns: int, end_ns: int) -> Pieces:
        """Exactly [start_ns, end_ns) by what the core's thread did, whatever the workers execute."""
        return fill(self.timeline.hosting, start_ns, end_ns)

    def _waiting(self) -> Pieces:
        """From the queue to the schedule() that took it, by the reason that each schedule() left."""
        line, request = self.timeline, self.request
        low = int(line.sched_end_ns.searchsorted(self.queued_ns, "right"))
        high = len(line) if self.first_step < 0 else line.row_at(self.first_step)
        if high < low or low >= len(line):
            return nothing(self.queued_ns)
        rows = np.arange(low, min(high + 1, len(line)))
        edges = np.concatenate(([self.queued_ns], line.sched_end_ns[rows]))
        steps = line.step[rows]
        reason = self._wait_reasons(rows)
        cell = np.concatenate(([_STEP_BOUNDARY], WAIT_CELLS[reason[:-1]]))
        if (low == 0 or line.hole[low]) and 0 <= request.arrival_step < steps[0]:
            cell[0] = STEPS_MISSING
        pieces = Pieces(edges, cell, np.concatenate(([-1], steps[:-1])), np.concatenate(([0], reason[:-1])))
        if line.hole[rows[1:]].any():
            pieces = self._with_holes(pieces, rows)
        if high < len(line):
            return pieces
        # Still waiting after the last known step: its reason holds until that step is over.
        end = max(int(line.update_end_ns[-1]), int(edges[-1]))
        return fill(pieces, self.queued_ns, end, int(WAIT_CELLS[reason[-1]]))

    def _with_holes(self, pieces: Pieces, rows: Int64) -> Pieces:
        """A reason is known to hold to the end of its step; the steps after that one were lost."""
        line = self.timeline
        known_until = line.update_end_ns[rows[:-1]]
        pieces = cut(pieces, known_until[line.hole[rows[1:]]])
        index = np.searchsorted(line.sched_end_ns[rows], pieces.edges[:-1], "right") - 1
        lost = (index >= 0) & line.hole[rows[np.minimum(index + 1, len(rows) - 1)]]
        lost &= pieces.edges[:-1] >= known_until[np.minimum(index, len(rows) - 2)]
        return pieces._replace(cell=np.where(lost, STEPS_MISSING, pieces.cell))

    def _wait_reasons(self, rows: Int64) -> Int64:
        """WaitReason that holds after the schedule() of each row: its own, else the queue head's."""
        reason = self.timeline.wait_reason[rows]
        at, own = self.of_kind(_BLOCK)
        if len(at):
            index = at.searchsorted(self.timeline.step[rows], "right") - 1
            held = np.where(index >= 0, own[index], 0)
            reason = np.where(held > 0, held, reason)
        return np.where(reason < len(WAIT_CELLS), reason, int(sc.WaitReason.OTHER))

    def _running(self, start_ns: int, end_ns: int) -> Pieces:
        """From its first schedule on: the engine's pieces, relabelled for this request.

        From where it only decodes they are the same for every request, and cut already."""
        plain = min(max(self._decodes_from_ns, start_ns), end_ns)
        before = self._relabelled(start_ns, plain) if plain > start_ns else nothing(start_ns)
        return join([before, fill(self.timeline.decoding, plain, end_ns)])

    @cached_property
    def _decodes_from_ns(self) -> int:
        if len(self.absences[0]):
            return NEVER_NS
        skips, _ = self.of_kind(_SKIP)
        special = max([self.first_step - 1, *self.chunk_steps[-1:].tolist(), *skips[-1:].tolist()])
        return self.timeline.decoding_from(special)

    def _relabelled(self, start_ns: int, end_ns: int) -> Pieces:
        line = self.timeline
        edges, kind, row = line.track.edges, line.track.kind, line.track.row
        low = max(int(edges.searchsorted(start_ns, "right")) - 1, 0)
        high = min(int(edges.searchsorted(end_ns, "left")), len(kind))
        if high <= low:
            return fill(nothing(start_ns), start_ns, end_ns)
        kind, row = kind[low:high], row[low:high]
        device = (kind == EXEC) | (kind == charge.SAMPLING_CELL)
        step = line.steps_of(row)
        skips, reasons = self.of_kind(_SKIP)
        skipped = device & np.isin(step, skips) if len(skips) else np.zeros(len(kind), np.bool_)
        stranger = device & ((step < self.first_step) | self.absent(step))
        own = self.own_tokens(step, _PREFILL), self.own_tokens(step, _RECOMPUTE)
        pieces = charge_track(line, edges[low : high + 1], kind, row, skipped, stranger, own)
        if len(skips):
            at = np.minimum(skips.searchsorted(pieces.step), len(skips) - 1)
            pieces = pieces._replace(reason=np.where(pieces.cell == _SKIPPED, reasons[at], 0))
        return self._away(fill(pieces, start_ns, end_ns))

    def _away(self, pieces: Pieces) -> Pieces:
        """Between the schedules that threw it out and took it back: preempted, except for steps in
        which it still took part (they were with the workers already)."""
        out, back = self.absences
        if not len(out):
            return pieces
        line = self.timeline
        gone = line.sched_end_at(out)
        returned = line.sched_end_at(back)
        pieces = cut(pieces, np.concatenate((gone, returned)))
        start = pieces.edges[:-1]
        index = gone.searchsorted(start, "right") - 1
        away = (index >= 0) & (start < returned[index])
        own = np.isin(pieces.cell, _TAKING_PART) & (pieces.step < out[index])
        away &= ~own
        return pieces._replace(cell=np.where(away, _PREEMPTED, pieces.cell))


_TAKING_PART = np.append(charge.CHARGED_CELLS, charge.SAMPLING_CELL)


def _value_at(at: Int64, values: Int64, steps: Int64) -> Int64:
    """Sum of the values of events at each step (0: none); ``at`` is sorted."""
    if not len(at):
        return np.zeros(len(steps), np.int64)
    total = np.concatenate(([0], np.cumsum(values)))
    found: Int64 = total[at.searchsorted(steps, "right")] - total[at.searchsorted(steps, "left")]
    return found
