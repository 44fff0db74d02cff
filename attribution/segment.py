"""One request's latency, cut into segments that sum to it exactly.

The method:

1. *Admission.* The API server's own times up to submit, then the way into the engine's queue.
2. *Waiting.* From the queue to the schedule() that took it, by each schedule()'s wait reason.
3. *Running.* The engine's pieces, relabelled for this request, until the output that counts was
   ready: the first one for TTFT, the last one for decode.
4. *Output path.* Response IPC, output processing, waiting for the event loop, the flush.
5. *Phases.* TTFT ends where the flush of the first token ends (not streaming: where its output was
   processed). Decode starts there. What is cut is the one interval [arrival, end]; the two phases
   share the border, so their sums are the whole.

Several engine requests (``n > 1``): TTFT follows the one with the earliest first output, decode
the one with the latest last output; time before that one reached the engine follows those before it.
Missing or contradictory records end as ``unattributed`` segments, never as negative time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from stratoscope.instrumentation import semconv as sc

from .itl import itl_cells
from .outputs import Outputs, find_outputs
from .pieces import Pieces, join, nothing, one
from .records import EngineRequest, ServerRequest
from .stay import EngineStay
from .stretch import FLUSH, Filler, Stretch, between_flushes
from .tables import Int64, OutputTable, clean_time
from .taxonomy import CELL_INDEX, N_CELLS
from .timeline import EngineTimeline, empty_timeline

_NO_TIMELINE: Final = empty_timeline()
_NO_OUTPUTS: Final = OutputTable.empty()
_C: Final = {name.removeprefix("framework."): index for name, index in CELL_INDEX.items()}
_RECORD_MISSING: Final = CELL_INDEX["unattributed.engine_record_missing"]


@dataclass(frozen=True, slots=True)
class Segmented:
    """A request's segments: contiguous, in order, from ``arrival_ns`` to ``end_ns``.

    Arrays of one length: ``starts``, ``ends`` (ns), ``cell`` (index into taxonomy.CELLS), ``step``
    (-1: none), ``engine`` (index into ``request.engines``; -1: none), ``reason`` (WaitReason of
    waiting and skipped time). The first ``n_ttft`` segments are TTFT, the rest decode.
    ``itl_cells`` (ns, shape (N_CELLS,)) covers the token flushes from ``itl_from_ns`` to ``itl_to_ns``.
    """

    request: ServerRequest
    arrival_ns: int
    first_token_ns: int
    end_ns: int
    starts: Int64
    ends: Int64
    cell: Int64
    step: Int64
    engine: Int64
    reason: Int64
    n_ttft: int
    itl_cells: Int64
    itl_from_ns: int = 0
    itl_to_ns: int = 0


def segment_request(
    request: ServerRequest,
    timelines: Mapping[str, EngineTimeline],
    outputs: Mapping[str, OutputTable],
) -> Segmented:
    """Cut one request. ``timelines`` by engine uid, ``outputs`` by API server process uid.

    Never raises for bad times, steps or events.
    """
    return _Cutter(request, timelines, outputs).cut()


class _Cutter:
    def __init__(
        self,
        request: ServerRequest,
        timelines: Mapping[str, EngineTimeline],
        outputs: Mapping[str, OutputTable],
    ) -> None:
        self.request = request
        self.arrival, self.end = request.span_ns
        starts, ends = request.clean_flushes()
        self.flush_starts = np.clip(starts, self.arrival, self.end)
        self.flush_ends = np.clip(ends, self.arrival, self.end)
        self.finished = request.outcome == sc.Outcome.OK
        self.stays = [EngineStay(r, timelines.get(r.engine_uid, _NO_TIMELINE)) for r in request.engines]
        table = outputs.get(request.process_uid, _NO_OUTPUTS)
        limit = self.end
        if self.finished and len(starts) and not request.flushes_dropped:
            limit = int(self.flush_starts[-1])  # a stop string ends it before the engine does
        self.outputs = [self._relevant(find_outputs(stay, table), limit) for stay in self.stays]
        self.visits: list[tuple[int, int, int]] = []  # start, end, index of the engine request

    @staticmethod
    def _relevant(found: Outputs, limit_ns: int) -> Outputs:
        early = found.start_ns <= limit_ns
        return found if early.all() else found.take(early)

    def cut(self) -> Segmented:
        with_output = [index for index, found in enumerate(self.outputs) if len(found)]
        if not self.stays:
            return self._result(self._without_engine(), nothing(self.end), self.end)
        if not with_output:
            return self._result(self._without_output(), nothing(self.end), self.end)
        first = min(with_output, key=lambda i: int(self.outputs[i].ready_ns[0]))
        last = max(with_output, key=lambda i: int(self.outputs[i].ready_ns[-1]))
        flush = self._flush_from(int(self.outputs[first].start_ns[0]))
        if not self.request.streaming:
            first_token = int(self.outputs[first].end_ns[0])
        else:
            first_token = self.end if flush is None else int(self.flush_ends[flush])
        first_token = min(max(first_token, self.arrival), self.end)
        ttft = self._ttft(first, flush, first_token)
        decode = self._decode(last, first_token) if first_token < self.end else nothing(self.end)
        result = self._result(ttft, decode, first_token)
        return self._with_itl(result, flush, last)

    # --- TTFT ---------------------------------------------------------------------------------------

    def _admission(self, stretch: Stretch, engine: EngineRequest | None) -> None:
        r = self.request
        stretch.to(clean_time(r.body_ns), _C["receive"])
        template = clean_time(r.template_start_ns) and clean_time(r.template_end_ns)
        if template:
            stretch.to(r.template_start_ns, _C["handler"])
            stretch.to(r.template_end_ns, _C["template"])
        tokenize = clean_time(r.tokenize_start_ns) and clean_time(r.tokenize_end_ns)
        if tokenize:
            stretch.to(r.tokenize_start_ns, _C["handler"], soft=bool(template))
            stretch.to(r.tokenize_end_ns, _C["tokenize"])
        stretch.to(clean_time(r.submit_ns), _C["preprocess" if tokenize else "handler"])
        if engine is not None:
            stretch.to(clean_time(engine.core_received_ns), _C["ipc_request"])
            stretch.to(clean_time(engine.core_preprocessed_ns), _C["core_preprocess"])
            stretch.to(clean_time(engine.queued_ns), _C["core_input_queue"])

    def _ttft(self, index: int, flush: int | None, first_token_ns: int) -> Pieces:
        stay, found = self.stays[index], self.outputs[index]
        stretch = Stretch(self.arrival, first_token_ns, self.finished or first_token_ns < self.end)
        self._admission(stretch, stay.request)
        stretch.to(int(found.ready_ns[0]), lambda a, b: self._visit(index, a, b, int(found.step[0])))
        wait = self._path(stretch, found, 0, flush)
        if flush is None or not self.request.streaming:
            return stretch.rest(wait)
        return stretch.rest(FLUSH)

    def _without_output(self) -> Pieces:
        """No token came out: admission, then the engine until it let go of the request."""
        index = max(range(len(self.stays)), key=lambda i: clean_time(self.stays[i].request.finished_ns))
        stay = self.stays[index]
        engine = stay.request
        stretch = Stretch(self.arrival, self.end, closed=False)
        self._admission(stretch, engine)
        until = clean_time(engine.finished_ns) or self.end
        stretch.to(until, lambda a, b: self._visit(index, a, b, stay.last_step))
        return stretch.rest(self._writing(_C["respond"]))

    def _without_engine(self) -> Pieces:
        """No engine record: never submitted (rejected), or the record was lost."""
        stretch = Stretch(self.arrival, self.end, closed=False)
        submitted = clean_time(self.request.submit_ns) > 0 or self.request.n_engine_requests > 0
        self._admission(stretch, None)
        if submitted:
            return stretch.rest(self._writing(_RECORD_MISSING))
        first_flush = int(self.flush_starts[0]) if len(self.flush_starts) else self.end
        stretch.to(first_flush, _C["handler"])
        return stretch.rest(self._writing(_C["respond"]))

    # --- decode -------------------------------------------------------------------------------------

    def _decode(self, index: int, first_token_ns: int) -> Pieces:
        stay, found = self.stays[index], self.outputs[index]
        stretch = Stretch(first_token_ns, self.end, self.finished)
        ready = int(found.ready_ns[-1])
        let_go = clean_time(stay.request.finished_ns) or self.end
        if not self.finished and let_go > ready:  # aborted while the engine still worked on it
            stretch.to(let_go, lambda a, b: self._visits(index, a, b, stay.last_step))
            return stretch.rest(self._writing(_C["respond"]))
        stretch.to(ready, lambda a, b: self._visits(index, a, b, int(found.step[-1])))
        flush = self._flush_from(int(found.start_ns[-1]))
        wait = self._path(stretch, found, len(found) - 1, flush)
        if flush is None:
            return stretch.rest(wait)
        stretch.to(int(self.flush_ends[flush]), FLUSH)
        return stretch.rest(self._writing(_C["respond"]))

    def _path(self, stretch: Stretch, found: Outputs, row: int, flush: int | None) -> int:
        """The output path up to the start of the flush; returns the label of waiting for a flush."""
        wait = _C["stream_wait" if self.request.streaming else "respond"]
        if len(self.stays) < self.request.n_engine_requests and row:
            wait = _RECORD_MISSING  # the output that came last may be one of the lost record's
        missing = int(found.missing[row])
        if missing >= 0:
            wait = missing
        else:
            stretch.to(int(found.start_ns[row]), _C["ipc_response"])
            stretch.to(int(found.end_ns[row]), _C["output_processing"])
        if flush is not None:
            # Handling a batch in slices lets the event loop flush before the last slice is done.
            stretch.to(int(self.flush_starts[flush]), self._writing(wait), soft=True)
        return wait

    # --- parts --------------------------------------------------------------------------------------

    def _writing(self, otherwise: int) -> Filler:
        return between_flushes(self.flush_starts, self.flush_ends, otherwise)

    def _flush_from(self, time_ns: int) -> int | None:
        """Index of the first flush that began at ``time_ns`` or later."""
        index = int(self.flush_starts.searchsorted(time_ns, "left"))
        return index if index < len(self.flush_starts) else None

    def _visit(self, index: int, start_ns: int, end_ns: int, last_step: int | None = None) -> Pieces:
        self.visits.append((start_ns, end_ns, index))
        return self.stays[index].segments(start_ns, end_ns, last_step)

    def _visits(self, index: int, start_ns: int, end_ns: int, last_step: int | None) -> Pieces:
        """Backwards from the last output: what came before this engine request reached its engine."""
        parts = []
        while True:
            reached = clean_time(self.stays[index].request.core_received_ns)
            start = min(max(reached, start_ns), end_ns) if len(self.stays) > 1 else start_ns
            parts.append(self._visit(index, start, end_ns, last_step))
            if start <= start_ns:
                break
            before = self._before(reached)
            if before is None:
                parts.append(one(start_ns, start, _C["handler"]))
                break
            index, last_step = before, int(self.outputs[before].step[-1])
            end_ns = min(max(int(self.outputs[before].ready_ns[-1]), start_ns), start)
            parts.append(one(end_ns, start, _C["handler"]))
        return join(parts[::-1])

    def _before(self, reached_ns: int) -> int | None:
        """The engine request that reached its engine before and gave the latest output."""
        earlier = [
            i
            for i, stay in enumerate(self.stays)
            if len(self.outputs[i]) and clean_time(stay.request.core_received_ns) < reached_ns
        ]
        return max(earlier, key=lambda i: min(int(self.outputs[i].ready_ns[-1]), reached_ns), default=None)

    # --- results ------------------------------------------------------------------------------------

    def _result(self, ttft: Pieces, decode: Pieces, first_token_ns: int) -> Segmented:
        whole = join([ttft, decode])
        starts = whole.edges[:-1] if len(whole.cell) else whole.edges[:0]
        return Segmented(
            request=self.request,
            arrival_ns=self.arrival,
            first_token_ns=first_token_ns,
            end_ns=self.end,
            starts=starts,
            ends=whole.edges[1:],
            cell=whole.cell,
            step=whole.step,
            engine=self._engine_of(starts),
            reason=whole.reason,
            n_ttft=len(ttft.cell),
            itl_cells=np.zeros(N_CELLS, np.int64),
        )

    def _engine_of(self, starts: Int64) -> Int64:
        engine = np.full(len(starts), -1, np.int64)
        for start, end, index in self.visits:
            low, high = starts.searchsorted((start, end), "left").tolist()
            engine[low:high] = index
        return engine

    def _with_itl(self, result: Segmented, flush: int | None, last: int) -> Segmented:
        if not self.request.streaming or flush is None:
            return result
        until = self._flush_from(int(self.outputs[last].start_ns[-1]))
        until = len(self.flush_starts) - 1 if until is None else until
        starts, ends = self.flush_starts[flush : until + 1], self.flush_ends[flush : until + 1]
        if len(ends) < 2:
            return result
        cells = itl_cells(starts, ends, self.stays, self.outputs)
        return replace(result, itl_cells=cells, itl_from_ns=int(ends[0]), itl_to_ns=int(ends[-1]))
