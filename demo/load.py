"""A closed-loop load driver that keeps its own times.

``concurrency`` clients each send a request, read the answer to its last byte, and send the next.
Every request carries its own ``traceparent``, so what the client saw can be held against what the
server recorded. Times are ``time.monotonic_ns()``, on Linux the same clock in all processes of a
host, and so comparable with the server's.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import aiohttp

from stratoscope.demo.workload import Ask

REQUEST_TIMEOUT_S = 300.0
Done = Callable[["ClientRequest"], None]


@dataclass(slots=True)
class ClientRequest:
    """One request as its client saw it; times in ns, 0 where it did not come to that.

    ``chunks_ns`` holds the arrival of each piece of the body; ``outcome`` is ``ok``, ``aborted``
    (this client went away, as planned) or ``error``, with ``error`` in words.
    """

    index: int
    kind: str
    trace_id: str
    sent_ns: int = 0
    headers_ns: int = 0
    first_chunk_ns: int = 0
    last_byte_ns: int = 0
    chunks_ns: list[int] = field(default_factory=list)
    status: int = 0
    outcome: str = "error"
    error: str = ""

    @property
    def e2e_ns(self) -> int:
        """From sending the request to the last byte of the answer; 0 without one."""
        return self.last_byte_ns - self.sent_ns if self.last_byte_ns else 0


async def drive(
    base_url: str,
    make_ask: Callable[[int], Ask],
    concurrency: int,
    *,
    requests: int | None = None,
    duration_s: float | None = None,
    done: Done = lambda _: None,
) -> list[ClientRequest]:
    """Send ``requests`` requests, or as many as fit in ``duration_s`` seconds, whichever ends first.

    ``make_ask(i)`` says what request ``i`` is; ``done`` is called after each. A failing request is
    a result, not an exception. Raises ``ValueError`` when neither end is given.
    """
    if requests is None and duration_s is None:
        raise ValueError("give requests, duration_s, or both: a load without an end never returns")
    deadline = None if duration_s is None else time.monotonic() + duration_s
    results: list[ClientRequest] = []
    next_index = 0

    async def client(session: aiohttp.ClientSession) -> None:
        nonlocal next_index
        while (requests is None or next_index < requests) and (
            deadline is None or time.monotonic() < deadline
        ):
            ask = make_ask(next_index)
            next_index += 1
            result = await send(session, base_url, ask)
            results.append(result)
            done(result)

    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    # A connection a request: a kept one may be closed by the server just as the next request is sent.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with (
        aiohttp.ClientSession(timeout=timeout, connector=connector) as session,
        asyncio.TaskGroup() as group,
    ):
        for _ in range(concurrency):
            group.create_task(client(session))
    return results


async def send(session: aiohttp.ClientSession, base_url: str, ask: Ask) -> ClientRequest:
    """Make one request and read its answer, or leave where ``ask`` says so."""
    result = ClientRequest(ask.index, str(ask.kind), secrets.token_hex(16))
    headers = {"traceparent": f"00-{result.trace_id}-{secrets.token_hex(8)}-01"}
    result.sent_ns = time.monotonic_ns()
    try:
        async with session.post(base_url + ask.path, json=ask.body, headers=headers) as response:
            result.headers_ns = time.monotonic_ns()
            result.status = response.status
            await _read(response, result, ask.abort_after_chunks)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        result.outcome, result.error = "error", f"{type(error).__name__}: {error}"
    return result


async def _read(response: aiohttp.ClientResponse, result: ClientRequest, leave_after: int | None) -> None:
    head = failure = b""
    async for chunk in response.content.iter_any():
        now = time.monotonic_ns()
        if not result.chunks_ns:
            result.first_chunk_ns = now
            head = chunk
        result.chunks_ns.append(now)
        if chunk.startswith(b'data: {"error"'):  # vLLM reports a failure amid a stream in the stream
            failure = failure or chunk
        if leave_after is not None and len(result.chunks_ns) >= leave_after and response.status < 400:
            result.outcome = "aborted"
            response.close()  # drops the connection: the server sees its client go away
            return
    result.last_byte_ns = time.monotonic_ns()
    if response.status >= 400:
        result.error = f"HTTP {response.status}: {_words(head)}"
    elif failure:
        result.error = _words(failure)
    else:
        result.outcome = "ok"


def _words(body: bytes) -> str:
    return body[:500].decode("utf-8", "replace").strip()
