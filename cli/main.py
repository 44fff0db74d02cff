"""``stratoscope``: parse, dispatch, and turn every failure into a sentence and an exit code."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from stratoscope.cli import agent, analyze, demo, matrix, run, why
from stratoscope.cli.errors import EXIT_CODES_HELP, INTERRUPTED, CliError

_EPILOG = f"""\
start here:
  stratoscope demo                            see it work, no GPU needed
  stratoscope run -- vllm serve MODEL ...     your own vLLM, with an agent beside it
  stratoscope why --slowest 1                 where did the slowest request's time go?
  stratoscope matrix                          all requests: layer x cause x latency band

{EXIT_CODES_HELP}"""


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(
        prog="stratoscope",
        description="Where the time of every vLLM request went, across model, framework and infrastructure.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and stop")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in (demo, run, agent, matrix, why, analyze):
        module.register(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. ``argv`` defaults to the process's arguments."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without UTF-8 is no reason to fail
    args = build_parser().parse_args(argv)
    try:
        code: int = args.handler(args)
        sys.stdout.flush()
        return code
    except CliError as error:
        print(f"stratoscope {args.command}: {error}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader, such as `head`, has what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


class _Version(argparse.Action):
    """Looks the version up only when asked for it: reading metadata is slow."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib import metadata

        try:
            version = metadata.version("stratoscope")
        except metadata.PackageNotFoundError:
            version = "unknown (not installed)"
        parser.exit(message=f"stratoscope {version}\n")


if __name__ == "__main__":
    sys.exit(main())
