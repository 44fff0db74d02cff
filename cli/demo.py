"""``stratoscope demo``: a real vLLM, real load, and where the time went."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

from stratoscope.cli.errors import USAGE, CliError
from stratoscope.cli.options import add_command, positive, window_seconds

_EXAMPLES = """\
  stratoscope demo                                    stays up until Ctrl-C, for a look around
  stratoscope demo --once --json out.json             ends by itself, writes the result
  stratoscope demo --scenario kv-starved --requests 400 --concurrency 96
  stratoscope demo --once --keep-logs logs/ --vllm-args="--max-num-seqs 8"
"""
SCENARIO_NAMES = ("mixed", "kv-starved", "interference")


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = add_command(
        subparsers, "demo", "run a real vLLM with a tiny model and explain its latency", _EXAMPLES
    )
    parser.add_argument(
        "--once", action="store_true", help="stop when the load is done and the result is shown"
    )
    parser.add_argument("--json", metavar="FILE", help="write the result as one JSON document (- for stdout)")
    parser.add_argument("--svg", metavar="FILE", help="write the result that is shown as an SVG picture")
    load = parser.add_argument_group("load")
    load.add_argument("--scenario", choices=SCENARIO_NAMES, default="mixed", help="(default: mixed)")
    load.add_argument("--requests", type=positive, metavar="N", help="how many requests (default: 240)")
    load.add_argument("--concurrency", type=positive, metavar="N", help="how many at a time")
    load.add_argument(
        "--duration", type=window_seconds, metavar="TIME", help="send as many as fit in 90s, 5m"
    )
    load.add_argument(
        "--seed", type=int, default=0, metavar="N", help="another mix of the same kind (default: 0)"
    )
    server = parser.add_argument_group("server")
    server.add_argument("--port", type=positive, metavar="N", help="of the vLLM server (default: a free one)")
    server.add_argument(
        "--api-port", type=positive, metavar="N", help="of the agent's API (default: 9464, else a free one)"
    )
    server.add_argument("--tensor-parallel-size", type=positive, default=1, metavar="N", help="(default: 1)")
    server.add_argument("--api-server-count", type=positive, default=1, metavar="N", help="(default: 1)")
    server.add_argument(
        "--async-scheduling", action="store_true", help="force it on, where vLLM's CPU build keeps it off"
    )
    server.add_argument(
        "--vllm-args",
        default="",
        metavar="ARGS",
        help='more arguments for vllm serve: --vllm-args="--max-num-seqs 8"',
    )
    server.add_argument(
        "--work-dir", type=Path, metavar="DIR", help="where the model is kept (default: the cache)"
    )
    server.add_argument("--keep-logs", type=Path, metavar="DIR", help="keep the logs of agent and vLLM there")
    parser.set_defaults(handler=main)


def main(args: argparse.Namespace) -> int:
    """Check what is needed, then run it."""
    if importlib.util.find_spec("vllm") is None or importlib.util.find_spec("aiohttp") is None:
        raise CliError(
            "the demo needs vLLM in this environment: `make demo` sets one up for the CPU,"
            " or install it (pip install vllm)",
            USAGE,
        )
    from stratoscope.demo import run

    return run.main(args)
