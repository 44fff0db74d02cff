"""Holds what the clients saw against what the server's telemetry says, request by request."""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from stratoscope.demo.load import ClientRequest


def client_document(results: Sequence[ClientRequest], server_e2e_ms: Mapping[str, float]) -> dict[str, Any]:
    """The ``client`` part of the result.

    ``server_e2e_ms`` maps trace ids to the server's own latency. ``outside_server_share`` is the
    part of a finished request's client latency that the server did not see: connection, kernel,
    the client itself; matched by trace id.
    """
    finished = [r for r in results if r.outcome == "ok"]
    seen = [r for r in finished if r.trace_id in server_e2e_ms]
    outside = [1.0 - server_e2e_ms[r.trace_id] * 1e6 / r.e2e_ns for r in seen]
    return {
        "requests": len(results),
        "outcomes": dict(Counter(r.outcome for r in results)),
        "kinds": dict(Counter(r.kind for r in results)),
        "e2e_mean_ms": fmean(r.e2e_ns for r in finished) / 1e6 if finished else None,
        "outside_server_share_mean": fmean(outside) if outside else None,
        "trace_ids_seen_share": len(seen) / len(finished) if finished else None,
        "requests_seen_share": sum(r.trace_id in server_e2e_ms for r in results) / len(results)
        if results
        else None,
    }


def problems(result: Mapping[str, Any], results: Sequence[ClientRequest]) -> list[str]:
    """What is wrong with the run, in sentences; empty when all is well."""
    found = []
    failed = [r for r in results if r.outcome == "error"]
    if failed:
        found.append(f"{len(failed)} of {len(results)} requests failed; the first: {failed[0].error}")
    residual_ns = result["conservation"]["max_abs_residual_ns"]
    if not result["requests"]:
        found.append("no request was attributed")
    elif residual_ns != 0:
        found.append(f"segments miss a request's measured latency by {residual_ns} ns")
    client = result["client"]
    if client["trace_ids_seen_share"] is not None and client["trace_ids_seen_share"] < 1.0:
        found.append(
            f"only {client['trace_ids_seen_share']:.1%} of the finished requests' trace ids reached the agent"
        )
    elif client["requests_seen_share"] is not None and client["requests_seen_share"] < 1.0 and not failed:
        found.append(f"only {client['requests_seen_share']:.1%} of all requests' trace ids reached the agent")
    return found


def machine() -> dict[str, Any]:
    """What it ran on."""
    return {
        "cpu": _cpu_model(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()
