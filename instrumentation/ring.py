"""A fixed-size ring of int64 rows: one writer thread, one reader thread, no allocation per row."""

from __future__ import annotations

import struct


class Ring:
    """Ring buffer of ``capacity`` rows of ``width`` little-endian int64.

    One thread pushes, another drains; under the interpreter lock each sees the other's counter
    only ever grow, so no lock is needed. A push into a full ring drops the new row and counts it:
    older rows are worth more, since later ones refer to them.
    """

    __slots__ = ("_buffer", "_capacity", "_head", "_pack", "_row_bytes", "_tail", "dropped", "width")

    def __init__(self, width: int, capacity: int) -> None:
        row = struct.Struct(f"<{width}q")
        self.width = width
        self.dropped = 0
        self._pack = row.pack_into
        self._row_bytes = row.size
        self._capacity = capacity
        self._buffer = bytearray(row.size * capacity)
        self._head = 0
        self._tail = 0

    def __len__(self) -> int:
        return self._head - self._tail

    def push(self, *row: int) -> None:
        """Append one row of ``width`` ints. Raises struct.error if the row has another length."""
        head = self._head
        if head - self._tail >= self._capacity:
            self.dropped += 1
            return
        self._pack(self._buffer, (head % self._capacity) * self._row_bytes, *row)
        self._head = head + 1

    def drain(self, max_rows: int) -> bytes:
        """Take up to ``max_rows`` rows out, oldest first, as packed bytes."""
        tail = self._tail
        count = min(self._head - tail, max_rows)
        if count <= 0:
            return b""
        size, first = self._row_bytes, tail % self._capacity
        until_wrap = min(count, self._capacity - first)
        rows = bytes(self._buffer[first * size : (first + until_wrap) * size])
        if until_wrap < count:
            rows += bytes(self._buffer[: (count - until_wrap) * size])
        self._tail = tail + count
        return rows
