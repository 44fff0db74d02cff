"""Packed tables of the wire contract as numpy columns.

A table is row-major little-endian int64 with column names beside it. Columns are picked by name,
so a table from a newer or older hook is read as well: unknown columns are ignored, missing ones
read as zeros. Values that cannot be true (a negative time, a time beyond 146 years, a negative
count) read as 0, "not recorded", which keeps all later arithmetic inside int64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Self

import numpy as np
import numpy.typing as npt

from stratoscope.instrumentation import semconv as sc

from .errors import TableError

Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

MAX_TIME_NS = 1 << 62  # differences of two times stay inside int64
MAX_COUNT = (1 << 31) - 1  # the product of a remainder and a count stays inside int64


def clean_time(value_ns: int) -> int:
    """``value_ns`` as an int, or 0 (not recorded) if it cannot be a time."""
    return int(value_ns) if 0 < value_ns < MAX_TIME_NS else 0


def clean_times(values_ns: Int64) -> Int64:
    """The same for an array."""
    return np.where((values_ns > 0) & (values_ns < MAX_TIME_NS), values_ns, 0)


def columns_from_rows(columns: Sequence[str], rows: bytes, wanted: Sequence[str]) -> dict[str, Int64]:
    """The ``wanted`` columns of a packed table, each int64 of shape (rows,).

    A wanted column that the table lacks is all zeros. Raises :class:`TableError` if the bytes do
    not hold whole rows.
    """
    width = len(columns)
    if width == 0:
        if rows:
            raise TableError(f"a table of {len(rows)} bytes has no column names; send them beside its rows")
        return {name: np.zeros(0, np.int64) for name in wanted}
    if len(rows) % (8 * width):
        raise TableError(
            f"a table of {len(rows)} bytes is not a whole number of rows of {width} int64 columns "
            f"({8 * width} bytes a row)"
        )
    cells = np.frombuffer(rows, dtype="<i8").astype(np.int64).reshape(-1, width)
    positions = {name: position for position, name in reversed(list(enumerate(columns)))}
    found = {}
    for name in wanted:
        position = positions.get(name)
        found[name] = np.zeros(len(cells), np.int64) if position is None else cells[:, position].copy()
    return found


def matrix_from_rows(columns: Sequence[str], rows: bytes) -> Int64:
    """A packed table that travels without names (events, flushes) as int64 of shape (rows, columns)."""
    found = columns_from_rows(columns, rows, columns)
    return np.stack([found[name] for name in columns], axis=1)


@dataclass(frozen=True)
class Table:
    """Columns of equal length by name. Subclasses say which, and how rows are sorted."""

    data: Mapping[str, Int64]
    COLUMNS: ClassVar[tuple[str, ...]] = ()
    KEY: ClassVar[str] = ""
    UNIQUE: ClassVar[bool] = True

    @classmethod
    def from_rows(cls, columns: Sequence[str], rows: bytes) -> Self:
        """Read a packed table. Raises :class:`TableError`, also when the key column is missing."""
        if rows and cls.KEY not in columns:
            raise TableError(f"a {cls.__name__} needs a column {cls.KEY!r}; it has {list(columns)}")
        return cls.from_columns(columns_from_rows(columns, rows, cls.COLUMNS))

    @classmethod
    def from_columns(cls, data: Mapping[str, Int64]) -> Self:
        """Clean, sort by the key and drop rows that came twice (the first one stays)."""
        cleaned = {}
        for name in cls.COLUMNS:
            values = data[name]
            if name.endswith("_ns"):
                cleaned[name] = clean_times(values)
            elif name == cls.KEY:
                cleaned[name] = values
            else:
                cleaned[name] = np.clip(values, 0, MAX_COUNT)
        key = cleaned[cls.KEY]
        order = np.unique(key, return_index=True)[1] if cls.UNIQUE else np.argsort(key, kind="stable")
        order = order[(key[order] >= 0) & (key[order] < MAX_TIME_NS)]
        return cls({name: values[order] for name, values in cleaned.items()})

    @classmethod
    def empty(cls) -> Self:
        """A table without rows."""
        return cls({name: np.zeros(0, np.int64) for name in cls.COLUMNS})

    @classmethod
    def concat(cls, tables: Sequence[Self]) -> Self:
        """One table of the rows of all ``tables``."""
        if len(tables) == 1:
            return tables[0]
        if not tables:
            return cls.empty()
        return cls.from_columns(
            {name: np.concatenate([t.data[name] for t in tables]) for name in cls.COLUMNS}
        )

    def where(self, mask: Bool) -> Self:
        """The rows for which ``mask`` is true."""
        return type(self)({name: values[mask] for name, values in self.data.items()})

    def __getitem__(self, name: str) -> Int64:
        return self.data[name]

    def __len__(self) -> int:
        return len(self.data[self.KEY])


class StepTable(Table):
    """The steps of one engine, sorted by step number, each once (``semconv.STEP_COLUMNS``)."""

    COLUMNS = sc.STEP_COLUMNS
    KEY = "step"


class WorkerStepTable(Table):
    """The step executions of one worker rank, sorted by step (``semconv.WORKER_STEP_COLUMNS``)."""

    COLUMNS = sc.WORKER_STEP_COLUMNS
    KEY = "step"


class OutputTable(Table):
    """The output batches that one API server process handled (``semconv.OUTPUT_COLUMNS``)."""

    COLUMNS = sc.OUTPUT_COLUMNS
    KEY = "engine_ts_ns"
    UNIQUE = False  # vLLM handles a large batch in slices that share its timestamp

    @cached_property
    def _by_engine(self) -> dict[int, OutputTable]:
        indexes = self["engine_index"]
        return {int(index): self.where(indexes == index) for index in np.unique(indexes)}

    def of_engine(self, engine_index: int) -> OutputTable:
        """The rows of one engine. A process that saw one engine only need not know its index."""
        tables = self._by_engine
        if engine_index not in tables and len(tables) == 1:
            return next(iter(tables.values()))
        return tables.get(engine_index) or OutputTable.empty()

    def lookup(self, from_ns: Int64, to_ns: Int64) -> tuple[Bool, Int64, Int64]:
        """For each interval of engine timestamps: (found, first start, last end) of its rows."""
        stamps = self["engine_ts_ns"]
        low = np.searchsorted(stamps, from_ns, "left")
        high = np.searchsorted(stamps, to_ns, "right")
        found = high > low
        if not len(stamps):
            return found, np.zeros(len(low), np.int64), np.zeros(len(low), np.int64)
        start = self["start_ns"][np.where(found, low, 0)]
        end = self["end_ns"][np.where(found, high - 1, 0)]
        return found & (start > 0), start, np.maximum(start, end)
