"""Offline analysis: OTLP files in, the same documents out as a live agent gives.

Read are the files of the OpenTelemetry Collector's file exporter (JSON lines), a single OTLP JSON
object, protobuf ``ExportTraceServiceRequest`` messages (plain, or each after its length as a
4-byte big-endian integer, as the file exporter writes them), each with or without gzip, and
directories of these.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stratoscope.attribution.matrix import PercentileBands
from stratoscope.collector.assembler import Limits
from stratoscope.collector.attributor import Attributor, Options
from stratoscope.collector.component import Signal
from stratoscope.collector.otlp import PayloadError, decode_protobuf
from stratoscope.collector.otlp_json import decode_json

_SUFFIXES = (".json", ".jsonl", ".ndjson", ".pb", ".binpb", ".otlp", ".proto", ".bin")
# No limit of a live agent applies: everything is in the files already.
_LIMITS = Limits(join_timeout_s=float("inf"), window_s=float("inf"), max_pending=1 << 40, max_open=1 << 40)


class AnalyzeError(Exception):
    """Nothing could be analysed; the text says why."""


@dataclass(slots=True)
class Analysis:
    """The joined requests, and what could not be read (``file:place: reason``)."""

    attributor: Attributor
    problems: list[str] = field(default_factory=list)
    files: int = 0
    messages: int = 0


def analyze(paths: Sequence[str | Path], bands: PercentileBands | None = None) -> Analysis:
    """Read all ``paths`` and attribute their requests.

    A bad line or message is noted in ``problems`` and the rest is used. Raises
    :class:`AnalyzeError` if a path does not exist or nothing in them was readable.
    """
    attributor = Attributor(Options(_LIMITS, bands or PercentileBands(), max_requests=1 << 62))
    analysis = Analysis(attributor)
    for path in _files(paths):
        analysis.files += 1
        for message in _messages(path, analysis.problems):
            analysis.messages += 1
            attributor.take(message, 0.0)
    if not analysis.messages:
        details = "; ".join(analysis.problems[:3]) or "the files are empty"
        raise AnalyzeError(f"no OTLP traces in {', '.join(map(str, paths))}: {details}")
    attributor.finish(0.0, at_end=True)
    return analysis


def _files(paths: Sequence[str | Path]) -> Iterator[Path]:
    for given in paths:
        path = Path(given)
        if path.is_dir():
            found = sorted(p for p in path.rglob("*") if p.is_file() and _looks_like_otlp(p))
            if not found:
                raise AnalyzeError(
                    f"{path}: no OTLP files in this directory ({', '.join(_SUFFIXES)}, or .gz)"
                )
            yield from found
        elif path.is_file():
            yield path
        else:
            raise AnalyzeError(f"{path}: no such file or directory")


def _looks_like_otlp(path: Path) -> bool:
    name = path.name.removesuffix(".gz")
    return name.endswith(_SUFFIXES)


def _messages(path: Path, problems: list[str]) -> Iterator[Any]:
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        problems.append(f"{path}: cannot be read: {error}")
        return
    if data.lstrip()[:1] == b"{":
        yield from _json_messages(path, data, problems)
    elif data:
        yield from _protobuf_messages(path, data, problems)


def _json_messages(path: Path, data: bytes, problems: list[str]) -> Iterator[Any]:
    lines = data.split(b"\n")
    if lines[0].strip() == b"{":
        lines = [data]  # one pretty-printed object
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if b'"resourceSpans"' not in line and b'"resource_spans"' not in line:
            continue  # the file exporter writes metrics and logs to the same file
        try:
            yield decode_json(Signal.TRACES, line).batch.message
        except PayloadError as error:
            problems.append(f"{path}:{number}: {error}")


def _protobuf_messages(path: Path, data: bytes, problems: list[str]) -> Iterator[Any]:
    for offset, frame in _frames(path, data, problems):
        try:
            yield decode_protobuf(Signal.TRACES, frame).batch.message
        except PayloadError as error:
            problems.append(f"{path}: message at byte {offset}: {error}")


def _frames(path: Path, data: bytes, problems: list[str]) -> list[tuple[int, bytes]]:
    """The length-prefixed messages of ``data``, or all of it as one message if it has no such prefix.

    A protobuf message never begins with a zero byte, a length below 16 MiB always does.
    """
    if data[0] != 0:
        return [(0, data)]
    frames, at = [], 0
    while at < len(data):
        length = int.from_bytes(data[at : at + 4], "big")
        if at + 4 + length > len(data):
            problems.append(
                f"{path}: message at byte {at}: the file ends {at + 4 + length - len(data)} bytes early"
            )
            break
        frames.append((at, data[at + 4 : at + 4 + length]))
        at += 4 + length
    return frames
