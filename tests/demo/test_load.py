"""The load driver against a small real HTTP server that streams as vLLM does."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from stratoscope.demo.load import ClientRequest, drive
from stratoscope.demo.workload import CHAT_PATH, COMPLETION_PATH, Ask, Kind, Mix, ask


class SseServer:
    """Speaks the parts of the OpenAI protocol that the driver uses, and remembers what came."""

    def __init__(self) -> None:
        self.traceparents: list[str] = []
        self.open = self.most_open = 0
        self.times: dict[str, tuple[int, int]] = {}  # trace id: arrival, last write; monotonic ns
        self.disconnects = 0
        self.fail_with: int | None = None

    async def handle(self, request: web.Request) -> web.StreamResponse:
        arrived_ns = time.monotonic_ns()
        traceparent = request.headers["traceparent"]
        self.traceparents.append(traceparent)
        body = await request.json()
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            if self.fail_with:
                return web.json_response({"error": {"message": "no"}}, status=self.fail_with)
            if not body["stream"]:
                await asyncio.sleep(0.005)
                response: web.StreamResponse = web.json_response({"choices": [{"text": "x"}]})
            else:
                response = await self.stream(request, body["max_tokens"])
            self.times[traceparent.split("-")[1]] = (arrived_ns, time.monotonic_ns())
            return response
        except (ConnectionResetError, asyncio.CancelledError):
            self.disconnects += 1
            raise
        finally:
            self.open -= 1

    async def stream(self, request: web.Request, tokens: int) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for token in range(tokens):
            await response.write(f"data: {json.dumps({'token': token})}\n\n".encode())
            await asyncio.sleep(0.002)
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_post(CHAT_PATH, self.handle)
        app.router.add_post(COMPLETION_PATH, self.handle)
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


def run(server: SseServer, make: Any, **options: Any) -> list[ClientRequest]:
    async def main() -> list[ClientRequest]:
        async with server.running() as url:
            return await drive(url, make, **options)

    return asyncio.run(main())


def chat(index: int, tokens: int = 6, leave: int | None = None) -> Ask:
    return Ask(
        index, Kind.ABORT if leave else Kind.CHAT, CHAT_PATH, {"stream": True, "max_tokens": tokens}, leave
    )


def test_every_request_is_sent_once_under_its_own_trace_id() -> None:
    server = SseServer()
    results = run(server, chat, concurrency=4, requests=15)
    assert sorted(r.index for r in results) == list(range(15))
    sent = [header.split("-") for header in server.traceparents]
    assert sorted(parts[1] for parts in sent) == sorted(r.trace_id for r in results)
    assert len({r.trace_id for r in results}) == 15
    assert all(parts[0] == "00" and parts[3] == "01" and len(parts[2]) == 16 for parts in sent)


def test_concurrency_is_reached_and_never_exceeded() -> None:
    server = SseServer()
    run(server, chat, concurrency=5, requests=20)
    assert server.most_open == 5


def test_client_times_enclose_the_servers() -> None:
    server = SseServer()
    for result in run(server, chat, concurrency=2, requests=4):
        assert result.outcome == "ok" and result.status == 200
        arrived_ns, written_ns = server.times[result.trace_id]
        assert result.sent_ns <= arrived_ns < written_ns
        assert arrived_ns < result.first_chunk_ns == result.chunks_ns[0] <= result.chunks_ns[-1]
        assert result.chunks_ns[-1] <= result.last_byte_ns
        assert result.chunks_ns == sorted(result.chunks_ns) and len(result.chunks_ns) > 1
        assert result.e2e_ns == result.last_byte_ns - result.sent_ns > 0


def test_a_client_that_leaves_is_seen_by_the_server() -> None:
    server = SseServer()
    results = run(server, lambda i: chat(i, tokens=500, leave=3), concurrency=2, requests=2)
    assert [r.outcome for r in results] == ["aborted", "aborted"]
    assert all(len(r.chunks_ns) == 3 and r.last_byte_ns == 0 and r.e2e_ns == 0 for r in results)
    assert server.disconnects == 2


def test_an_error_status_is_a_result_with_the_servers_words() -> None:
    server = SseServer()
    server.fail_with = 503
    (result,) = run(server, chat, concurrency=1, requests=1)
    assert (result.outcome, result.status) == ("error", 503)
    assert "503" in result.error and '"no"' in result.error


def test_no_server_is_a_result() -> None:
    (result,) = asyncio.run(drive("http://127.0.0.1:9", chat, concurrency=1, requests=1))
    assert result.outcome == "error" and "ClientConnectorError" in result.error


def test_duration_ends_the_load() -> None:
    seen: list[ClientRequest] = []
    results = run(SseServer(), chat, concurrency=2, duration_s=0.2, done=seen.append)
    assert results and seen == results


def test_a_load_without_an_end_is_refused() -> None:
    with pytest.raises(ValueError, match="requests, duration_s, or both"):
        asyncio.run(drive("http://127.0.0.1:9", chat, concurrency=1))


MIX = Mix(dict.fromkeys(Kind, 1.0))


def test_the_same_seed_asks_the_same() -> None:
    first = [ask(MIX, "m", 7, i) for i in range(50)]
    assert first == [ask(MIX, "m", 7, i) for i in range(50)]
    assert first != [ask(MIX, "m", 8, i) for i in range(50)]


@pytest.mark.parametrize("kind", list(Kind))
def test_each_kind_asks_for_what_it_is_named_after(kind: Kind) -> None:
    asks = [ask(Mix({kind: 1.0}), "m", 1, i) for i in range(10)]
    assert {a.kind for a in asks} == {kind}
    for a in asks:
        assert a.body["stream"] is (kind is not Kind.COMPLETION)
        assert (a.path == COMPLETION_PATH) is (kind is Kind.COMPLETION)
        assert (a.abort_after_chunks is not None) is (kind is Kind.ABORT)
        assert a.body.get("n", 1) == (4 if kind is Kind.CHOICES else 1)
        assert ("logprobs" in a.body) is (kind is Kind.SAMPLING)
        prompt = a.body["prompt"] if kind is Kind.COMPLETION else a.body["messages"][0]["content"]
        low, high = MIX.long_words if kind is Kind.LONG_PROMPT else MIX.chat_words
        assert low <= len(prompt.split()) - 1 <= high
