"""JSON from the agent over HTTP, with errors that say what to do."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from stratoscope.cli.errors import NO_DATA, USAGE, CliError
from stratoscope.cli.options import DEFAULT_URL, URL_ENV, is_loopback

MAX_BYTES = 256 << 20


class NotFound(Exception):
    """The agent answers, and does not know what was asked for."""


def default_url() -> str:
    """The agent's address: ``STRATOSCOPE_URL``, else :data:`DEFAULT_URL`."""
    return os.environ.get(URL_ENV) or DEFAULT_URL


def get_json(base_url: str, path: str, query: dict[str, Any] | None = None, timeout_s: float = 10.0) -> Any:
    """The JSON document at ``base_url + path``.

    Raises :class:`NotFound` for a 404, :class:`CliError` for everything else that goes wrong.
    """
    base = base_url.rstrip("/")
    parts = urllib.parse.urlsplit(base)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise CliError(f"--url {base_url!r} must be an http(s) address such as {DEFAULT_URL}", USAGE)
    given = {key: value for key, value in (query or {}).items() if value is not None}
    url = base + path + ("?" + urllib.parse.urlencode(given) if given else "")
    request = urllib.request.Request(url, headers={"Accept": "application/json"})
    try:
        with _opener(parts.hostname).open(request, timeout=timeout_s) as response:
            body = response.read(MAX_BYTES + 1)
    except urllib.error.HTTPError as error:
        _raise_status(error, url)
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise CliError(
            f"no agent answers at {base} ({_reason(error)}): start one with `stratoscope agent`"
            " or `stratoscope run -- vllm serve ...`, or pass --url",
            NO_DATA,
        ) from error
    if len(body) > MAX_BYTES:
        raise CliError(f"{url}: the answer is larger than {MAX_BYTES >> 20} MiB; narrow it down", NO_DATA)
    try:
        return json.loads(body)
    except ValueError as error:
        raise CliError(
            f"{url}: the answer is not JSON; is this a Stratoscope agent? Pass its address with --url",
            NO_DATA,
        ) from error


def _opener(host: str) -> urllib.request.OpenerDirector:
    # A proxy set for the outside world cannot reach this machine's loopback interface.
    return urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if is_loopback(host) else []))


def _raise_status(error: urllib.error.HTTPError, url: str) -> Any:
    detail = ""
    try:
        document = json.loads(error.read(65536))
        detail = str(document.get("error") or document.get("detail") or "")
    except (ValueError, AttributeError, OSError):
        pass
    if error.code == 404 and detail:
        raise NotFound(detail) from error
    if error.code == 404:
        raise CliError(
            f"{url}: 404; is this a Stratoscope agent? Pass its address with --url", NO_DATA
        ) from error
    code = USAGE if error.code in (400, 422) else NO_DATA
    raise CliError(f"{url}: HTTP {error.code}{': ' + detail if detail else ''}", code) from error


def _reason(error: Exception) -> str:
    reason = getattr(error, "reason", error)
    if isinstance(reason, ConnectionRefusedError):
        return "connection refused"
    if isinstance(reason, TimeoutError):
        return "timed out"
    return str(getattr(reason, "strerror", None) or reason)
