"""W3C trace context."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratoscope.instrumentation.trace_context import TraceContext, new_trace, parse_traceparent

VALID = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_a_valid_header_survives_the_round_trip() -> None:
    context = parse_traceparent(VALID)
    assert context == TraceContext(0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331, 1)
    assert context is not None and context.header() == VALID


def test_a_future_version_may_carry_more_fields() -> None:
    assert parse_traceparent(VALID.replace("00-", "01-", 1) + "-extra") is not None


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "garbage",
        VALID[:-1],
        VALID.upper(),
        VALID + "-extra",
        VALID.replace("00-", "ff-", 1),
        "00-" + "0" * 32 + "-b7ad6b7169203331-01",
        "00-0af7651916cd43dd8448eb211c80319c-" + "0" * 16 + "-01",
        VALID.replace("0af7", "0ag7"),
    ],
)
def test_an_invalid_header_is_none(header: str | None) -> None:
    assert parse_traceparent(header) is None


@given(st.text(max_size=80))
def test_no_text_raises(header: str) -> None:
    parsed = parse_traceparent(header)
    assert parsed is None or parsed.trace_id > 0


def test_new_traces_differ() -> None:
    assert len({new_trace().trace_id for _ in range(100)}) == 100
