"""What the clients saw against what the server says."""

from __future__ import annotations

from typing import Any

import pytest

from stratoscope.demo.load import ClientRequest
from stratoscope.demo.result import client_document, machine, problems


def finished(name: str, ms: float) -> ClientRequest:
    sent_ns = 10**15
    return ClientRequest(
        0, "chat", name, sent_ns=sent_ns, last_byte_ns=sent_ns + int(ms * 1e6), status=200, outcome="ok"
    )


def aborted(name: str) -> ClientRequest:
    return ClientRequest(1, "abort", name, sent_ns=10**15, status=200, outcome="aborted")


def failed(name: str) -> ClientRequest:
    return ClientRequest(2, "chat", name, sent_ns=10**15, outcome="error", error="HTTP 500: no")


def test_outside_share_is_a_mean_over_matched_requests() -> None:
    results = [finished("a", 100.0), finished("b", 200.0), finished("c", 50.0), aborted("d")]
    document = client_document(results, {"a": 90.0, "b": 150.0, "d": 3.0, "else": 1.0})
    assert document["requests"] == 4
    assert document["outcomes"] == {"ok": 3, "aborted": 1}
    assert document["e2e_mean_ms"] == pytest.approx(350 / 3)
    assert document["outside_server_share_mean"] == pytest.approx((0.1 + 0.25) / 2)
    assert document["trace_ids_seen_share"] == pytest.approx(2 / 3)
    assert document["requests_seen_share"] == pytest.approx(3 / 4)


def test_nothing_finished_is_no_number() -> None:
    document = client_document([], {})
    assert document["e2e_mean_ms"] is document["outside_server_share_mean"] is None
    assert document["trace_ids_seen_share"] is document["requests_seen_share"] is None


@pytest.mark.parametrize(
    ("results", "seen", "residual_ns", "words"),
    [
        ([finished("a", 1)], {"a": 1.0}, 0, []),
        ([finished("a", 1), aborted("b")], {"a": 1.0, "b": 1.0}, 0, []),
        ([finished("a", 1)], {"a": 1.0}, 1, ["miss a request's measured latency by 1 ns"]),
        ([finished("a", 1), finished("b", 1)], {"a": 1.0}, 0, ["only 50.0% of the finished requests"]),
        ([finished("a", 1), aborted("b")], {"a": 1.0}, 0, ["only 50.0% of all requests"]),
        ([finished("a", 1), failed("b")], {"a": 1.0}, 0, ["1 of 2 requests failed; the first: HTTP 500: no"]),
    ],
)
def test_problems_are_named(
    results: list[ClientRequest], seen: dict[str, float], residual_ns: int, words: list[str]
) -> None:
    result: dict[str, Any] = {
        "requests": len(results),
        "conservation": {"max_abs_residual_ns": residual_ns},
        "client": client_document(results, seen),
    }
    found = problems(result, results)
    assert len(found) == len(words)
    assert all(word in text for word, text in zip(words, found, strict=True))


def test_an_agent_that_knows_nothing_is_a_problem() -> None:
    result = {
        "requests": 0,
        "conservation": {"max_abs_residual_ns": 0},
        "client": client_document([aborted("a")], {}),
    }
    assert "no request was attributed" in problems(result, [aborted("a")])


def test_the_machine_is_named() -> None:
    found = machine()
    assert found["cpus"] >= 1
    assert found["memory_gib"] > 0
    assert found["cpu"]
