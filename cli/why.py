"""``stratoscope why``: where one request's time went, in order and in words."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING, Any

from stratoscope.cli.console import print_json, show
from stratoscope.cli.errors import NO_DATA, OK, USAGE, CliError
from stratoscope.cli.options import add_command, add_output, add_source, positive

if TYPE_CHECKING:
    from rich.console import Console

    from stratoscope.cli.source import Source

_TRACE_ID = re.compile(r"[0-9a-f]{6,32}", re.IGNORECASE)
_FULL = 32
_SEARCHED = 10_000  # as many as the agent gives at once
_EXAMPLES = """\
  stratoscope why --slowest 1
  stratoscope why 4bf92f3577b34da6a3ce929d0e0e4736
  stratoscope why --slowest 3 --file traces.json       from a file that a Collector has written
  stratoscope why --slowest 1 --json | jq -r '.requests[0].explanation[]'
"""


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = add_command(subparsers, "why", "explain one request's latency", _EXAMPLES)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "trace_id", nargs="?", metavar="TRACE_ID", help="32 hex digits, or a beginning of at least 6"
    )
    which.add_argument("--slowest", type=positive, metavar="N", help="the N slowest requests")
    add_source(parser)
    parser.add_argument("--all", action="store_true", help="show every stretch, however short")
    add_output(parser)
    parser.set_defaults(handler=main)


def main(args: argparse.Namespace) -> int:
    """Print one or several requests."""
    from stratoscope.cli.source import open_source

    if args.trace_id is not None and not _TRACE_ID.fullmatch(args.trace_id):
        raise CliError(
            f"{args.trace_id!r} is not a trace id: 32 hex digits, such as in a traceparent header,"
            " or a beginning of at least 6",
            USAGE,
        )
    source = open_source(args.url, args.file)
    trace_ids = [_full(source, args.trace_id.lower())] if args.trace_id else _slowest(source, args.slowest)
    if not trace_ids:
        raise CliError("no finished request is recorded yet; send some load and try again", NO_DATA)
    documents = [source.request(trace_id) for trace_id in trace_ids]
    if args.json:
        print_json({"requests": documents})
    else:
        show(lambda console: _paint(console, documents, args.all), args.svg, "stratoscope why")
    return OK


def _full(source: Source, trace_id: str) -> str:
    """The trace id that begins with ``trace_id``. Raises :class:`CliError` for none or several."""
    if len(trace_id) == _FULL:
        return trace_id
    known = (str(row["trace_id"]) for row in source.requests(_SEARCHED))
    found = sorted({known_id for known_id in known if known_id.startswith(trace_id)})
    if not found:
        raise CliError(f"no request's trace id begins with {trace_id}", NO_DATA)
    if len(found) > 1:
        raise CliError(f"{len(found)} trace ids begin with {trace_id}; give more digits", USAGE)
    return found[0]


def _slowest(source: Source, limit: int) -> list[str]:
    return [str(row["trace_id"]) for row in source.requests(limit)]


def _paint(console: Console, documents: list[dict[str, Any]], everything: bool) -> None:
    from stratoscope.cli.render_request import print_request

    for number, document in enumerate(documents):
        if number:
            console.print()
            console.rule(style="dim")
        print_request(console, document, everything)
