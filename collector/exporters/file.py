"""The ``file`` exporter: one export request a line as OTLP/JSON, or length-prefixed protobuf.

The formats are those of the OpenTelemetry Collector's file exporter, so that either's files can be
read by the other's tools and by ``stratoscope analyze``.
"""

from __future__ import annotations

import os
import struct
import threading
from dataclasses import dataclass
from typing import IO, Annotated, Literal

from stratoscope.collector.component import Batch, Context, Factory, Kind, Refused, StartError
from stratoscope.collector.config_schema import Range, key, required
from stratoscope.collector.otlp_json import encode_json


@dataclass(frozen=True)
class Rotation:
    """``rotation``"""

    max_megabytes: Annotated[int, Range(1)] = key(
        100, "Size at which the file is renamed and a new one begun."
    )
    max_backups: Annotated[int, Range(1, 1000)] = key(
        10, "How many renamed files (path.1, path.2, ...) are kept."
    )


@dataclass(frozen=True)
class Config:
    """``exporters.file``"""

    path: str = required("File to write.")
    format: Literal["json", "proto"] = key(
        "json", "json: a line a request; proto: 4 bytes big-endian length, then it."
    )
    append: bool = key(False, "Keep what the file holds already.")
    rotation: Rotation | None = key(None, "Bound the size; without it the file grows for ever.")


class FileExporter:
    """Writes synchronously: a batch that was taken is in the hands of the operating system."""

    def __init__(self, name: str, config: Config, context: Context) -> None:
        self._name, self._config = name, config
        self._lock = threading.Lock()
        self._file: IO[bytes] | None = None
        self._sent = context.telemetry.item_counters("exporter_sent", "Items delivered.", ("exporter",))
        self._failed = context.telemetry.item_counters(
            "exporter_send_failed", "Items lost by an exporter.", ("exporter",)
        )

    def start(self) -> None:
        """Open the file. Raises ``StartError``."""
        try:
            self._open(self._config.append)
        except OSError as error:
            raise StartError(
                f"exporters.{self._name}.path: cannot write {self._config.path!r}: {error.strerror}"
            ) from error

    def consume(self, batch: Batch) -> None:
        """Write one batch. Raises :class:`Refused` when the disk does not take it."""
        if self._config.format == "json":
            record = encode_json(batch.message).encode() + b"\n"
        else:
            record = struct.pack(">I", len(batch.raw)) + batch.raw
        with self._lock:
            if self._file is None:
                raise Refused("the file is closed", retryable=False)
            try:
                self._rotate_if_needed(len(record))
                self._file.write(record)
                self._file.flush()
            except OSError as error:
                self._failed[batch.signal].labels(self._name).inc(batch.items)
                raise Refused(
                    f"cannot write {self._config.path!r}: {error.strerror}", retryable=True
                ) from error
        self._sent[batch.signal].labels(self._name).inc(batch.items)

    def shutdown(self, timeout_s: float) -> None:
        """Close the file."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _open(self, append: bool) -> None:
        self._file = open(self._config.path, "ab" if append else "wb")  # noqa: SIM115  kept open

    def _rotate_if_needed(self, size_bytes: int) -> None:
        rotation = self._config.rotation
        if rotation is None or self._file is None:
            return
        used_bytes = self._file.tell()
        if used_bytes == 0 or used_bytes + size_bytes <= rotation.max_megabytes * 10**6:
            return
        self._file.close()
        path = self._config.path
        for number in range(rotation.max_backups - 1, 0, -1):
            if os.path.exists(f"{path}.{number}"):
                os.replace(f"{path}.{number}", f"{path}.{number + 1}")
        os.replace(path, f"{path}.1")
        self._open(append=False)


def build(name: str, config: Config, context: Context) -> FileExporter:
    """Make the exporter; nothing is opened yet."""
    return FileExporter(name, config, context)


factory = Factory(Kind.EXPORTER, "file", Config, build)
