"""Mutated hook messages must give records or counted rejections, and a whole attribution.

``STRATOSCOPE_FUZZ_N`` mutations (default 100 000) of messages of a real hook are parsed; one in fifty
goes on through joining, attribution and the views.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from stratoscope.attribution.matrix import PercentileBands
from stratoscope.collector import views
from stratoscope.collector.assembler import Limits
from stratoscope.collector.attributor import Attributor, Options
from stratoscope.collector.records import RecordParser

FUZZ_N = int(os.environ.get("STRATOSCOPE_FUZZ_N", "100000"))
SEEDS = Path(__file__).parents[1] / "data/otlp/hook.bin"


def seeds() -> list[bytes]:
    data, found = SEEDS.read_bytes(), []
    while data:
        length = int.from_bytes(data[:4], "big")
        found.append(data[4 : 4 + length])
        data = data[4 + length :]
    return found


def mutate(rng: random.Random, seed: bytes) -> bytes:
    data = bytearray(seed)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(data))
        kind = rng.randrange(4)
        if kind == 0:
            data[at] = rng.randrange(256)
        elif kind == 1:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 2:  # a whole int64 of a table
            data[at : at + 8] = rng.choice(
                (b"\xff" * 8, b"\x00" * 8, b"\xff" * 7 + b"\x7f", rng.randbytes(8))
            )
        else:  # keeps the length, so that more of it still parses
            other = rng.randrange(len(data))
            size = min(16, len(data) - max(at, other))
            data[at : at + size] = data[other : other + size]
    return bytes(data)


def new_attributor() -> Attributor:
    return Attributor(Options(Limits(join_timeout_s=0.0, unfinished_after_s=0.0), PercentileBands(), 500))


def test_mutated_messages_never_raise_and_never_break_the_sums() -> None:
    rng, originals = random.Random(5), seeds()
    parser, attributor = RecordParser(), new_attributor()
    parsed = attributed = 0
    for number in range(FUZZ_N):
        try:
            message = ExportTraceServiceRequest.FromString(mutate(rng, rng.choice(originals)))
        except DecodeError:
            continue
        found = parser.parse(message)
        parsed += len(found.records)
        if number % 50 == 0:
            attributor.take(message, float(number))
            attributed += len(attributor.finish(float(number)))
        if number % 5000 == 0:
            json.dumps(views.summary(attributor), allow_nan=False)
            attributor = new_attributor()
    assert parsed > FUZZ_N // 10, "the mutations are too hard to test anything"
    assert attributed > FUZZ_N // 2000
    summary = views.summary(attributor)
    assert summary["conservation"]["max_abs_residual_ns"] == 0
