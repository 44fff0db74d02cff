"""``stratoscope analyze``: the same results from OTLP files, without any service."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from stratoscope.cli.console import print_json, show
from stratoscope.cli.errors import NO_DATA, OK, PROBLEM
from stratoscope.cli.options import add_command, add_output, add_phase, positive, share

if TYPE_CHECKING:
    from rich.console import Console

_EXAMPLES = """\
  stratoscope analyze traces.json
  stratoscope analyze /var/log/otlp/ --phase ttft --slowest 5
  stratoscope analyze run.otlp --fail-on-unattributed 1%      for a pipeline: exit 1 if more is unexplained
  stratoscope analyze run.otlp --json > result.json
"""


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = add_command(subparsers, "analyze", "attribute latency offline, from OTLP files", _EXAMPLES)
    parser.add_argument(
        "paths",
        nargs="+",
        metavar="PATH",
        help="OTLP in protobuf or JSON, as the Collector's file exporter writes it",
    )
    parser.add_argument(
        "--slowest", type=positive, default=10, metavar="N", help="how many to list (default: 10)"
    )
    add_phase(parser)
    parser.add_argument("--all", action="store_true", help="list causes under 0.1 %% too")
    parser.add_argument(
        "--fail-on-unattributed",
        type=share,
        metavar="SHARE",
        help="exit 1 if the mean unattributed share of a request is larger, such as 0.01 or 1%%",
    )
    add_output(parser)
    parser.set_defaults(handler=main)


def main(args: argparse.Namespace) -> int:
    """Print the summary of the files."""
    from stratoscope.cli.source import FileSource

    source = FileSource(args.paths)
    document = source.summary()
    document["slowest"] = source.requests(args.slowest)
    document["problems"] = source.analysis.problems
    for problem in source.analysis.problems:
        print(f"stratoscope analyze: {problem}", file=sys.stderr)
    if args.json:
        print_json(document)
    else:
        show(lambda console: _paint(console, document, args), args.svg, "stratoscope analyze")
    if not document["requests"]:
        return NO_DATA
    conservation = document["conservation"]
    too_much = (
        args.fail_on_unattributed is not None
        and (conservation["unattributed_share_mean"] or 0.0) > args.fail_on_unattributed
    )
    return PROBLEM if conservation["max_abs_residual_ns"] or too_much else OK


def _paint(console: Console, document: dict[str, Any], args: argparse.Namespace) -> None:
    from stratoscope.cli.matrix import view
    from stratoscope.cli.render_summary import slowest_table

    console.print(view(document, args.phase, console.width, args.all))
    if document["slowest"]:
        console.print()
        console.print(slowest_table(document["slowest"][: args.slowest], console.width))
