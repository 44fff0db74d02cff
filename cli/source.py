"""Where documents come from: a running agent, or OTLP files read here and now."""

from __future__ import annotations

import urllib.parse
from collections.abc import Sequence
from typing import Any, Protocol

from stratoscope.cli.errors import NO_DATA, USAGE, CliError

Document = dict[str, Any]


class Source(Protocol):
    """Gives the documents of the JSON API, each the same from an agent as from files."""

    def summary(self, window_s: float | None = None) -> Document:
        """The summary document, with the matrix of all phases."""

    def requests(self, limit: int) -> list[Document]:
        """A row for each of the ``limit`` slowest requests, slowest first."""

    def request(self, trace_id: str) -> Document:
        """One request's document. Raises :class:`CliError` when there is none."""


class AgentSource:
    """Asks the agent at ``url``."""

    def __init__(self, url: str | None = None) -> None:
        from stratoscope.cli import http

        self.url = (url or http.default_url()).rstrip("/")
        self._http = http

    def summary(self, window_s: float | None = None) -> Document:
        """See :class:`Source`."""
        query = None if window_s is None else {"window": window_s}
        document: Document = self._http.get_json(self.url, "/api/v1/summary", query)
        return document

    def requests(self, limit: int) -> list[Document]:
        """See :class:`Source`."""
        query = {"sort": "slowest", "limit": limit}
        answer = self._http.get_json(self.url, "/api/v1/requests", query)
        rows: list[Document] = answer["requests"][:limit]
        return rows

    def request(self, trace_id: str) -> Document:
        """See :class:`Source`."""
        try:
            path = f"/api/v1/requests/{urllib.parse.quote(trace_id, safe='')}"
            document: Document = self._http.get_json(self.url, path)
        except self._http.NotFound as error:
            raise CliError(f"{self.url}: {error}", NO_DATA) from error
        return document


class FileSource:
    """Reads OTLP files and attributes them in this process."""

    def __init__(self, paths: Sequence[str]) -> None:
        try:
            from stratoscope.collector import views
            from stratoscope.collector.analyze import AnalyzeError, analyze
        except ModuleNotFoundError as error:
            raise CliError(
                f"reading OTLP files needs {error.name}: pip install 'stratoscope[agent]'", USAGE
            ) from error
        try:
            self.analysis = analyze(paths)
        except AnalyzeError as error:
            raise CliError(str(error), NO_DATA) from error
        self._views = views

    def summary(self, window_s: float | None = None) -> Document:
        """See :class:`Source`."""
        return self._views.summary(self.analysis.attributor, window_s)

    def requests(self, limit: int) -> list[Document]:
        """See :class:`Source`."""
        rows: list[Document] = self._views.requests(self.analysis.attributor, "slowest", limit)["requests"]
        return rows

    def request(self, trace_id: str) -> Document:
        """See :class:`Source`."""
        document = self._views.request(self.analysis.attributor, trace_id)
        if document is None:
            raise CliError(f"no request with trace id {trace_id} in the files", NO_DATA)
        return document


def open_source(url: str | None, files: Sequence[str] | None) -> Source:
    """What ``--url`` or ``--file`` names; without either the local agent."""
    return FileSource(files) if files else AgentSource(url)
