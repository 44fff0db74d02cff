from __future__ import annotations

import pytest

from stratoscope.attribution.waterfall import interference, stretches, waterfall
from stratoscope.instrumentation.semconv import EventKind, WaitReason

MS = 1_000_000


@pytest.fixture
def request_and_scene(scene, engine, server):
    """Waits one step for blocks, prefills with a neighbour, decodes twice, is preempted, comes back."""
    tokens = {0: (0, 3), 1: (10, 2), 2: (4, 4), 3: (0, 2), 4: (0, 2), 5: (7, 1), 6: (0, 2)}
    for number, (prefill, decode) in tokens.items():
        start = 10 * (number + 1)
        scene.step(
            number, (start, start + 1), start + 2, (start + 8, start + 9), [(start + 2, start + 8)],
            prefill_tokens=prefill, decode_tokens=decode, wait_reason=WaitReason.KV_BLOCKS,
        )  # fmt: skip
        scene.output(start + 9, start + 9, start + 9)
    own = engine(
        [
            (1, EventKind.PREFILL, 5), (4, EventKind.PREEMPTED, 7), (5, EventKind.RESUMED, 0),
            (5, EventKind.RECOMPUTE, 7),
        ],
        first_step=1, first_output_step=1, last_step=6, queued_ns=9, arrival_step=0, finished_ns=79,
    )  # fmt: skip
    flushes = [(29, 30), (39, 40), (49, 50), (69, 70), (79, 80)]
    request = server([own], flushes, arrival_ns=8, submit_ns=9, last_byte_ns=80, end_ns=80)
    return request, scene


def test_stretches_tell_the_story(request_and_scene):
    request, scene = request_and_scene
    found = stretches(scene.segment(request))
    assert [(s.group, s.start_ns // MS, s.duration_ns // MS) for s in found] == [
        ("admission", 8, 1),
        ("waiting", 9, 12),
        ("prefill", 21, 8),
        ("stream-out", 29, 1),
        ("decode", 30, 21),
        ("stall", 51, 10),
        ("decode", 61, 18),
        ("stream-out", 79, 1),
    ]
    waiting = found[1]
    assert [(s.cell, s.duration_ns // MS, s.steps, s.reasons) for s in waiting.shares] == [
        ("framework.wait_step_boundary", 2, 0, ()),
        ("framework.wait_kv_blocks", 10, 1, ("kv_blocks",)),
    ]
    assert found[4].steps == 3  # the schedule() of step 4 threw it out


def test_rows_follow_on_each_other(request_and_scene):
    request, scene = request_and_scene
    rows = waterfall(scene.segment(request))
    ends = [row.start_ns + row.duration_ns for row in rows]
    assert rows[0].start_ns == 8 * MS
    assert ends[-1] == 80 * MS
    assert ends[:-1] == [row.start_ns for row in rows[1:]]
    prefill = [(row.cell, row.duration_ns / MS) for row in rows if row.group == "prefill"]
    assert prefill == [
        ("framework.dispatch", 1),
        ("model.prefill", 2.5),
        ("model.prefill_interference", 2.5),
        ("model.batch_decode", 1),
        ("framework.update", 1),
    ]


def test_interference_names_steps_and_tokens(request_and_scene):
    request, scene = request_and_scene
    found = interference(scene.segment(request), {"e": scene.timeline})
    assert [(i.engine_uid, i.step, i.other_prefill_tokens, i.duration_ns / MS) for i in found] == [
        ("e", 2, 4, 3),
        ("e", 1, 5, 2.5),
    ]
    assert interference(scene.segment(request), {}) == []


def test_request_without_latency(scene, server):
    result = scene.segment(server([], arrival_ns=5, end_ns=5))
    assert waterfall(result) == []
    assert stretches(result) == []
