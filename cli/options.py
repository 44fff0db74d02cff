"""Command line options that several subcommands share."""

from __future__ import annotations

import argparse
import ipaddress
import re

from stratoscope.cli.errors import EXIT_CODES_HELP

DEFAULT_URL = "http://127.0.0.1:9464"
URL_ENV = "STRATOSCOPE_URL"
PHASES = ("e2e", "ttft", "decode", "itl")
_WINDOW = re.compile(r"(\d+(?:\.\d+)?)(s|m|h)?")
_UNIT_S = {"s": 1.0, "m": 60.0, "h": 3600.0, None: 1.0}


def add_command(
    subparsers: argparse._SubParsersAction[argparse.ArgumentParser], name: str, summary: str, examples: str
) -> argparse.ArgumentParser:
    """A subcommand's parser, with examples and the exit codes below its options."""
    return subparsers.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=f"examples:\n{examples}\n{EXIT_CODES_HELP}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def add_source(parser: argparse.ArgumentParser) -> None:
    """``--url`` or ``--file``: where the documents come from."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--url", help=f"the agent's address (default: ${URL_ENV}, else {DEFAULT_URL})")
    group.add_argument(
        "--file", nargs="+", metavar="PATH", help="OTLP files or directories of them, read without an agent"
    )


def add_output(parser: argparse.ArgumentParser) -> None:
    """``--json`` and ``--svg``."""
    parser.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
    parser.add_argument("--svg", metavar="FILE", help="also write what is shown as an SVG picture")


def add_phase(parser: argparse.ArgumentParser) -> None:
    """``--phase``: which part of a request's latency."""
    parser.add_argument(
        "--phase",
        choices=PHASES,
        default="e2e",
        help="e2e: all of it; ttft: to the first token; decode: the rest; itl: between tokens (default: e2e)",
    )


def window_seconds(text: str) -> float:
    """``90``, ``90s``, ``5m``, ``2h`` to seconds, for argparse."""
    match = _WINDOW.fullmatch(text.strip())
    if match is None or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} must be a time such as 90s, 5m or 2h")
    return float(match[1]) * _UNIT_S[match[2]]


def positive(text: str) -> int:
    """A whole number of at least one, for argparse."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return int(text)


def share(text: str) -> float:
    """A share of one, ``0.01`` or ``1%``, for argparse."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a share such as 0.01 or 1%")
    return value


def is_loopback(host: str) -> bool:
    """Whether ``host`` names this machine by its loopback interface."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
