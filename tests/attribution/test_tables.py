from __future__ import annotations

import numpy as np
import pytest

from stratoscope.attribution.errors import AttributionError, TableError
from stratoscope.attribution.tables import (
    MAX_COUNT,
    OutputTable,
    StepTable,
    WorkerStepTable,
    columns_from_rows,
    matrix_from_rows,
)
from stratoscope.instrumentation import semconv as sc


def packed(*rows):
    return np.array(rows, "<i8").tobytes()


def test_columns_are_picked_by_name():
    found = columns_from_rows(["b", "new", "a"], packed([1, 2, 3], [4, 5, 6]), ["a", "b", "absent"])
    assert {name: values.tolist() for name, values in found.items()} == {
        "a": [3, 6],
        "b": [1, 4],
        "absent": [0, 0],
    }


@pytest.mark.parametrize(("columns", "size"), [(["a", "b"], 8), (["a"], 7), ([], 8)])
def test_rows_that_do_not_fit(columns, size):
    with pytest.raises(TableError, match=f"{size} bytes"):
        columns_from_rows(columns, b"\0" * size, ["a"])
    assert issubclass(TableError, AttributionError)
    assert issubclass(TableError, ValueError)


def test_table_without_its_key():
    with pytest.raises(TableError, match="StepTable needs a column 'step'"):
        StepTable.from_rows(["sched_start_ns"], packed([1]))
    assert len(StepTable.from_rows([], b"")) == 0


def test_steps_are_sorted_and_each_kept_once():
    table = StepTable.from_rows(
        ["step", "sched_start_ns"], packed([7, 70], [5, 50], [7, 71], [-3, 1], [2**63 - 1, 1])
    )
    assert table["step"].tolist() == [5, 7]
    assert table["sched_start_ns"].tolist() == [50, 70]
    assert table["flags"].tolist() == [0, 0]


def test_impossible_values_read_as_not_recorded():
    columns = ["step", "sched_start_ns", "prefill_tokens"]
    table = StepTable.from_rows(columns, packed([1, -5, -1], [2, 2**62, 2**60], [3, 9, 4]))
    assert table["sched_start_ns"].tolist() == [0, 0, 9]
    assert table["prefill_tokens"].tolist() == [0, MAX_COUNT, 4]


def test_concat_is_like_one_table():
    first = WorkerStepTable.from_rows(["step", "exec_start_ns"], packed([2, 20], [3, 30]))
    second = WorkerStepTable.from_rows(["step", "exec_start_ns"], packed([1, 10], [3, 30]))
    assert WorkerStepTable.concat([first, second])["exec_start_ns"].tolist() == [10, 20, 30]
    assert len(WorkerStepTable.concat([])) == 0


def test_output_lookup_spans_the_slices_of_a_batch():
    table = OutputTable.from_rows(
        sc.OUTPUT_COLUMNS,
        packed([50, 60, 65, 0, 1], [50, 66, 70, 0, 1], [90, 91, 92, 0, 1], [50, 1, 2, 1, 1]),
    )
    found, start, end = table.of_engine(0).lookup(np.array([45, 55, 85]), np.array([50, 80, 95]))
    assert found.tolist() == [True, False, True]
    assert (start[0], end[0], start[2], end[2]) == (60, 70, 91, 92)
    assert len(table.of_engine(5)) == 0


def test_a_process_with_one_engine_need_not_know_its_index():
    table = OutputTable.from_rows(sc.OUTPUT_COLUMNS, packed([50, 60, 65, 0, 1]))
    assert len(table.of_engine(3)) == 1


def test_matrix_from_rows():
    assert matrix_from_rows(("a", "b"), packed([1, 2], [3, 4])).tolist() == [[1, 2], [3, 4]]
    with pytest.raises(TableError):
        matrix_from_rows(("a", "b"), packed([1]))
