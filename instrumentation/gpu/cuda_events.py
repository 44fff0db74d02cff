"""The device interval of each step: two CUDA events on the current stream, read later.

Example, all calls from the thread that executes steps (but :meth:`StepTimer.collect_idle`)::

    timer = StepTimer()
    timer.begin(step)           # at entry of execute_model
    ...                         # vLLM enqueues its kernels and goes on
    timer.end(step)             # after sample_tokens, or execute_model where that does both
    for step, start_ns, end_ns in timer.collect(): ...      # whatever is done by now; never waits

An event completes when the stream has done all that was enqueued before it. The interval therefore
begins when the stream reached the step (the end of the step before it, if that was still running)
and ends with its last kernel; gaps in which the device waited for launches lie inside.

Host clock. ``elapsed_time`` only tells the time between two events. So an *anchor* is recorded
about once a second on a stream of its own, which is idle, and polled until it completes: it
happened between two reads of the host's clock, ``w`` apart, and is taken to lie in the middle. An
event ``t`` after its anchor is then placed on the host's clock with an error of at most

    ``w / 2``           the anchor (``w`` <= 200 us, else it is thrown away; some 10 us are usual)
  + ``1 us``            CUDA's resolution of 0.5 us, at both ends
  + ``2**-24 * t``      ``elapsed_time`` is float32: half a unit in the last place, <= 60 ns at 1 s
  + ``drift * t``       the two clocks against each other; crystals differ by some 20 ppm (20 us at
                        1 s), and a host clock that NTP is slewing by up to 500 ppm (500 us at 1 s)

and the length of an interval, which needs no anchor, by 1 us + ``2**-24`` of itself, less what a
new anchor's disagreement with the last one cuts off the first interval after it. Where the
device is too busy to complete an anchor in 200 us, the end of the last completed step takes its
place, with its own error carried on; :attr:`StepTimer.error_ns` is the bound without drift, which
cannot be seen from here. An anchor older than a minute (4 us of float32) is not used at all.

While a CUDA graph is captured nothing is called: an event query by any thread can break a capture.
"""

from __future__ import annotations

import collections
import sys
import threading
from collections.abc import Callable
from time import monotonic_ns
from typing import Any, NamedTuple, Protocol

_ANCHOR_PERIOD_NS = 1_000_000_000
_ANCHOR_RETRY_NS = 100_000_000
_ANCHOR_LIMIT_NS = 200_000  # longest time spent on polling for one anchor
_ANCHOR_GOOD_NS = 30_000  # narrower needs no second try
_ANCHOR_TRIES = 3
_BASE_MAX_AGE_NS = 60_000_000_000
_RESOLUTION_NS = 500


class Event(Protocol):
    """The part of ``torch.cuda.Event(enable_timing=True)`` in use."""

    def record(self, stream: Any = None) -> None: ...
    def query(self) -> bool: ...
    def elapsed_time(self, end_event: Any) -> float: ...


class Cuda(Protocol):
    """Where events come from. ``anchor_stream`` is a stream that nobody else enqueues to."""

    anchor_stream: Any

    def event(self) -> Event: ...
    def capturing(self) -> bool: ...


class _TorchCuda:
    def __init__(self, torch: Any) -> None:
        self._new_event = torch.cuda.Event
        self.capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing
        self.anchor_stream = torch.cuda.Stream(priority=-1)

    def event(self) -> Event:
        event: Event = self._new_event(enable_timing=True)
        return event


class _Base(NamedTuple):
    """An event whose place on the host's clock is known."""

    event: Event
    host_ns: int
    error_ns: float


class _Slot:
    """A step in flight, with two events that are used again and again."""

    __slots__ = ("base", "end", "start", "step")

    def __init__(self, cuda: Cuda) -> None:
        self.step = 0
        self.base: _Base | None = None  # None: the step's device time is lost
        self.start = cuda.event()
        self.end = cuda.event()


def find_cuda() -> Cuda | None:
    """torch's CUDA, if this process has initialised it already; this never does so itself.

    ``torch.cuda.is_available()`` is not asked: it may touch the driver, and a context made by
    asking would take hundreds of megabytes on a device that vLLM does not use.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    return _TorchCuda(torch)


def rounding_ns(elapsed_ns: float) -> float:
    """Bound of the error of one ``elapsed_time``: resolution at both ends, and float32."""
    return 2 * _RESOLUTION_NS + elapsed_ns * 2.0**-24


class StepTimer:
    """Times steps on the device. Every step begun and ended comes out of :meth:`collect` once.

    ``cuda`` and ``clock`` are there for tests. At most ``max_outstanding`` steps wait for the
    device; a step beyond that, or one that cannot be timed, comes out with times of 0 and counts in
    :attr:`lost`. After the first error of CUDA the timer stays off.
    """

    def __init__(
        self,
        cuda: Cuda | None = None,
        clock: Callable[[], int] = monotonic_ns,
        max_outstanding: int = 64,
    ) -> None:
        self._cuda = cuda
        self._clock = clock
        self._max_outstanding = max_outstanding
        self._searched = cuda is not None
        self._lock = threading.RLock()  # between collect and collect_idle
        self._pool: list[_Slot] = []
        self._pending: collections.deque[_Slot] = collections.deque()
        self._open: _Slot | None = None
        self._base: _Base | None = None
        self._anchor_due_ns = 0
        self._last: _Slot | None = None  # the last completed step, kept for its end event
        self._last_host_ns = 0
        self._last_end_ns = 0
        self.lost = 0
        self.error_ns = 0.0

    @property
    def active(self) -> bool:
        """Whether steps are being timed, or rows are still owed to :meth:`collect`."""
        return self._cuda is not None or bool(self._pending)

    @property
    def wanted(self) -> bool:
        """Whether :meth:`begin` has anything to do: steps are timed, or CUDA was not looked for yet."""
        return self._cuda is not None or not self._searched

    def begin(self, step: int) -> None:
        """The step's first work is about to be enqueued on the current stream."""
        if self._cuda is None and self._searched:
            return
        try:
            cuda = self._cuda or self._find()
            if cuda is None:
                return
            if self._open is not None:  # never ended: its device time is unknown
                self._lose(self._open)
            self._open = slot = self._pool.pop() if self._pool else _Slot(cuda)
            slot.step, slot.base = step, None
            if len(self._pending) < self._max_outstanding and not cuda.capturing():
                now_ns = self._clock()
                base = self._base if now_ns < self._anchor_due_ns else self._fresh_base(cuda, now_ns)
                if base is not None and now_ns - base.host_ns <= _BASE_MAX_AGE_NS:
                    slot.start.record()
                    slot.base = base
        except Exception:
            self._give_up()

    def end(self, step: int) -> None:
        """The step's last work has been enqueued on the current stream."""
        slot, cuda = self._open, self._cuda
        if slot is None or cuda is None:
            return
        try:
            if slot.base is not None and slot.step == step and not cuda.capturing():
                slot.end.record()
                self._pending.append(slot)
            else:
                self._lose(slot)
            self._open = None
        except Exception:
            self._give_up()

    def collect(self) -> list[tuple[int, int, int]]:
        """``(step, start_ns, end_ns)`` of all steps known by now, on the clock of ``monotonic_ns``.

        In order of ``end``, and no interval begins before the one ahead of it ended. Times of 0: not
        known. Does not wait: what the device has not done yet comes with a later call.
        """
        if not self._pending:
            return []
        rows: list[tuple[int, int, int]] = []
        with self._lock:
            try:
                if self._cuda is None or not self._cuda.capturing():
                    self._take_completed(rows)
            except Exception:
                self._give_up()
        return rows

    def collect_idle(self) -> list[tuple[int, int, int]]:
        """:meth:`collect` from another thread, for the last steps before the engine went idle.

        Gives nothing while a step is open: only then could its thread be capturing a graph.
        """
        return self.collect() if self._open is None else []

    def close(self) -> None:
        """Time nothing more; steps that the device has not done come out of :meth:`collect` as lost."""
        self._searched = True
        self._give_up()

    def _take_completed(self, rows: list[tuple[int, int, int]]) -> None:
        pending = self._pending
        while pending:
            slot = pending[0]
            if slot.base is None:
                rows.append((slot.step, 0, 0))
                self._pool.append(slot)
            elif slot.end.query():
                rows.append(self._convert(slot, slot.base))
            else:
                break
            pending.popleft()

    def _find(self) -> Cuda | None:
        self._searched = True
        self._cuda = find_cuda()
        return self._cuda

    def _convert(self, slot: _Slot, base: _Base) -> tuple[int, int, int]:
        offset_ns = round(base.event.elapsed_time(slot.start) * 1e6)
        length_ns = round(slot.start.elapsed_time(slot.end) * 1e6)
        host_ns = base.host_ns + offset_ns
        self.error_ns = base.error_ns + rounding_ns(offset_ns) + rounding_ns(length_ns)
        if self._last is not None:
            self._pool.append(self._last)
        self._last, self._last_host_ns = slot, host_ns + length_ns
        # One stream does one step after the other: only the errors of two anchors can say otherwise.
        # The end stays where its anchor puts it, or the correction would add up from step to step.
        end_ns = max(host_ns + length_ns, self._last_end_ns)
        start_ns = min(max(host_ns, self._last_end_ns), end_ns)
        self._last_end_ns = end_ns
        return slot.step, start_ns, end_ns

    def _lose(self, slot: _Slot) -> None:
        slot.base = None
        self.lost += 1
        self._pending.append(slot)

    def _fresh_base(self, cuda: Cuda, now_ns: int) -> _Base | None:
        base = self._anchor(cuda)
        self._anchor_due_ns = now_ns + (_ANCHOR_RETRY_NS if base is None else _ANCHOR_PERIOD_NS)
        if base is None and self._last is not None:
            # Its slot must not go back to the pool: steps will be measured from its end.
            base, self._last = (
                _Base(self._last.end, self._last_host_ns, self.error_ns),
                None,
            )
        if base is not None:
            self._base = base
        return self._base

    def _anchor(self, cuda: Cuda) -> _Base | None:
        event = cuda.event()
        event.record(cuda.anchor_stream)  # makes the event: that must not be part of the measurement
        base: _Base | None = None
        for _ in range(_ANCHOR_TRIES):
            before_ns = self._clock()
            event.record(cuda.anchor_stream)
            done = event.query()
            after_ns = self._clock()
            while not done and after_ns - before_ns <= _ANCHOR_LIMIT_NS:
                done = event.query()
                after_ns = self._clock()
            width_ns = after_ns - before_ns
            if not done or width_ns > _ANCHOR_LIMIT_NS:
                return None  # recorded anew: an earlier, wider measurement of it is gone
            base = _Base(event, before_ns + width_ns // 2, width_ns / 2)
            if width_ns <= _ANCHOR_GOOD_NS:
                break
        return base

    def _give_up(self) -> None:
        with self._lock:
            self._cuda = None
            if self._open is not None:
                self._lose(self._open)
            for slot in self._pending:
                if slot.base is not None:
                    slot.base = None
                    self.lost += 1
            self._open = self._base = self._last = None
            self._pool.clear()
