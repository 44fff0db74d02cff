"""An ASGI app served by uvicorn in a thread of its own, for receivers and extensions.

uvicorn because it is well kept and in every vLLM environment already. The socket is bound here
first, so that a port in use is an error that names the configuration key.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from typing import Any

import uvicorn

from stratoscope.collector.component import StartError
from stratoscope.collector.config_schema import split_endpoint

log = logging.getLogger(__name__)
START_TIMEOUT_S = 10.0


def bind(endpoint: str, key: str) -> socket.socket:
    """A listening TCP socket at ``host:port``. Raises :class:`StartError` naming ``key``."""
    host, port = split_endpoint(endpoint)
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, proto)
    except OSError as error:
        raise StartError(f"{key}: cannot listen on {endpoint!r}: {error.strerror or error}") from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(128)
    except OSError as error:
        sock.close()
        raise StartError(
            f"{key}: cannot listen on {endpoint!r}: {error.strerror or error}."
            " Stop what uses the port, or choose another one."
        ) from error
    return sock


class HttpServer:
    """Serves ``app`` at ``endpoint`` between :meth:`start` and :meth:`shutdown`.

    ``key`` is the configuration key of the endpoint, for error messages. ``tls`` holds uvicorn's
    ``ssl_*`` arguments. Port 0 takes a free port; ``port`` tells which, once started.
    """

    def __init__(self, app: Any, endpoint: str, key: str, tls: dict[str, Any] | None = None) -> None:
        self.endpoint, self.key = endpoint, key
        self.port = 0
        self._config = uvicorn.Config(
            app,
            log_config=None,
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=2,
            **(tls or {}),
        )
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Bind, serve, and return once requests are answered. Raises :class:`StartError`."""
        try:
            self._config.load()
        except (OSError, ValueError) as error:  # unreadable or bad certificates
            raise StartError(f"{self.key}: cannot set up TLS: {error}") from error
        sock = bind(self.endpoint, self.key)
        self.port = int(sock.getsockname()[1])
        self._server = uvicorn.Server(self._config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [sock]}, name=f"http-{self.port}", daemon=True
        )
        self._thread.start()
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                raise StartError(
                    f"{self.key}: the HTTP server at {self.endpoint!r} did not start; see the log"
                )
            time.sleep(0.005)

    def shutdown(self, timeout_s: float) -> None:
        """Stop accepting, finish the requests in flight, close."""
        if self._server is None or self._thread is None:
            return
        self._server.should_exit = True
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._server.force_exit = True
            log.warning("%s: HTTP requests were still open after %.1f s", self.key, timeout_s)
        self._server = None
