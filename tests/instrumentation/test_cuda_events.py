"""The step timer against a fake of CUDA's events (tests/fakes/cuda.py)."""

import importlib.util
import itertools
import subprocess
import sys
import threading
import types
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratoscope.instrumentation.gpu.cuda_events import StepTimer, rounding_ns

_spec = importlib.util.spec_from_file_location("fake_cuda", Path(__file__).parents[1] / "fakes" / "cuda.py")
fake = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(fake)

MS = 1_000_000
SECOND = 1_000_000_000


def pair(**options):
    cuda = fake.FakeCuda(**options)
    return cuda, StepTimer(cuda, cuda.clock, max_outstanding=8)


def run_step(cuda, timer, step, work_ns):
    """One step, launched and not waited for; its true interval on the host's clock."""
    timer.begin(step)
    start = max(cuda.stream.busy_until_ns, cuda.now_ns)
    _, end = cuda.stream.work(work_ns)
    timer.end(step)
    return start, end


def bound_ns(timer, drift, age_ns):
    """The docstring's bound, with one launch latency in which an idle stream completes an event."""
    return timer.error_ns + abs(drift) * age_ns + 4_000


def test_an_interval_lies_where_it_was():
    cuda, timer = pair()
    start, end = run_step(cuda, timer, 7, 20 * MS)
    cuda.sleep(30 * MS)
    ((step, got_start, got_end),) = timer.collect()
    assert step == 7
    assert abs(got_start - start) <= bound_ns(timer, 0, 0)
    assert abs(got_end - end) <= bound_ns(timer, 0, 0)
    assert abs((got_end - got_start) - (end - start)) <= rounding_ns(end - start) + 4_000
    assert timer.error_ns < 50_000


def test_nothing_is_waited_for():
    cuda, timer = pair()
    run_step(cuda, timer, 1, 20 * MS)
    before = cuda.now_ns
    assert timer.collect() == []
    assert cuda.now_ns - before == cuda.call_ns  # one query
    cuda.sleep(30 * MS)
    assert [row[0] for row in timer.collect()] == [1]
    assert timer.collect() == []


def test_another_thread_may_collect_between_steps_only():
    cuda, timer = pair()
    run_step(cuda, timer, 1, MS)
    timer.begin(2)
    cuda.sleep(SECOND)
    assert timer.collect_idle() == []
    timer.end(2)
    cuda.sleep(SECOND)
    assert [row[0] for row in timer.collect_idle()] == [1, 2]


def test_two_threads_that_collect_get_every_step_once():
    cuda, timer = pair(call_ns=1)
    rows = []
    done = threading.Event()

    def collector():
        while not done.is_set():
            rows.extend(timer.collect_idle())

    thread = threading.Thread(target=collector)
    thread.start()
    for step in range(3000):
        run_step(cuda, timer, step, MS)
        cuda.sleep(2 * MS)
        rows.extend(timer.collect())
    done.set()
    thread.join()
    cuda.sleep(SECOND)
    rows.extend(timer.collect())
    assert sorted(row[0] for row in rows) == list(range(3000))
    assert timer.lost == sum(1 for row in rows if row[1] == 0)


def test_a_step_queued_behind_another_starts_when_that_ends():
    cuda, timer = pair()
    for step in (1, 2, 3):  # asynchronous scheduling: the host is ahead of the device
        run_step(cuda, timer, step, 10 * MS)
    cuda.sleep(40 * MS)
    rows = timer.collect()
    assert [row[0] for row in rows] == [1, 2, 3]
    for (_, _, end), (_, start, _) in itertools.pairwise(rows):
        assert 0 <= start - end <= 20_000


@settings(max_examples=40, deadline=None)
@given(
    drift=st.floats(-100e-6, 100e-6),
    steps=st.lists(
        st.tuples(st.integers(1, 200 * MS), st.integers(0, 2 * SECOND)),
        min_size=1,
        max_size=60,
    ),
)
def test_every_interval_is_within_the_stated_bound(drift, steps):
    cuda, timer = pair(drift=drift)
    true = {}
    rows = []
    for step, (work_ns, idle_ns) in enumerate(steps):
        true[step] = run_step(cuda, timer, step, work_ns)
        cuda.sleep(work_ns + 10_000)
        rows += timer.collect()
        limit = bound_ns(timer, drift, SECOND + work_ns)
        for _, start, end in rows[-1:]:
            assert abs(start - true[step][0]) <= limit
            assert abs(end - true[step][1]) <= limit
        cuda.sleep(idle_ns)
    assert [row[0] for row in rows] == list(range(len(steps)))
    for (_, _, end), (_, start, _) in itertools.pairwise(rows):
        assert start >= end


def test_the_error_does_not_grow_over_hours():
    cuda, timer = pair(drift=20e-6)
    worst = 0
    for step in range(3 * 3600 // 5):
        start, end = run_step(cuda, timer, step, 300 * MS)
        cuda.sleep(5 * SECOND)
        ((_, got_start, got_end),) = timer.collect()
        worst = max(worst, abs(got_start - start), abs(got_end - end))
    assert worst <= bound_ns(timer, 20e-6, SECOND)


def test_the_error_does_not_grow_under_a_stream_that_never_idles():
    """The device's clock is fast, so each new anchor moves the steps back: that must not add up."""
    cuda, timer = pair(drift=100e-6)
    worst = 0
    true = {0: run_step(cuda, timer, 0, 100 * MS)}
    for step in range(1, 2000):
        true[step] = run_step(cuda, timer, step, 100 * MS)
        cuda.sleep(true[step - 1][1] + MS - cuda.now_ns)
        for done, _, end in timer.collect():
            worst = max(worst, abs(end - true[done][1]))
    assert cuda.now_ns - 10 * SECOND > 199 * SECOND
    assert worst <= bound_ns(timer, 100e-6, 1.3 * SECOND)


def test_with_no_anchor_to_be_had_it_goes_on_from_the_last_step():
    cuda, timer = pair()
    run_step(cuda, timer, 0, MS)
    cuda.anchor_stream.busy_until_ns = cuda.now_ns + 3600 * SECOND  # never idle again
    worst = 0
    for step in range(1, 300):
        cuda.sleep(SECOND)
        timer.collect()
        start, end = run_step(cuda, timer, step, 10 * MS)
        cuda.sleep(20 * MS)
        ((_, got_start, got_end),) = timer.collect()
        worst = max(worst, abs(got_start - start), abs(got_end - end))
    assert 0 < worst <= bound_ns(timer, 0, 0)
    assert timer.error_ns > 100_000  # it says that it got worse


def test_without_any_anchor_steps_are_lost_not_invented():
    cuda, timer = pair()
    cuda.anchor_stream.busy_until_ns = cuda.now_ns + 3600 * SECOND
    before = cuda.now_ns
    run_step(cuda, timer, 5, MS)
    assert cuda.now_ns - before < 2 * MS  # it did not wait for one either
    assert timer.collect() == [(5, 0, 0)]
    assert timer.lost == 1


def test_steps_beyond_the_bound_are_lost_and_the_others_are_not():
    cuda, timer = pair()
    for step in range(12):
        run_step(cuda, timer, step, MS)
    assert timer.lost >= 4
    cuda.sleep(SECOND)
    rows = timer.collect()
    assert [row[0] for row in rows] == list(range(12))
    assert [row[0] for row in rows if row[1] == 0] == [8, 9, 10, 11]
    assert timer.lost == 4


def test_events_are_used_again():
    cuda, timer = pair()
    for step in range(50):
        run_step(cuda, timer, step, MS)
        cuda.sleep(2 * MS)
        timer.collect()
    assert cuda.events <= 5


def test_lost_steps_give_their_events_back():
    cuda, timer = pair()
    cuda.in_capture = True
    for step in range(50):
        run_step(cuda, timer, step, MS)
        cuda.in_capture = False
        timer.collect()
        cuda.in_capture = True
    assert timer.lost == 50 and cuda.events <= 2


def test_after_an_hour_without_an_anchor_the_old_one_is_not_used():
    cuda, timer = pair()
    run_step(cuda, timer, 0, MS)
    cuda.sleep(MS * 2)
    timer.collect()
    cuda.sleep(3600 * SECOND)
    cuda.anchor_stream.busy_until_ns = cuda.now_ns + SECOND
    run_step(cuda, timer, 1, MS)
    assert timer.collect() == [(1, 0, 0)]
    cuda.sleep(2 * SECOND)
    start, _ = run_step(cuda, timer, 2, MS)
    cuda.sleep(2 * MS)
    ((_, got_start, _),) = timer.collect()
    assert abs(got_start - start) <= bound_ns(timer, 0, 0)


def test_cuda_that_nobody_initialised_is_left_alone(monkeypatch):
    touched = []
    cuda = types.SimpleNamespace(is_initialized=lambda: False, is_available=lambda: touched.append("driver"))
    cuda.Stream = cuda.Event = cuda.is_current_stream_capturing = lambda *a, **k: touched.append("context")
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
    timer = StepTimer()
    timer.begin(1)
    timer.end(1)
    assert timer.collect() == [] and touched == []


def test_nothing_is_called_while_a_graph_is_captured():
    cuda, timer = pair()
    run_step(cuda, timer, 1, MS)
    cuda.in_capture = True
    timer.begin(2)
    timer.end(2)
    assert timer.collect() == []
    cuda.in_capture = False
    assert not cuda.capture_broken
    cuda.sleep(SECOND)
    rows = timer.collect()
    assert [row[0] for row in rows] == [1, 2] and rows[0][1] > 0 and rows[1][1:] == (0, 0)
    assert timer.lost == 1


def test_capture_that_begins_inside_a_step_loses_that_step():
    cuda, timer = pair()
    timer.begin(1)
    cuda.in_capture = True
    timer.end(1)
    cuda.in_capture = False
    assert timer.collect() == [(1, 0, 0)]
    assert not cuda.capture_broken


@pytest.mark.parametrize("where", ["begin", "end", "collect"])
def test_an_error_of_cuda_turns_it_off_for_good(where):
    cuda, timer = pair()
    run_step(cuda, timer, 1, MS)
    timer.begin(2) if where != "begin" else None
    timer.end(2) if where == "collect" else None
    cuda.error = RuntimeError("CUDA error: an illegal memory access was encountered")
    {"begin": timer.begin, "end": timer.end, "collect": lambda _: timer.collect()}[where](2)
    calls = cuda.calls
    owed = timer.collect()
    assert {row[1:] for row in owed} <= {(0, 0)}
    assert not timer.active
    timer.begin(3)
    timer.end(3)
    assert timer.collect() == [] and cuda.calls == calls


def test_an_error_leaves_no_step_unaccounted():
    cuda, timer = pair()
    run_step(cuda, timer, 1, MS)
    timer.begin(2)
    cuda.error = RuntimeError("CUDA error")
    timer.end(2)
    assert timer.collect() == [(1, 0, 0), (2, 0, 0)]
    assert timer.lost == 2


def test_a_step_that_never_ends_is_lost():
    cuda, timer = pair()
    timer.begin(1)
    run_step(cuda, timer, 2, MS)
    cuda.sleep(SECOND)
    rows = timer.collect()
    assert rows[0] == (1, 0, 0) and rows[1][0] == 2 and rows[1][1] > 0


def test_an_end_without_a_begin_is_ignored():
    cuda, timer = pair()
    timer.end(4)
    assert timer.collect() == [] and cuda.calls == 0


def test_close_gives_up_what_is_still_running():
    cuda, timer = pair()
    run_step(cuda, timer, 1, SECOND)
    timer.close()
    assert timer.collect() == [(1, 0, 0)]
    timer.begin(2)
    timer.end(2)
    assert timer.collect() == [] and not timer.active


def test_without_torch_it_does_nothing_and_imports_nothing():
    script = (
        "import sys\n"
        "from stratoscope.instrumentation.gpu.cuda_events import StepTimer\n"
        "timer = StepTimer(); timer.begin(1); timer.end(1)\n"
        "assert timer.collect() == [] and not timer.active\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_with_torch_but_without_cuda_it_stays_off():
    torch = pytest.importorskip("torch")
    timer = StepTimer()
    timer.begin(1)
    timer.end(1)
    if torch.cuda.is_initialized():
        pytest.skip("CUDA is in use in this process")
    assert timer.collect() == [] and not timer.active
    assert not torch.cuda.is_initialized()
