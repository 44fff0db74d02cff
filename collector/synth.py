"""Child spans made from what was found out: a request's phases, and the engine steps behind them.

Phases (admission, queue, prefill, decode, preempted, stream-out) are children of the request's own
server span, in its own trace. Steps are spans of an engine's own trace: a step serves many
requests, so it is linked to them, and they to it, and never their parent. Ids are hashes of what a
span stands for, so the same request makes the same spans again.

For each kept request come the steps with its own prompt tokens (at most :data:`MAX_PREFILL_STEPS`)
and those of its steps that took over twice their median (at most :data:`MAX_SLOW_STEPS`, slowest first).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Final

import numpy as np
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from stratoscope.attribution.attribute import E2E
from stratoscope.attribution.tables import MAX_TIME_NS
from stratoscope.attribution.timeline import EngineTimeline
from stratoscope.attribution.waterfall import STALL, WAITING, Share, Stretch, stretches
from stratoscope.instrumentation import semconv as sc

from .finished import Finished

MAX_PHASES: Final = 128
MAX_PREFILL_STEPS: Final = 4
MAX_SLOW_STEPS: Final = 8
_NAMES: Final = {WAITING: "queue", STALL: "preempted"}
_PROMPT_KINDS: Final = (int(sc.EventKind.PREFILL), int(sc.EventKind.RECOMPUTE))
_PREFIX: Final = "stratoscope."
Step = tuple[str, int]  # engine uid, step number


class SlowestSelector:
    """Whether a request is among the slowest ``share`` of the last ``size``, itself included."""

    def __init__(self, size: int = 1000) -> None:
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []
        self._size = size

    def keep(self, latency_ns: int, share: float) -> bool:
        """Take note of a request; at least the slowest of all is kept, unless ``share`` is 0."""
        if len(self._recent) >= self._size:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]
        self._recent.append(latency_ns)
        insort(self._sorted, latency_ns)
        slower = len(self._sorted) - bisect_right(self._sorted, latency_ns)
        return share > 0 and slower < max(1.0, share * len(self._sorted))


def select(
    finished: Sequence[Finished], export: str, share: float, selector: SlowestSelector
) -> list[Finished]:
    """The requests to make spans for: ``all``, ``none``, or the ``slowest`` share and all that failed."""
    if export == "none":
        return []
    if export == "all":
        return list(finished)
    return [
        request
        for request in finished
        # Every request is noted, kept or not: the share is one of all requests.
        if selector.keep(int(request.latency_ns[E2E]), share)
        or (share > 0 and request.segmented.request.outcome != "ok")
    ]


class StepLedger:
    """Which steps were sent already, as far as the last ``size`` go."""

    def __init__(self, size: int = 50_000) -> None:
        self._sent: OrderedDict[Step, None] = OrderedDict()
        self._size = size

    def first_time(self, step: Step) -> bool:
        """True once a step."""
        if step in self._sent:
            return False
        self._sent[step] = None
        if len(self._sent) > self._size:
            self._sent.popitem(last=False)
        return True


def build(
    kept: Sequence[Finished], timelines: Mapping[str, EngineTimeline], ledger: StepLedger
) -> ExportTraceServiceRequest:
    """One export request with the spans of all ``kept`` requests, grouped by resource."""
    message = ExportTraceServiceRequest()
    scopes: dict[bytes, Any] = {}
    links: dict[Step, list[Finished]] = defaultdict(list)
    for request in kept:
        steps = notable_steps(request, timelines)
        for step in steps:
            links[step].append(request)
        _phase_spans(_scope(message, scopes, request.resource), request, steps)
    for step, requests in links.items():
        if ledger.first_time(step):
            scope = _scope(message, scopes, requests[0].resource)
            _step_span(scope.spans.add(), step, timelines[step[0]], requests)
    return message


def notable_steps(request: Finished, timelines: Mapping[str, EngineTimeline]) -> list[Step]:
    """The steps that are worth a span; see the module's text."""
    found: dict[Step, None] = {}
    for engine in request.segmented.request.engines:
        line = timelines.get(engine.engine_uid)
        if line is None or engine.first_step < 0:
            continue
        rows = slice(line.row_at(engine.first_step), line.row_at(min(engine.last_step, MAX_TIME_NS) + 1))
        steps = line.step[rows]
        ended = line.has_output[rows]
        steps, took = steps[ended], (line.update_end_ns[rows] - line.sched_start_ns[rows])[ended]
        if not len(steps):
            continue
        events = engine.events[np.isin(engine.events[:, 1], _PROMPT_KINDS)]
        prompt = np.intersect1d(events[:, 0], steps)[:MAX_PREFILL_STEPS].tolist()
        order = np.argsort(-took, kind="stable")[:MAX_SLOW_STEPS]
        slow = steps[order[took[order] > 2 * np.median(took)]].tolist()
        found.update(dict.fromkeys((engine.engine_uid, step) for step in (*prompt, *slow)))
    return list(found)


def _scope(message: ExportTraceServiceRequest, scopes: dict[bytes, Any], resource: bytes) -> Any:
    if resource not in scopes:
        entry = message.resource_spans.add()
        try:
            entry.resource.ParseFromString(resource)
        except DecodeError:  # one bad resource must not cost the others their spans
            entry.resource.Clear()
        scopes[resource] = entry.scope_spans.add()
        scopes[resource].scope.name = sc.SCOPE_NAME
    return scopes[resource]


def _phase_spans(scope: Any, request: Finished, steps: Iterable[Step]) -> None:
    for number, (stretch, merged) in enumerate(_bounded(stretches(request.segmented))):
        name = _NAMES.get(stretch.group, stretch.group)
        span = scope.spans.add(
            trace_id=bytes.fromhex(request.trace_id),
            span_id=_hash(8, request.trace_id, request.span_id, number, name),
            parent_span_id=bytes.fromhex(request.span_id),
            name=name,
            kind=Span.SPAN_KIND_INTERNAL,
        )
        _times(span, stretch.start_ns, stretch.start_ns + stretch.duration_ns, request.wall_offset_ns)
        attributes: dict[str, Any] = {
            sc.SYNTH: True,
            sc.CAUSE: max(stretch.shares, key=lambda s: s.duration_ns).cell,
        }
        attributes.update({sc.SECONDS_PREFIX + s.cell: s.duration_ns / 1e9 for s in stretch.shares})
        attributes[f"{_PREFIX}steps"] = stretch.steps
        if merged:
            attributes[f"{_PREFIX}merged_stretches"] = merged
        _attributes(span, attributes)
        if name in ("prefill", "decode"):
            low, high = stretch.start_ns, stretch.start_ns + stretch.duration_ns
            inside = (request.segmented.starts >= low) & (request.segmented.starts < high)
            # Engines number their steps alike, so a step is known by its engine too.
            uids = [engine.engine_uid for engine in request.segmented.request.engines]
            numbers, engines = request.segmented.step[inside], request.segmented.engine[inside]
            mine = {(uids[e], n) for e, n in zip(engines.tolist(), numbers.tolist(), strict=True) if e >= 0}
            for uid, step in steps:
                if (uid, step) in mine:
                    span.links.add(trace_id=_engine_trace(uid), span_id=_hash(8, uid, step))


def _bounded(all_of_them: Sequence[Stretch]) -> list[tuple[Stretch, int]]:
    """At most MAX_PHASES stretches, each with how many short ones it took in; no time is lost.

    A short stretch goes into the longer one before it, whose phase it then counts as.
    """
    by_length = sorted(range(1, len(all_of_them)), key=lambda i: -all_of_them[i].duration_ns)
    heads = sorted([0, *by_length[: MAX_PHASES - 1]]) if all_of_them else []
    ends = [*heads[1:], len(all_of_them)]
    return [(_merge(all_of_them[a:b]), b - a - 1) for a, b in zip(heads, ends, strict=True)]


def _merge(parts: Sequence[Stretch]) -> Stretch:
    if len(parts) == 1:
        return parts[0]
    spent: dict[str, int] = defaultdict(int)
    for share in (share for part in parts for share in part.shares):
        spent[share.cell] += share.duration_ns
    shares = tuple(Share(cell, duration, 0) for cell, duration in spent.items())
    steps = sum(part.steps for part in parts)
    return Stretch(parts[0].group, parts[0].start_ns, sum(spent.values()), steps, shares)


def _step_span(span: Any, step: Step, line: EngineTimeline, requests: Sequence[Finished]) -> None:
    uid, number = step
    row = line.row_at(number)
    span.trace_id, span.span_id = _engine_trace(uid), _hash(8, uid, number)
    span.name, span.kind = "engine step", Span.SPAN_KIND_INTERNAL
    start, end = int(line.sched_start_ns[row]), int(line.update_end_ns[row])
    _times(span, start, end, requests[0].wall_offset_ns)
    _attributes(
        span,
        {
            sc.SYNTH: True,
            sc.ENGINE_UID: uid,
            f"{_PREFIX}step": number,
            f"{_PREFIX}prefill_tokens": int(line.prefill_tokens[row]),
            f"{_PREFIX}decode_tokens": int(line.decode_tokens[row]),
        },
    )
    for request in requests:
        span.links.add(trace_id=bytes.fromhex(request.trace_id), span_id=bytes.fromhex(request.span_id))


def _times(span: Any, start_ns: int, end_ns: int, offset_ns: int) -> None:
    # A hostile offset must not leave uint64.
    span.start_time_unix_nano = min(max(start_ns + offset_ns, 0), (1 << 64) - 1)
    span.end_time_unix_nano = min(max(end_ns + offset_ns, 0), (1 << 64) - 1)


def _attributes(span: Any, values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        target = span.attributes.add(key=key).value
        if isinstance(value, bool):
            target.bool_value = value
        elif isinstance(value, int):
            target.int_value = value
        elif isinstance(value, float):
            target.double_value = value
        else:
            target.string_value = value


def _engine_trace(uid: str) -> bytes:
    return _hash(16, "engine", uid)


def _hash(size: int, *parts: object) -> bytes:
    digest = blake2b("/".join(map(str, parts)).encode(errors="replace"), digest_size=size).digest()
    return digest if any(digest) else b"\x01" * size
