"""CPU time of a real vLLM server under one load: without the hook, with it, with vLLM's own tracing.

Four modes, in turn, forth and back (ABCD DCBA), each a fresh server with the same seeded load after
a warm-up: ``off`` (stratoscope installed, no endpoint), ``hook``, ``vllm`` (``--otlp-traces-endpoint``)
and ``both``. Both send to a real agent. Compared is the CPU time of the server's processes (API
server, engine core, worker) during the load, per request; the drift guard is the difference between
the two runs of the same mode. Worker and engine core spin while they wait for each other, so their
CPU time holds waiting as well: read the API server's column, and the hook's own clock.

    python benchmarks/hook_server_cost.py [--requests 200] [--rounds 1] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "tests" / "integration")]
import machine
import vllm_run

from stratoscope.demo.scenario import SCENARIOS
from stratoscope.demo.server import ServerOptions

MODES = ("off", "hook", "vllm", "both")
_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_by_role(parent: int) -> dict[str, float]:
    """CPU seconds of the process tree below ``parent``, by role."""
    children: dict[int, list[int]] = defaultdict(list)
    times: dict[int, tuple[str, float]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                text = (entry / "stat").read_text()
                name = (entry / "cmdline").read_bytes().split(b"\0")[0].decode("utf-8", "replace")
            except OSError:
                continue
            fields = text.rpartition(")")[2].split()
            children[int(fields[1])].append(int(entry.name))
            times[int(entry.name)] = (name, (int(fields[11]) + int(fields[12])) / _TICKS)
    found: dict[str, float] = defaultdict(float)
    todo = [parent]
    while todo:
        pid = todo.pop()
        todo += children[pid]
        name, seconds = times.get(pid, ("", 0.0))
        role = "engine core" if "EngineCore" in name else "worker" if "Worker" in name else "api server"
        found[role] += seconds
    return found


def measure(mode: str, requests: int, directory: Path) -> dict[str, float]:
    """One server, one load: CPU ms per request by role."""
    directory.mkdir()
    with vllm_run.agent(directory) as (_, grpc_port, source, _file):
        endpoint = f"http://127.0.0.1:{grpc_port}"
        extra = ("--otlp-traces-endpoint", endpoint) if mode in ("vllm", "both") else ()
        options = ServerOptions(
            max_num_seqs=32, extra_args=extra, env={"OTEL_EXPORTER_OTLP_TRACES_INSECURE": "true"}
        )
        with vllm_run.server(directory, options, endpoint if mode in ("hook", "both") else None) as server:
            mix = SCENARIOS["mixed"].mix
            vllm_run.drive(server.base_url, mix, 40, 32, seed=9)
            time.sleep(2)
            before = cpu_by_role(server.pid)
            vllm_run.drive(server.base_url, mix, requests, 32, seed=1)
            time.sleep(3)  # the last flush belongs to the bill
            after = cpu_by_role(server.pid)
            result = {role: (after[role] - before[role]) * 1e3 / requests for role in after}
            if mode == "hook":
                hook = source.summary()["hook"]
                for name in (
                    "us_per_step_core",
                    "us_per_step_worker",
                    "us_per_step_overlapped",
                    "us_per_request",
                ):
                    result[f"own clock: {name}"] = hook[name]
                flush = sum(p["flush_cpu_ns"] for p in hook["processes"])
                result["own clock: flush thread, all processes, us_per_request"] = (
                    flush / 1e3 / hook["requests"]
                )
            return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=1, help="how often to go forth and back")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    runs: dict[str, list[dict[str, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as scratch:
        for number, mode in enumerate((MODES + MODES[::-1]) * options.rounds):
            runs[mode].append(measure(mode, options.requests, Path(scratch) / f"{number}-{mode}"))
            print(f"{mode}: {runs[mode][-1]}", file=sys.stderr)
    result = {
        "machine": machine.describe(),
        "requests": options.requests,
        "median": {
            mode: {key: statistics.median(run[key] for run in rows) for key in rows[0]}
            for mode, rows in runs.items()
        },
        "drift": {
            mode: {key: max(run[key] for run in rows) - min(run[key] for run in rows) for key in rows[0]}
            for mode, rows in runs.items()
        },
    }
    if options.json:
        print(json.dumps(result, indent=2))
        return
    print(result["machine"])
    print("CPU ms per request (largest difference between runs of the same mode)")
    for mode in MODES:
        for key, value in result["median"][mode].items():
            print(f"  {mode:6} {key:58} {value:9.3f}  ({result['drift'][mode][key]:.3f})")


if __name__ == "__main__":
    main()
