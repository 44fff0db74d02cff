"""The law that everything rests on: whatever was recorded, segments sum to the latency exactly."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace

import numpy as np
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from stratoscope.attribution.attribute import attribute_segmented, cells_of, latency_of
from stratoscope.attribution.records import EngineRequest, ServerRequest
from stratoscope.attribution.segment import segment_request
from stratoscope.attribution.tables import OutputTable, StepTable, WorkerStepTable
from stratoscope.attribution.taxonomy import CELL_NAMES, N_CELLS, PHASES
from stratoscope.attribution.timeline import EngineTimeline
from stratoscope.attribution.waterfall import interference, stretches, waterfall
from stratoscope.instrumentation import semconv as sc

MS = 1_000_000
UNATTRIBUTED = [i for i, name in enumerate(CELL_NAMES) if name.startswith("unattributed")]
hostile = st.sampled_from([0, 1, -1, 2**62, 2**62 - 1, 2**63 - 1, -(2**63), 10**18])
times = st.one_of(st.integers(0, 120 * MS), st.integers(0, 60).map(lambda ms: ms * MS), hostile)
numbers = st.one_of(st.integers(-1, 12), hostile)
garbage = settings(suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=80)


def rows_of(columns):
    values = st.tuples(*(times if name.endswith("_ns") else numbers for name in columns))
    return st.lists(values, max_size=8).map(lambda rows: np.array(rows, "<i8").tobytes())


def matrices(*columns):
    return st.lists(st.tuples(*columns), max_size=8).map(
        lambda rows: np.array(rows, np.int64).reshape(-1, len(columns))
    )


engine_requests = st.builds(
    EngineRequest,
    engine_uid=st.sampled_from(["e", "f", "unknown"]), engine_index=st.integers(0, 2),
    core_received_ns=times, core_preprocessed_ns=times, queued_ns=times, finished_ns=times,
    arrival_step=numbers, first_step=numbers, first_output_step=numbers, last_step=numbers,
    events=matrices(numbers, st.integers(0, 7), numbers),
)  # fmt: skip
server_requests = st.builds(
    ServerRequest,
    arrival_ns=times, end_ns=times, last_byte_ns=times, streaming=st.booleans(),
    outcome=st.sampled_from(["ok", "aborted", "error", "unfinished", "?"]),
    process_uid=st.sampled_from(["p", "q"]),
    body_ns=times, template_start_ns=times, template_end_ns=times,
    tokenize_start_ns=times, tokenize_end_ns=times,
    submit_ns=times, n_engine_requests=st.integers(0, 4), flushes=matrices(times, times),
    flushes_dropped=st.integers(0, 1), engines=st.lists(engine_requests, max_size=3).map(tuple),
)  # fmt: skip
timelines = st.builds(
    lambda steps, workers: EngineTimeline.build(
        StepTable.from_rows(sc.STEP_COLUMNS, steps),
        {i: WorkerStepTable.from_rows(sc.WORKER_STEP_COLUMNS, rows) for i, rows in enumerate(workers)},
    ),
    rows_of(sc.STEP_COLUMNS),
    st.lists(rows_of(sc.WORKER_STEP_COLUMNS), max_size=2),
)
output_tables = rows_of(sc.OUTPUT_COLUMNS).map(lambda rows: OutputTable.from_rows(sc.OUTPUT_COLUMNS, rows))


def check(request, lines, outputs):
    """Contiguous, not negative, exact in every phase, and the views agree."""
    result = segment_request(request, lines, outputs)
    arrival, end = request.span_ns
    assert (result.arrival_ns, result.end_ns) == (arrival, end)
    assert arrival <= result.first_token_ns <= end
    if end > arrival:
        assert (result.starts[0], result.ends[-1]) == (arrival, end)
        assert (result.starts[1:] == result.ends[:-1]).all()
        assert (result.ends > result.starts).all()
    else:
        assert len(result.cell) == 0
    assert ((result.cell >= 0) & (result.cell < N_CELLS)).all()
    for name in ("ends", "cell", "step", "engine", "reason"):
        assert getattr(result, name).shape == result.starts.shape
        assert getattr(result, name).dtype == np.int64
    cells, latency = cells_of(result), latency_of(result)
    assert (cells >= 0).all()
    assert cells.sum(axis=1).tolist() == latency.tolist()
    ttft, decode, e2e, itl = (PHASES.index(name) for name in ("ttft", "decode", "e2e", "itl"))
    assert (cells[ttft] + cells[decode] == cells[e2e]).all()
    assert 0 <= latency[itl] <= latency[e2e]
    assert sum(row.duration_ns for row in waterfall(result)) == latency[e2e]
    parts = stretches(result)
    assert all(a.start_ns + a.duration_ns == b.start_ns for a, b in itertools.pairwise(parts))
    assert all(sum(share.duration_ns for share in part.shares) == part.duration_ns for part in parts)
    spent = sum(item.duration_ns for item in interference(result, lines))
    assert spent == cells[e2e][CELL_NAMES.index("model.prefill_interference")]
    return result


@garbage
@given(timelines)
def test_any_timeline_is_contiguous(line):
    for track in (line.track, line.host):
        assert (np.diff(track.edges) > 0).all()
        assert len(track.edges) == len(track.kind) + 1 == len(track.row) + 1
        assert (track.row < len(line)).all()
    for earlier, later in (
        (line.sched_start_ns, line.sched_end_ns),
        (line.sched_end_ns, line.update_start_ns),
        (line.update_start_ns, line.update_end_ns),
    ):
        assert (earlier <= later).all()
        assert (np.diff(later) >= 0).all()


@garbage
@given(server_requests, timelines, timelines, output_tables)
def test_garbage_in_sums_out(request, first, second, outputs):
    check(request, {"e": first, "f": second}, {"p": outputs})


class Engine:
    """A simulated vLLM: steps of random length, synchronous or one step ahead, its own arithmetic."""

    def __init__(self, draw, steps: int, asynchronous: bool, ranks: int) -> None:
        pause = lambda: draw(st.integers(2_001, 3 * MS))  # noqa: E731
        self.steps, self.workers, self.outputs = [], [[] for _ in range(ranks)], []
        clock = 10 * MS
        device_free, pending = clock, []
        for number in range(steps):
            sched = clock + pause()
            sched_end = sched + pause()
            dispatch_end = sched_end + pause()
            starts = [max(device_free, dispatch_end) + pause() for _ in range(ranks)]
            ends = [start + 4 * pause() for start in starts]
            sample = [(end + pause(), 0) for end in ends]
            sample = [(start, start + pause()) for start, _ in sample]
            for rank in range(ranks):
                self.workers[rank].append((number, starts[rank], ends[rank], *sample[rank], 0, 0))
            device_free = max(end for _, end in sample)
            tokens = draw(st.integers(0, 5)), draw(st.integers(0, 5))
            pending.append((number, sched, sched_end, dispatch_end, device_free, tokens))
            clock = dispatch_end
            if len(pending) > int(asynchronous):
                clock = self._update(pending.pop(0), clock, pause, asynchronous)
        while pending:
            clock = self._update(pending.pop(0), clock, pause, asynchronous)

    def _update(self, step, clock, pause, asynchronous) -> int:
        number, sched, sched_end, dispatch_end, ready, (prefill, decode) = step
        start = max(clock, ready) + pause()
        end = start + pause()
        self.steps.append(
            (number, sched, sched_end, dispatch_end, start, end, 0, 0, 1, 0,
             prefill, decode, 0, 0, 0, 0, 0, 0, int(asynchronous))
        )  # fmt: skip
        begun = max(end, self.outputs[-1][2] if self.outputs else 0) + pause()
        self.outputs.append((start, begun, begun + pause(), 0, 1))
        return end

    def tables(self, steps=None, workers=None, outputs=None):
        pack = lambda rows: np.array(rows, "<i8").tobytes()  # noqa: E731
        line = EngineTimeline.build(
            StepTable.from_rows(sc.STEP_COLUMNS, pack(self.steps if steps is None else steps)),
            {
                rank: WorkerStepTable.from_rows(sc.WORKER_STEP_COLUMNS, pack(rows))
                for rank, rows in enumerate(self.workers if workers is None else workers)
            },
        )
        rows = pack(self.outputs if outputs is None else outputs)
        return {"e": line}, {"p": OutputTable.from_rows(sc.OUTPUT_COLUMNS, rows)}


@st.composite
def served(draw):
    """A simulated engine and a well-recorded request on it."""
    steps = draw(st.integers(2, 10))
    engine = Engine(draw, steps, draw(st.booleans()), draw(st.integers(1, 2)))
    first = draw(st.integers(0, steps - 1))
    output = draw(st.integers(first, steps - 1))
    last = draw(st.integers(output, steps - 1))
    arrival = draw(st.integers(MS, 10 * MS))
    queued = draw(st.integers(arrival + 4, engine.steps[first][1]))
    arrived = next(number for number, row in enumerate(engine.steps) if row[1] >= queued)
    flushes, free = [], 0
    for _, _, ready, *_ in engine.outputs[output : last + 1]:
        start = max(ready, free) + draw(st.integers(0, MS))
        free = start + draw(st.integers(0, 2 * MS))
        flushes.append((start, free))
    chunks = [(step, int(sc.EventKind.PREFILL), 1) for step in range(first, output + 1)]
    request = ServerRequest(
        arrival_ns=arrival, submit_ns=arrival + 1, last_byte_ns=free, end_ns=free,
        streaming=draw(st.booleans()),
        process_uid="p", n_engine_requests=1, flushes=np.array(flushes, np.int64),
        engines=(
            EngineRequest(
                "e", core_received_ns=arrival + 2, core_preprocessed_ns=arrival + 3, queued_ns=queued,
                finished_ns=engine.steps[last][5], arrival_step=arrived, first_step=first,
                first_output_step=output,
                last_step=last, events=np.array(chunks, np.int64),
            ),
        ),
    )  # fmt: skip
    return engine, request


@garbage
@given(served())
def test_a_complete_record_leaves_nothing_unattributed(case):
    engine, request = case
    result = check(request, *engine.tables())
    cells = attribute_segmented([result]).cells_ns
    assert cells[..., UNATTRIBUTED].sum() == 0
    begun = [
        engine.outputs[step][1]
        for step in (request.engines[0].first_output_step, request.engines[0].last_step)
    ]
    first, last = (next(end for start, end in request.flushes.tolist() if start >= time) for time in begun)
    assert result.itl_to_ns - result.itl_from_ns == (last - first if request.streaming else 0)


@garbage
@given(served(), st.data())
def test_lost_rows_never_break_the_sum(case, data):
    engine, request = case
    keep = lambda rows: [row for row in rows if data.draw(st.booleans())]  # noqa: E731
    steps, outputs = keep(engine.steps), keep(engine.outputs)
    workers = [keep(rows) for rows in engine.workers]
    result = check(request, *engine.tables(steps, workers, outputs))
    event(f"unattributed: {bool(cells_of(result)[:, UNATTRIBUTED].sum())}")


@garbage
@given(served(), st.integers(1, 2**60))
def test_only_differences_of_times_matter(case, shift):
    engine, request = case
    before = check(request, *engine.tables())
    times = range(1, 6)  # of a step's columns
    engine.steps = [tuple(v + shift if i in times else v for i, v in enumerate(row)) for row in engine.steps]
    engine.workers = [
        [(n, *(v + shift for v in row), 0, 0) for n, *row, _, _ in rows] for rows in engine.workers
    ]
    engine.outputs = [
        (stamp + shift, start + shift, end + shift, *rest) for stamp, start, end, *rest in engine.outputs
    ]
    after = check(_shifted(request, shift), *engine.tables())
    assert (cells_of(before) == cells_of(after)).all()


def _shifted(record, shift):
    moved = {f.name: getattr(record, f.name) for f in fields(record)}
    moved = {k: v + shift if k.endswith("_ns") and v else v for k, v in moved.items()}
    if "engines" in moved:
        moved["engines"] = tuple(_shifted(one, shift) for one in record.engines)
        moved["flushes"] = record.flushes + shift
    return replace(record, **moved)


def rule(time, steps, workers):
    """The timeline's rule at one instant, written down plainly: the oracle for the vectorised code."""
    known = {row[0]: row for row in steps}
    runs = [run for rows in workers for run in rows if run[0] in known]
    executing = [run[0] for run in runs if run[1] <= time < run[2]]
    if executing:
        return "exec", min(executing)
    sampling = [run[0] for run in runs if run[3] <= time < run[4]]
    if sampling:
        return "model.sampling", min(sampling)
    for number, sched, sched_end, dispatched, update, done, *_ in steps:
        for start, end, name in (
            (sched, sched_end, "schedule"),
            (sched_end, dispatched, "dispatch"),
            (update, done, "update"),
        ):
            if start <= time < end:
                return f"framework.{name}", number
    for before, after in itertools.pairwise(steps):
        until = after[1]
        if after[18]:
            until = max(until, min([run[1] for run in runs if run[0] == after[0]], default=after[4]))
        if after[0] != before[0] + 1 and before[5] <= time < until:
            return "unattributed.steps_missing", -1
    for number, _, _, dispatched, update, *_ in steps:
        if dispatched <= time < update:
            mine = [run for run in runs if run[0] == number]
            if not mine:
                return "unattributed.workers_missing", number
            begun = time >= min(run[1] for run in mine)
            return ("framework.result_ipc" if begun else "framework.dispatch"), number
    return "framework.host_gap", -1


@garbage
@given(st.data(), st.integers(1, 8), st.booleans(), st.integers(1, 3))
def test_timeline_follows_the_rule_at_every_instant(data, steps, asynchronous, ranks):
    engine = Engine(data.draw, steps, asynchronous, ranks)
    keep = lambda rows: [row for row in rows if data.draw(st.integers(0, 5))]  # noqa: E731
    kept = keep(engine.steps)
    workers = [keep(rows) for rows in engine.workers]
    line = engine.tables(kept, workers)[0]["e"]
    edges = line.track.edges
    found, expected = [], []
    probes = sorted(
        {*edges[:-1].tolist(), *((edges[:-1] + edges[1:]) // 2).tolist(), *(edges[1:] - 1).tolist()}
    )
    for time in probes if len(kept) else ():
        piece = int(np.searchsorted(edges, time, "right")) - 1
        kind, row = int(line.track.kind[piece]), int(line.track.row[piece])
        found.append(("exec" if kind < 0 else CELL_NAMES[kind], int(line.step[row]) if row >= 0 else -1))
        expected.append(rule(time, kept, workers))
    assert found == expected
