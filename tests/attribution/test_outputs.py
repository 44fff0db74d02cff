"""Which steps of a request give an output, and what is known of each."""

from __future__ import annotations

import pytest

from stratoscope.attribution.outputs import find_outputs
from stratoscope.attribution.stay import EngineStay
from stratoscope.attribution.taxonomy import CELL_NAMES
from stratoscope.instrumentation.semconv import EventKind, StepFlag, WaitReason

MS = 1_000_000


@pytest.fixture
def steps(scene):
    """Steps 0 to 9; step n is updated from 10n+18 to 10n+19 and processed from 10n+19 on."""
    for number in range(10):
        start = 10 + 10 * number
        scene.step(number, (start, start + 1), start + 2, (start + 8, start + 9), [(start + 2, start + 8)])
        scene.output(start + 9, start + 9, start + 10)
    return scene


def found(scene, request):
    return find_outputs(EngineStay(request, scene.timeline), scene.outputs)


def test_every_step_from_the_first_output_on(steps, engine):
    outputs = found(steps, engine(first_step=1, first_output_step=3, last_step=6))
    assert outputs.step.tolist() == [3, 4, 5, 6]
    assert (outputs.ready_ns // MS).tolist() == [49, 59, 69, 79]
    assert (outputs.end_ns // MS).tolist() == [50, 60, 70, 80]
    assert (outputs.missing == -1).all()


def test_not_from_steps_that_skipped_it(steps, engine):
    events = [(4, EventKind.SKIPPED, WaitReason.TOKEN_BUDGET)]
    assert found(steps, engine(events, first_step=1, first_output_step=3, last_step=6)).step.tolist() == [
        3,
        5,
        6,
    ]


def test_only_from_the_last_chunk_of_a_recompute(steps, engine):
    events = [
        (1, EventKind.PREFILL, 4), (2, EventKind.PREFILL, 4), (4, EventKind.PREEMPTED, 8),
        (6, EventKind.RESUMED, 0), (6, EventKind.RECOMPUTE, 4),
        (7, EventKind.RECOMPUTE, 4), (7, EventKind.PREFILL, 1),
    ]  # fmt: skip
    outputs = found(steps, engine(events, first_step=1, first_output_step=2, last_step=8))
    assert outputs.step.tolist() == [2, 3, 7, 8]  # out from 4 to 6; 6 is the first chunk of two


def test_not_from_a_step_whose_output_never_came(steps, engine):
    steps.steps[4] |= {"update_start_ns": 0, "update_end_ns": 0, "flags": int(StepFlag.NO_OUTPUT)}
    assert found(steps, engine(first_step=3, first_output_step=3, last_step=5)).step.tolist() == [3, 5]


def test_none_without_a_first_output(steps, engine):
    assert len(found(steps, engine(first_step=3, last_step=5))) == 0


def test_lost_rows_at_both_ends(steps, engine):
    steps.steps = [row for row in steps.steps if row["step"] not in (3, 9)]
    outputs = found(steps, engine(first_step=1, first_output_step=3, last_step=9))
    assert outputs.step.tolist() == [3, 4, 5, 6, 7, 8, 9]
    names = [CELL_NAMES[code] if code >= 0 else "" for code in outputs.missing]
    assert names == ["unattributed.steps_missing", "", "", "", "", "", "unattributed.steps_missing"]
    assert (outputs.ready_ns[[0, -1]] // MS).tolist() == [39, 99]  # the end of the step before
