"""The ring: order, wrap-around, and drops that are counted."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratoscope.instrumentation.ring import Ring


def rows_of(packed: bytes, width: int) -> list[tuple[int, ...]]:
    return [struct.unpack_from(f"<{width}q", packed, at) for at in range(0, len(packed), 8 * width)]


def test_rows_come_out_in_order_across_the_wrap() -> None:
    ring = Ring(2, 4)
    seen: list[tuple[int, ...]] = []
    for value in range(11):
        ring.push(value, -value)
        if value % 3 == 2:
            seen += rows_of(ring.drain(100), 2)
    seen += rows_of(ring.drain(100), 2)
    assert seen == [(value, -value) for value in range(11)]
    assert ring.dropped == 0


def test_a_full_ring_keeps_the_old_rows_and_counts_the_new() -> None:
    ring = Ring(1, 3)
    for value in range(5):
        ring.push(value)
    assert ring.dropped == 2
    assert rows_of(ring.drain(10), 1) == [(0,), (1,), (2,)]


def test_drain_takes_no_more_than_asked() -> None:
    ring = Ring(1, 8)
    for value in range(6):
        ring.push(value)
    assert rows_of(ring.drain(4), 1) == [(0,), (1,), (2,), (3,)]
    assert len(ring) == 2


@pytest.mark.parametrize("row", [(1,), (1, 2, 3), (1, 2**63)])
def test_a_row_that_does_not_fit_is_an_error_and_changes_nothing(row: tuple[int, ...]) -> None:
    ring = Ring(2, 2)
    with pytest.raises(struct.error):
        ring.push(*row)
    assert len(ring) == 0


@given(st.lists(st.one_of(st.integers(-(2**63), 2**63 - 1), st.none()), max_size=200), st.integers(1, 7))
def test_nothing_is_lost_uncounted(script: list[int | None], capacity: int) -> None:
    """Pushes (ints) and drains (None) in any order: out + inside + dropped = in, in order."""
    ring, out, accepted = Ring(1, capacity), [], []
    for action in script:
        if action is None:
            out += [row[0] for row in rows_of(ring.drain(3), 1)]
        else:
            before = ring.dropped
            ring.push(action)
            if ring.dropped == before:
                accepted.append(action)
    assert out == accepted[: len(out)]
    assert len(out) + len(ring) == len(accepted)
    assert len(accepted) + ring.dropped == sum(action is not None for action in script)
