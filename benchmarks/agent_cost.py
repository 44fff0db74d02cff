"""What the agent costs a finished request: CPU time by stage, and memory.

Replays OTLP files recorded from a real vLLM (the agent's ``file`` exporter writes them) in one
thread, each round with a fresh agent::

    python benchmarks/agent_cost.py traces.json [--rounds 5]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from machine import describe

from stratoscope.attribution.matrix import PercentileBands
from stratoscope.collector import analyze, views
from stratoscope.collector.assembler import Limits
from stratoscope.collector.attributor import Attributor, Options
from stratoscope.collector.records import RecordParser
from stratoscope.collector.synth import StepLedger, build


def main() -> None:
    """Print the measurements as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="+")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    problems: list[str] = []
    messages = [m for path in args.paths for m in analyze._messages(Path(path), problems)]
    if not messages:
        sys.exit(f"no OTLP traces in {', '.join(args.paths)}: {'; '.join(problems[:3])}")
    rounds = [measure(messages) for _ in range(args.rounds)]
    best = min(rounds, key=lambda row: row["us_per_request"])
    print(json.dumps({"machine": describe(), "best_of": args.rounds, **best, **memory(messages)}, indent=2))


def measure(messages: list[Any]) -> dict[str, float]:
    """CPU microseconds a request, by stage; one round."""
    core = _attributor()
    parser = RecordParser()
    spans = sum(len(s.spans) for m in messages for r in m.resource_spans for s in r.scope_spans)
    parse_s = _cpu(lambda: [parser.parse(message) for message in messages])
    take_s = _cpu(lambda: [core.take(message, 0.0) for message in messages])
    finished: list[Any] = []
    finish_s = _cpu(lambda: finished.extend(core.finish(0.0, at_end=True)))
    timelines = core.assembler.timelines()
    synth_s = _cpu(lambda: build(finished, timelines, StepLedger()))
    summary_s = _cpu(lambda: views.summary(core))
    count = max(len(finished), 1)
    return {
        "requests": len(finished),
        "spans": spans,
        "parse_us_per_span": parse_s / spans * 1e6,
        "parse_and_join_us": take_s / count * 1e6,
        "attribute_and_store_us": finish_s / count * 1e6,
        "us_per_request": (take_s + finish_s) / count * 1e6,
        "requests_per_s": count / (take_s + finish_s),
        "child_spans_us_if_exported": synth_s / count * 1e6,
        "summary_ms": summary_s * 1e3,
    }


def memory(messages: list[Any]) -> dict[str, float]:
    """Python and numpy bytes that stay allocated, a request with its segments."""
    tracemalloc.start()
    core = _attributor()
    for message in messages:
        core.take(message, 0.0)
    core.finish(0.0, at_end=True)
    count = max(len(core.store), 1)
    held = tracemalloc.get_traced_memory()[0]
    for row in core.store.rows():
        row.finished = None
    without = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return {"bytes_per_request_all": held / count, "of_which_segments": (held - without) / count}


def _attributor() -> Attributor:
    return Attributor(Options(Limits(), PercentileBands()))


def _cpu(work: Any) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


if __name__ == "__main__":
    main()
