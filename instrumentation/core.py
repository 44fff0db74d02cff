"""Engine core: one row a step, one record a request.

Only timestamps are taken on the engine's critical path. Who is in a step is worked out right
after it was handed to the workers, from what changed since the step before (joins, leaves, prompt
chunks), so its cost does not grow with the batch.
"""

from __future__ import annotations

import collections
from time import monotonic_ns
from typing import Any

from . import semconv as sc
from .core_request import EngineRecord
from .hook import Hook
from .trace_context import TraceContext, new_span_id, new_trace, parse_traceparent
from .wait_reason import head_wait_reason

STEP_ATTRIBUTE = "_stratoscope_step"  # on SchedulerOutput; pickled with it to the workers
HEADER = "stratoscope"  # key in trace_headers that marks a context injected by the hook
_PREFILL, _RECOMPUTE = int(sc.EventKind.PREFILL), int(sc.EventKind.RECOMPUTE)
_PREEMPTED, _RESUMED = int(sc.EventKind.PREEMPTED), int(sc.EventKind.RESUMED)
_SKIPPED, _BLOCKED = int(sc.EventKind.SKIPPED), int(sc.EventKind.BLOCKED)

# A step's row is a plain list from schedule() to update_from_output(): the cheapest thing to fill.
(
    _STEP, _SCHED_START, _SCHED_END, _DISPATCH_END, _UPDATE_START, _UPDATE_END, _INPUT_START, _INPUT_END,
    _N_SCHEDULED, _N_PREFILL, _PREFILL_TOKENS, _DECODE_TOKENS, _CONTEXT_TOKENS, _N_RUNNING, _N_WAITING,
    _KV_USAGE, _WAIT_REASON, _N_PREEMPTED, _FLAGS,
) = range(len(sc.STEP_COLUMNS))  # fmt: skip
_EMPTY_ROW = [0] * len(sc.STEP_COLUMNS)
_IDLE_NS = 500_000_000  # no step for so long: nobody else will send what ended


class CoreRecorder:
    """Records one engine core. All methods but :meth:`received` run on the engine's thread."""

    __slots__ = (
        "account", "arriving", "blocked", "context_tokens", "done", "ended", "flags", "hook", "index",
        "input_end", "input_start", "keep_headers", "members", "model", "pending", "preempted", "prefilling",
        "requests", "sched_end", "sched_start", "scheduler", "step", "uid", "unsent", "window",
    )  # fmt: skip

    def __init__(self, hook: Hook, engine: Any) -> None:
        self.hook = hook
        self.account = hook.account
        self.uid = f"{new_span_id():016x}"
        config = getattr(engine, "vllm_config", None)
        parallel = getattr(config, "parallel_config", None)
        self.index = int(getattr(parallel, "data_parallel_rank", 0) or 0)
        observability = getattr(config, "observability_config", None)
        self.keep_headers = bool(getattr(observability, "otlp_traces_endpoint", None))
        model = getattr(config, "model_config", None)
        self.model = served_name(model)
        self.scheduler: Any = None
        identity = {sc.ROLE: "engine_core", sc.ENGINE_UID: self.uid, sc.ENGINE_INDEX: self.index}
        self.window = hook.window(sc.Record.STEPS, sc.STEP_COLUMNS, identity)
        self.step = -1
        self.sched_start = self.sched_end = 0
        self.pending: collections.deque[list[int]] = collections.deque()  # with the workers
        self.done: collections.deque[list[int]] = collections.deque()  # over, not in the ring yet
        self.arriving: dict[str, tuple[int, int, TraceContext | None]] = {}
        self.requests: dict[str, EngineRecord] = {}
        self.members: dict[str, EngineRecord] = {}  # in the batch: scheduled, not finished, not preempted
        self.prefilling: dict[str, EngineRecord] = {}
        self.blocked: set[str] = set()
        self.ended: list[tuple[str, int, int]] = []  # request id, time ns, last step (-1: not by a step)
        self.unsent: dict[str, EngineRecord] = {}  # ended, not handed to the flush thread yet
        self.preempted: list[tuple[str, int]] = []
        self.context_tokens = 0
        self.input_start = self.input_end = 0
        self.flags = 0

    # --- requests -------------------------------------------------------------------------------

    def received(self, request: Any, start_ns: int, end_ns: int, headers: dict[str, str] | None) -> None:
        """A request was decoded and preprocessed in the input thread."""
        context = parse_traceparent((headers or {}).get("traceparent"))
        if len(self.arriving) >= self.hook.settings.max_open_requests:
            self.arriving.clear()  # ids that were rejected before the queue: never many
        self.arriving[request.request_id] = (start_ns, end_ns, context)

    def queued(self, request: Any, now: int) -> None:
        """A request entered the scheduler's waiting queue."""
        if self.input_start == 0:
            self.input_start = now
        request_id = request.request_id
        if request_id in self.requests:  # next part of a streaming-input session
            return
        start, end, context = self.arriving.pop(request_id, (now, now, None))
        if context is None:
            context = new_trace()
        record = EngineRecord(request, context, start, end, now, self.step + 1)
        self.requests[request_id] = record
        if record.waits_for_itself:
            self.blocked.add(request_id)
        self.account.requests += 1

    def aborted(self, request_ids: Any, now: int) -> None:
        """finish_requests() was called from outside the scheduler."""
        if request_ids is None:
            request_ids = list(self.requests)
        elif isinstance(request_ids, str):
            request_ids = (request_ids,)
        for request_id in request_ids:
            record = self.requests.get(request_id)
            if record is not None and not record.ended:
                self._end(request_id, record, now, -1)

    # --- a step -----------------------------------------------------------------------------------

    def scheduled(self, output: Any, start_ns: int, end_ns: int) -> None:
        """schedule() returned: number the step and pass the number on to the workers."""
        self.step = step = self.step + 1
        self.sched_start = start_ns
        self.sched_end = end_ns
        new = output.scheduled_new_reqs
        # STEP_ATTRIBUTE, spelt out: this line runs once a step
        output._stratoscope_step = (self.uid, step, self._contexts(new) if new else None)

    def _contexts(self, new: Any) -> dict[str, TraceContext]:
        """The trace contexts of the requests that the workers see for the first time."""
        records = ((item.req_id, self.requests.get(item.req_id)) for item in new)
        return {request_id: record.context for request_id, record in records if record is not None}

    def compose(self, output: Any, dispatch_end_ns: int) -> None:
        """The step is with the workers: work out who is in it and who waits for what."""
        step, tokens, total = self.step, output.num_scheduled_tokens, output.total_num_scheduled_tokens
        self.account.steps += 1
        row = _EMPTY_ROW[:]
        self.pending.append(row)
        row[_STEP], row[_DISPATCH_END], row[_FLAGS] = step, dispatch_end_ns, self.flags
        row[_SCHED_START], row[_SCHED_END] = self.sched_start, self.sched_end
        if self.input_start:
            row[_INPUT_START], row[_INPUT_END] = self.input_start, self.input_end
            self.input_start = self.input_end = 0
        if self.ended:
            self._close_ended()
        if self.preempted:
            row[_N_PREEMPTED] = self._note_preempted(step)
        self._note_joined(output, step, tokens)
        if self.prefilling:
            row[_N_PREFILL], row[_PREFILL_TOKENS] = self._note_prefill(step, tokens)
        n_scheduled = len(tokens)
        if n_scheduled != len(self.members):
            self._note_skipped(step, tokens, total)
        self.context_tokens += n_scheduled - row[_N_PREFILL]
        row[_N_SCHEDULED] = n_scheduled
        row[_DECODE_TOKENS] = total - row[_PREFILL_TOKENS]
        row[_CONTEXT_TOKENS] = self.context_tokens
        self._note_queue(row, output)

    def updated(self, output: Any, start_ns: int, end_ns: int) -> None:
        """update_from_output() returned: the step is over. The flush thread makes a row of it."""
        step = output._stratoscope_step[1]
        row = self.pending.popleft()
        while row[_STEP] != step:  # the execution of an earlier one failed
            row[_FLAGS] |= sc.StepFlag.NO_OUTPUT
            self.done.append(row)
            row = self.pending.popleft()
        row[_UPDATE_START] = start_ns
        row[_UPDATE_END] = end_ns
        if len(self.done) < self.hook.settings.ring_rows:
            self.done.append(row)
        else:
            self.account.dropped += 1
        if self.scheduler.finished_req_ids:
            self._note_finished(step, end_ns)

    def _note_finished(self, step: int, end_ns: int) -> None:
        for request_id in self.scheduler.finished_req_ids:
            record = self.requests.get(request_id)
            if record is not None and not record.ended:
                self._end(request_id, record, end_ns, step)

    def _end(self, request_id: str, record: EngineRecord, end_ns: int, last_step: int) -> None:
        record.ended = True
        self.unsent[request_id] = record
        self.ended.append((request_id, end_ns, last_step))

    # --- on the flush thread ------------------------------------------------------------------------

    def expand(self) -> None:
        """Put the rows of steps that are over into the ring, and send requests that ended a while ago.

        The engine's thread closes ended requests while the workers execute the next step; where no
        step follows (an idle engine in one process with its caller), they are sent from here.
        """
        for _ in range(len(self.done)):
            self.window.ring.push(*self.done.popleft())
        if self.unsent:
            before_ns = monotonic_ns() - _IDLE_NS
            for request_id, end_ns, last_step in list(self.ended):
                if end_ns < before_ns:
                    self._send(request_id, end_ns, last_step)

    def _send(self, request_id: str, end_ns: int, last_step: int) -> None:
        # dict.pop is atomic under the interpreter lock: of two threads one gets the record.
        record = self.unsent.pop(request_id, None)
        if record is not None:
            record.close(end_ns, last_step if last_step >= 0 else self.step - 1)
            self.hook.finish(sc.Record.ENGINE, (self, record))

    # --- parts of compose ---------------------------------------------------------------------------

    def _close_ended(self) -> None:
        ended, self.ended = self.ended, []
        for request_id, end_ns, last_step in ended:
            record = self.requests.pop(request_id, None)
            if record is None:
                continue
            self.blocked.discard(request_id)
            self.prefilling.pop(request_id, None)
            if self.members.pop(request_id, None) is not None:
                self.context_tokens -= record.leave_context(self.step)
            self._send(request_id, end_ns, last_step)

    def _note_preempted(self, step: int) -> int:
        preempted, self.preempted = self.preempted, []
        for request_id, computed in preempted:
            record = self.requests.get(request_id)
            if record is None:
                continue
            record.event(step, _PREEMPTED, computed)
            record.lost_until = max(record.lost_until, computed)
            self.prefilling.pop(request_id, None)
            if self.members.pop(request_id, None) is not None:
                self.context_tokens -= record.leave_context(step)
        return len(preempted)

    def _note_joined(self, output: Any, step: int, tokens: dict[str, int]) -> None:
        for item in output.scheduled_new_reqs:
            record = self.requests.get(item.req_id)
            if record is None:
                continue
            computed = int(item.num_computed_tokens)
            if record.first_step < 0:
                record.first_step = step
                record.cached_tokens = computed
            else:  # the V2 model runner sends resumed requests as new ones
                record.event(step, _RESUMED, computed)
            self._join(item.req_id, record, computed)
        cached = output.scheduled_cached_reqs
        for request_id in _resumed_ids(cached):
            record = self.requests.get(request_id)
            if record is None or request_id in self.members:
                continue
            computed = record.request.num_computed_tokens - tokens.get(request_id, 0)
            record.event(step, _RESUMED, computed)
            self._join(request_id, record, computed)

    def _join(self, request_id: str, record: EngineRecord, computed: int) -> None:
        self.blocked.discard(request_id)
        self.members[request_id] = record
        record.position = computed
        record.prefill_until = record.request.num_tokens
        self.prefilling[request_id] = record

    def _note_prefill(self, step: int, tokens: dict[str, int]) -> tuple[int, int]:
        """Events of the prompt chunks in this step; returns how many requests and tokens."""
        requests, total, done = 0, 0, None
        for request_id, record in self.prefilling.items():
            count = tokens.get(request_id, 0)
            if not count:
                continue
            start = record.position
            record.position = end = start + count
            again = min(end, record.lost_until) - start
            if again > 0:
                record.event(step, _RECOMPUTE, again)
                record.recomputed_tokens += again
                if count > again:
                    record.event(step, _PREFILL, count - again)
            else:
                record.event(step, _PREFILL, count)
            requests += 1
            total += count
            if end >= record.prefill_until:
                if record.first_output_step < 0:
                    record.first_output_step = step
                self.context_tokens += record.enter_context(step)
                done = [*done, request_id] if done else [request_id]
        for request_id in done or ():
            del self.prefilling[request_id]
        return requests, total

    def _note_skipped(self, step: int, tokens: dict[str, int], total: int) -> None:
        budget = getattr(self.scheduler, "max_num_scheduled_tokens", 0)
        reason = sc.WaitReason.TOKEN_BUDGET if budget and total >= budget else sc.WaitReason.OTHER
        for request_id, record in self.members.items():
            if request_id in tokens:
                continue
            # Asynchronous scheduling leaves out a request whose last token is already in flight.
            in_flight = getattr(record.request, "num_output_placeholders", 0) > 0
            record.event(step, _SKIPPED, int(sc.WaitReason.NONE if in_flight else reason))
            if request_id not in self.prefilling:
                record.context_base -= 1

    def _note_queue(self, row: list[int], output: Any) -> None:
        scheduler = self.scheduler
        running, waiting = scheduler.get_request_counts()
        row[_N_RUNNING], row[_N_WAITING] = running, waiting
        row[_KV_USAGE] = int(scheduler.kv_cache_manager.usage * 1e6)
        if waiting:
            row[_WAIT_REASON] = int(head_wait_reason(scheduler, output, row[_N_PREEMPTED]))
        for request_id in self.blocked:
            record = self.requests.get(request_id)
            if record is not None:
                record.note_blocked(row[_STEP], _BLOCKED)

    def close(self) -> None:
        """The process ends: hand over what is left."""
        now = monotonic_ns()
        for request_id, record in list(self.requests.items()):
            if not record.ended:
                self._end(request_id, record, now, -1)
        for request_id, end_ns, last_step in list(self.ended):
            self._send(request_id, end_ns, last_step)
        self.expand()


def served_name(model_config: Any) -> str:
    """The name under which clients know the model: the first served name, else its path."""
    served = getattr(model_config, "served_model_name", None)
    if isinstance(served, list):
        served = served[0] if served else None
    return str(served or getattr(model_config, "model", ""))


def _resumed_ids(cached: Any) -> Any:
    """Ids resumed after a preemption, over vLLM's versions of CachedRequestData."""
    resumed = getattr(cached, "resumed_req_ids", None)
    if resumed is not None:
        return resumed
    flags = getattr(cached, "resumed_from_preemption", None)
    if flags and any(flags):
        return [request_id for request_id, flag in zip(cached.req_ids, flags, strict=False) if flag]
    return ()
