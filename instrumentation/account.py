"""What the hook itself costs and loses, counted in the process where it happens."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Account:
    """Cumulative counters of one process. Times are ns by ``time.monotonic_ns``, but CPU time where
    other processes are meant to run meanwhile (``overlapped_ns``, ``flush_cpu_ns``).

    Several threads add to them without a lock: each counter has one main writer, and a lost
    increment costs a digit of a statistic, while a lock would cost every step.
    """

    steps: int = 0
    requests: int = 0
    critical_ns: int = 0
    overlapped_ns: int = 0
    request_ns: int = 0
    flush_cpu_ns: int = 0
    dropped: int = 0
    errors: int = 0
    loop_lag_max_ns: int = 0
    loop_lag_sum_ns: int = 0
    disabled: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
