"""What the NVML sampler costs in CPU time: our Python, not the driver.

    python benchmarks/nvml_cost.py [--gpus 1,8] [--samples 300]

The real nvidia-ml-py calls the fake libnvidia-ml.so.1 of the tests, which answers from memory. So
this measures the sampler, the bindings and the OTLP encoding, with the fake's own look-ups counted
in. Nine values a GPU change from sample to sample, as under load; the others are sent with the slow
group only. It says nothing about the time that a real driver takes, in which the interpreter lock
is free.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import machine

ROOT = Path(__file__).parents[1]
CAPTURE = ROOT / "tests" / "data" / "nvml" / "h200_load.txt"
SOURCE = ROOT / "tests" / "fakes" / "nvml" / "fake_nvml.c"


def script(gpus: int) -> str:
    """The fake driver's answers for ``gpus`` copies of the captured H200."""
    lines = [line for line in CAPTURE.read_text().splitlines() if line.startswith("gpu0.")]
    text = [f"devices = {gpus}"]
    for index in range(gpus):
        for line in lines:
            line = line.replace("gpu0.", f"gpu{index}.", 1)
            text.append(line.replace("GPU-00000000", f"GPU-{index:08d}") if ".uuid" in line else line)
    return "\n".join(text) + "\n"


def moving(sampler: Any) -> list[Any]:
    """The series that change all the time under load: power, energy, use, SM clock, traffic."""
    names = (
        "hw.power",
        "hw.energy",
        "hw.gpu.utilization",
        "stratoscope.gpu.memory.busy",
        "hw.gpu.io",
    )
    found = []
    for device in sampler._devices:
        series = [field.series for field in device.fields]
        series += [one for call in device.fast for one in call.series]
        found += [one for one in series if one.quantity.name in names]
        found += [one for one in series if one.attributes.get("stratoscope.gpu.clock") == "sm"]
    return found


def measure(samples: int) -> None:
    """In the subprocess: print us of CPU per sample, fast and slow, per export, and points a sample."""
    from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
    from opentelemetry.sdk.resources import Resource

    from stratoscope.instrumentation.gpu.nvml import NvmlSampler
    from stratoscope.instrumentation.metrics import build

    resource = Resource({"service.name": "vllm"})
    sampler = NvmlSampler()
    if not sampler.open():
        sys.exit("the fake driver was not found")
    times: dict[bool, list[float]] = {True: [], False: []}
    exports: list[float] = []
    points = 0
    changing = moving(sampler)
    for index in range(samples):
        for series in changing:
            series.sent = None
        slow = index % 5 == 0  # at 1 Hz, every fifth sample reads the slow group too
        sampler._slow_due_s = 0.0 if slow else float("inf")
        before = time.thread_time_ns()
        sampler.sample_once()
        times[slow].append((time.thread_time_ns() - before) / 1e3)
        drained = sampler.drain()
        points = len(drained) if not slow else points
        before = time.thread_time_ns()
        encode_metrics(build(resource, drained, 1, 2)).SerializeToString()
        exports.append((time.thread_time_ns() - before) / 1e3)
    medians = (
        statistics.median(times[False]),
        statistics.median(times[True]),
        statistics.median(exports),
    )
    print(*medians, points)


def main() -> None:
    """Build the fake, run each case in a process of its own, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--gpus", default="1,8", help="numbers of simulated GPUs, comma separated")
    parser.add_argument("--samples", type=int, default=300)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        measure(options.samples)
        return
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        sys.exit("no C compiler (gcc or cc) to build the fake driver with")
    print(machine.describe())
    print("CPU time of our Python and nvidia-ml-py against a fake driver; a real driver's time is not in it.")
    heads = (
        "GPUs",
        "points",
        "us/sample",
        "us/slow sample",
        "us/export",
        "core at 1 Hz",
    )
    print("  ".join(heads))
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "libnvidia-ml.so.1"
        subprocess.run(
            [compiler, "-shared", "-fPIC", "-O2", "-o", str(library), str(SOURCE)],
            check=True,
        )
        for gpus in (int(part) for part in options.gpus.split(",")):
            answers = Path(folder) / "answers.txt"
            answers.write_text(script(gpus))
            environ = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
            environ |= {
                "LD_LIBRARY_PATH": folder,
                "FAKE_NVML_FILE": str(answers),
                "FAKE_NVML_STATIC": "1",
            }
            command = [
                sys.executable,
                __file__,
                "--child",
                "--samples",
                str(options.samples),
            ]
            done = subprocess.run(command, env=environ, check=True, capture_output=True, text=True)
            fast, slow, export, points = (float(part) for part in done.stdout.split())
            share = (0.8 * fast + 0.2 * slow + export) / 1e6
            cells = (
                f"{gpus}",
                f"{points:.0f}",
                f"{fast:.0f}",
                f"{slow:.0f}",
                f"{export:.0f}",
                f"{share:.3%}",
            )
            print("  ".join(f"{cell:>{len(head)}}" for cell, head in zip(cells, heads, strict=True)))


if __name__ == "__main__":
    main()
