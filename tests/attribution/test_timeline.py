"""Cutting an engine's time: every expected list was worked out by hand."""

from __future__ import annotations

import numpy as np

from stratoscope.attribution.tables import StepTable, WorkerStepTable
from stratoscope.attribution.timeline import EngineTimeline
from stratoscope.attribution.window import EngineWindow
from stratoscope.instrumentation import semconv as sc


def test_synchronous_steps(scene):
    scene.step(0, (12, 14), 15, (30, 32), [(17, 25)], [(26, 28)], taken=(10, 12))
    scene.step(1, (35, 36), 37, (50, 51), [(38, 48)])
    assert scene.track() == [
        (10, 12, "input_processing", 0),
        (12, 14, "schedule", 0),
        (14, 17, "dispatch", 0),  # handing over, and the wait for the first rank
        (17, 25, "exec", 0),
        (25, 26, "result_ipc", 0),  # the core asks for sampling
        (26, 28, "sampling", 0),
        (28, 30, "result_ipc", 0),
        (30, 32, "update", 0),
        (32, 35, "host_gap", -1),
        (35, 36, "schedule", 1),
        (36, 38, "dispatch", 1),
        (38, 48, "exec", 1),
        (48, 50, "result_ipc", 1),
        (50, 51, "update", 1),
    ]


def test_asynchronous_steps_overlap(scene):
    """Step 1 is scheduled and handed over while step 0 executes: execution hides the host."""
    scene.step(0, (10, 11), 12, (31, 33), [(13, 29)], flags=1)
    scene.step(1, (14, 16), 17, (50, 52), [(30, 48)], flags=1)
    assert scene.track() == [
        (10, 11, "schedule", 0),
        (11, 13, "dispatch", 0),
        (13, 29, "exec", 0),
        (29, 30, "result_ipc", 0),  # nobody executes; the core waits for step 0
        (30, 48, "exec", 1),
        (48, 50, "result_ipc", 1),
        (50, 52, "update", 1),
    ]


def test_ranks_are_a_union(scene):
    scene.step(0, (10, 11), 12, (40, 41), [(14, 20), (16, 24)], [(26, 27), (25, 29)])
    assert scene.track()[2:7] == [
        (14, 24, "exec", 0),
        (24, 25, "result_ipc", 0),
        (25, 29, "sampling", 0),
        (29, 40, "result_ipc", 0),
        (40, 41, "update", 0),
    ]


def test_execution_of_one_rank_beats_sampling_of_another(scene):
    scene.step(0, (10, 11), 12, (24, 25), [(13, 16), (13, 16)], [(17, 23), (17, 18)], flags=1)
    scene.step(1, (13, 14), 15, (40, 41), [(26, 35), (19, 35)], flags=1)
    assert (17, 19, "sampling", 0) in scene.track()
    assert (19, 35, "exec", 1) in scene.track()


def test_device_interval_extends_execution(scene):
    scene.step(0, (10, 11), 12, (40, 41), [(13, 15)], device=[(14, 38)])
    assert (13, 38, "exec", 0) in scene.track()


def test_step_without_worker_row(scene):
    scene.step(0, (10, 11), 12, (20, 21))
    assert scene.track() == [
        (10, 11, "schedule", 0),
        (11, 12, "dispatch", 0),
        (12, 20, "workers_missing", 0),
        (20, 21, "update", 0),
    ]


def test_lost_steps(scene):
    scene.step(3, (10, 11), 12, (20, 21), [(13, 19)])
    scene.step(6, (50, 51), 52, (60, 61), [(53, 59)])
    assert (21, 50, "steps_missing", -1) in scene.track()


def test_lost_steps_with_batch_queue_last_until_the_next_known_execution(scene):
    scene.step(3, (10, 11), 12, (20, 21), [(13, 19)], flags=1)
    scene.step(5, (30, 31), 32, (60, 61), [(45, 59)], flags=1)
    track = scene.track()
    assert (21, 30, "steps_missing", -1) in track
    assert (32, 45, "steps_missing", -1) in track  # step 4 was executing then


def test_step_without_output_leaves_no_waiting_behind(scene):
    scene.step(0, (10, 11), 12, (0, 0), [(13, 15)], flags=int(sc.StepFlag.NO_OUTPUT))
    scene.step(1, (30, 31), 32, (40, 41), [(33, 39)])
    assert (15, 30, "host_gap", -1) in scene.track()


def test_worker_row_outside_of_its_step_is_not_believed(scene):
    scene.step(0, (10, 11), 12, (20, 21), [(13, 500)])
    assert (12, 20, "workers_missing", 0) in scene.track()


def test_contradicting_step_row_is_left_out(scene):
    scene.step(0, (10, 11), 12, (20, 21), [(13, 19)])
    scene.step(1, (90_000, 90_001), 90_002, (90_003, 90_004), [(90_002, 90_003)])  # far too late
    scene.step(2, (30, 31), 32, (40, 41), [(33, 39)])
    assert scene.timeline.step.tolist() == [0, 2]
    assert (21, 30, "steps_missing", -1) in scene.track()


def test_numbering_is_by_row_not_by_arrival(scene):
    scene.step(1, (30, 31), 32, (40, 41), [(33, 39)])
    scene.step(0, (10, 11), 12, (20, 21), [(13, 19)])
    assert [piece[3] for piece in scene.track() if piece[2] == "exec"] == [0, 1]


def test_no_steps():
    line = EngineTimeline.build(StepTable.empty(), {0: WorkerStepTable.empty()})
    assert len(line) == 0
    assert not line.knows(0)


def test_window_grows_and_forgets(scene):
    window = EngineWindow()
    for number in range(4):
        start = 10 + 20 * number
        scene.step(number, (start, start + 1), start + 2, (start + 12, start + 13), [(start + 3, start + 11)])
        single = type(scene)()
        single.step(
            number, (start, start + 1), start + 2, (start + 12, start + 13), [(start + 3, start + 11)]
        )
        window.append_steps(_steps(single))
        window.append_worker(0, _workers(single))
        window.append_worker(0, _workers(single))  # sent twice
    whole = scene.timeline
    assert np.array_equal(window.timeline.track.edges, whole.track.edges)
    assert np.array_equal(window.timeline.track.kind, whole.track.kind)
    window.trim(before_ns=60_000_000)
    assert window.timeline.step.tolist() == [2, 3]
    assert len(window) == 2
    window.trim(before_ns=10**15)
    assert len(window.timeline) == 0


def _steps(scene):
    columns = sc.STEP_COLUMNS
    return StepTable.from_rows(
        columns, np.array([[r.get(c, 0) for c in columns] for r in scene.steps], "<i8").tobytes()
    )


def _workers(scene):
    columns = sc.WORKER_STEP_COLUMNS
    rows = [[r.get(c, 0) for c in columns] for r in scene.workers[0]]
    return WorkerStepTable.from_rows(columns, np.array(rows, "<i8").tobytes())
