"""The HTTP side of the hook, around a real starlette application."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Mount, Route

from stratoscope.instrumentation import semconv as sc
from stratoscope.instrumentation.frontend import FrontendHook
from stratoscope.instrumentation.hook import Hook
from stratoscope.instrumentation.server_request import ServerRecord, current
from stratoscope.instrumentation.settings import Settings

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def chat(request: Request) -> StreamingResponse:
    await request.body()

    async def chunks() -> AsyncIterator[str]:
        for index in range(3):
            yield f"data: {index}\n\n"

    return StreamingResponse(chunks(), media_type="text/event-stream")


async def complete(request: Request) -> JSONResponse:
    record = current.get()
    return JSONResponse({"trace": f"{record.context.trace_id:032x}" if record else None})


async def broken(request: Request) -> JSONResponse:
    raise RuntimeError("theirs")


async def refuse(request: Request) -> JSONResponse:
    return JSONResponse({"error": "no"}, status_code=400)


async def hang(request: Request) -> JSONResponse:
    await asyncio.sleep(60)
    return JSONResponse({})


ROUTES = [
    Route("/v1/chat/completions", chat, methods=["POST"]),
    Route("/v1/completions", complete, methods=["POST"]),
    Route("/v1/broken", broken, methods=["POST"]),
    Route("/v1/refuse", refuse, methods=["POST"]),
    Route("/v1/hang", hang, methods=["POST"]),
    Route("/health", lambda request: PlainTextResponse("ok"), methods=["GET", "POST"]),
    Mount("/v1/inner", Starlette(routes=[Route("/completions", complete, methods=["POST"])])),
]


@pytest.fixture
def hook() -> Iterator[Hook]:
    made = Hook(Settings("http://127.0.0.1:9", "grpc"))
    made._gave_up = True  # no flush thread: the test reads what it would
    frontend = FrontendHook(made)
    assert made.patcher.wrap(Starlette, "__call__", "frontend.asgi", frontend.make_asgi)
    yield made
    made.patcher.unhook_all()


def call(
    path: str, headers: list[tuple[bytes, bytes]] | None = None, leave: bool = False
) -> list[dict[str, Any]]:
    """POST to the application; ``leave``: the client disconnects and the server cancels the task."""
    sent: list[dict[str, Any]] = []
    messages = [
        {"type": "http.request", "body": b"{", "more_body": True},
        {"type": "http.request", "body": b"}", "more_body": False},
    ]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop(0)
        await asyncio.sleep(60)
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {
        "type": "http", "method": "POST", "path": path, "headers": headers or [], "query_string": b"",
        "root_path": "", "scheme": "http", "server": ("127.0.0.1", 80), "http_version": "1.1",
    }  # fmt: skip

    async def main() -> None:
        task = asyncio.ensure_future(Starlette(routes=ROUTES)(scope, receive, send))
        if leave:
            await asyncio.sleep(0.05)
            task.cancel()
        await task

    try:
        asyncio.run(main())
    except asyncio.CancelledError:
        assert leave
    return sent


def records(hook: Hook) -> list[ServerRecord]:
    assert not hook.open
    return [record for kind, record in hook.finished if kind == sc.Record.SERVER]


def test_a_streamed_answer(hook: Hook) -> None:
    sent = call("/v1/chat/completions", [(b"traceparent", TRACEPARENT.encode())])
    assert b"".join(message.get("body", b"") for message in sent) == b"data: 0\n\ndata: 1\n\ndata: 2\n\n"
    (record,) = records(hook)
    assert (record.outcome, record.streaming, record.status) == (sc.Outcome.OK, True, 200)
    assert (record.method, record.route) == ("POST", "/v1/chat/completions")
    assert f"{record.context.trace_id:032x}" == TRACEPARENT.split("-")[1]
    assert f"{record.parent_span_id:016x}" == TRACEPARENT.split("-")[2]
    assert len(record.flushes) == 2 * 3
    times = [record.arrival_ns, record.body_ns, *record.flushes, record.last_byte_ns, record.end_ns]
    assert times == sorted(times)


def test_a_plain_answer_gets_a_trace_of_its_own(hook: Hook) -> None:
    (body,) = [message["body"] for message in call("/v1/completions") if "body" in message]
    (record,) = records(hook)
    assert f"{record.context.trace_id:032x}".encode() in body
    assert record.parent_span_id == 0 and not record.streaming
    assert current.get() is None


def test_their_exception_stays_theirs(hook: Hook) -> None:
    with pytest.raises(RuntimeError, match="theirs"):
        call("/v1/broken")
    (record,) = records(hook)
    assert (record.outcome, record.error_type) == (sc.Outcome.ERROR, "RuntimeError")
    assert hook.account.errors == 0


def test_a_refusal_is_an_error_with_its_status(hook: Hook) -> None:
    call("/v1/refuse")
    (record,) = records(hook)
    assert (record.outcome, record.error_type, record.status) == (sc.Outcome.ERROR, "400", 400)


def test_a_client_that_leaves(hook: Hook) -> None:
    call("/v1/hang", leave=True)
    (record,) = records(hook)
    assert record.outcome == sc.Outcome.ABORTED


def test_other_paths_are_left_alone(hook: Hook) -> None:
    assert call("/health")[0]["status"] == 200
    assert records(hook) == []


def test_an_application_inside_another_counts_once(hook: Hook) -> None:
    call("/v1/inner/completions")
    assert len(records(hook)) == 1


def test_a_fault_of_ours_reaches_nobody(hook: Hook, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise ValueError("ours")

    monkeypatch.setattr(ServerRecord, "sent", fail)
    monkeypatch.setattr(ServerRecord, "close", fail)
    for _ in range(4):
        assert call("/v1/chat/completions")[0]["status"] == 200
        hook.open.clear()
    assert hook.account.errors >= 5
    assert hook.account.disabled == ["frontend.asgi"]
    assert call("/v1/chat/completions")[0]["status"] == 200
