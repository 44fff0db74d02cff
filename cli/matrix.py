"""``stratoscope matrix``: all requests' time, by layer and cause, across latency bands."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any

from stratoscope.cli.console import make_console, print_json, show
from stratoscope.cli.errors import NO_DATA, OK, USAGE, CliError
from stratoscope.cli.options import add_command, add_output, add_phase, add_source, window_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

WATCH_S = 2.0
_EXAMPLES = """\
  stratoscope matrix                          whole latency, as far back as the agent remembers
  stratoscope matrix --phase ttft --window 5m
  stratoscope matrix --watch
  stratoscope matrix --file /var/log/otlp/    from files that a Collector has written
  stratoscope matrix --json | jq '.matrix[] | select(.phase == "ttft")'
"""


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = add_command(subparsers, "matrix", "show where all requests' time went", _EXAMPLES)
    add_source(parser)
    add_phase(parser)
    parser.add_argument("--window", type=window_seconds, metavar="TIME", help="only the last 90s, 5m, 2h")
    parser.add_argument(
        "--watch", action="store_true", help=f"show it anew every {WATCH_S:.0f} s until Ctrl-C"
    )
    parser.add_argument("--all", action="store_true", help="list causes under 0.1 %% too")
    add_output(parser)
    parser.set_defaults(handler=main)


def main(args: argparse.Namespace) -> int:
    """Print the matrix once, or again and again."""
    from stratoscope.cli.source import open_source

    if args.watch and (args.json or args.svg or args.file):
        raise CliError(
            "--watch shows an agent's matrix on the terminal; leave out --json, --svg and --file", USAGE
        )
    source = open_source(args.url, args.file)
    if args.watch:
        return _watch(source, args)
    document = source.summary(args.window)
    if args.json:
        print_json(document)
    else:
        show(lambda c: c.print(view(document, args.phase, c.width, args.all)), args.svg, "stratoscope matrix")
    return OK if document["requests"] else NO_DATA


def view(document: dict[str, Any], phase: str, width: int, everything: bool = False) -> RenderableType:
    """Summary and matrix."""
    from rich.console import Group

    from stratoscope.cli.render_matrix import matrix_table
    from stratoscope.cli.render_summary import summary_lines

    return Group(*summary_lines(document), "", matrix_table(document["matrix"], phase, width, everything))


def _watch(source: Any, args: argparse.Namespace) -> int:
    from rich.live import Live

    console = make_console()
    if not console.is_terminal:
        raise CliError("--watch needs a terminal; leave it out to print the matrix once", USAGE)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(view(source.summary(args.window), args.phase, console.width, args.all), refresh=True)
            time.sleep(WATCH_S)
