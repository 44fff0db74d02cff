"""The token-share rule, by hand and against exact arithmetic."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stratoscope.attribution.charge import CHARGED_CELLS, split_execution
from stratoscope.attribution.tables import MAX_COUNT
from stratoscope.attribution.taxonomy import CELL_NAMES

counts = st.integers(0, MAX_COUNT)


def split(exec_ns, prefill, decode, own_prefill=0, own_recompute=0):
    arrays = [np.array([value], np.int64) for value in (exec_ns, prefill, decode, own_prefill, own_recompute)]
    return split_execution(*arrays)[0].tolist()


def test_columns():
    assert [CELL_NAMES[i].split(".")[1] for i in CHARGED_CELLS] == [
        "recompute", "prefill", "prefill_interference", "batch_decode", "decode",
    ]  # fmt: skip


def test_by_hand():
    assert split(100, 30, 70) == [0, 0, 30, 0, 70]
    assert split(10, 1, 2) == [0, 0, 3, 0, 7]  # 10 / 3 rounded down; the rest is its own
    assert split(100, 60, 40, 40) == [0, 40, 20, 40, 0]
    assert split(100, 60, 40, 0, 60) == [60, 0, 0, 40, 0]
    assert split(100, 50, 50, 10, 30) == [30, 10, 10, 50, 0]
    assert split(7, 0, 0) == [0, 0, 0, 0, 7]  # no token counts: its own
    assert split(7, 0, 0, 5) == [0, 7, 0, 0, 0]
    assert split(100, 10, 90, 50) == [0, 10, 0, 90, 0]  # more of its own than the step has: all of it


@given(st.integers(0, 2**62), counts, counts, counts, counts)
def test_exact_at_any_size(exec_ns, prefill, decode, own_prefill, own_recompute):
    parts = split(exec_ns, prefill, decode, own_prefill, own_recompute)
    assert sum(parts) == exec_ns
    assert min(parts) >= 0
    others = prefill - min(own_prefill + own_recompute, prefill)
    assert parts[2] == exec_ns * others // max(prefill + decode, 1)
