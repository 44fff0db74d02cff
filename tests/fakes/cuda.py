"""A FAKE of CUDA events and streams, for machines without a GPU.

It keeps to what CUDA promises and to where it is awkward: an event completes when its stream has
done the work enqueued before it, by the device's clock, which runs at its own rate; ``query`` is
false until then; ``elapsed_time`` is float32 milliseconds in steps of 0.5 us and raises for events
that were not recorded or are not complete; recording an event again forgets the earlier time; and
nothing but ``capturing`` may be called during graph capture.
"""

import numpy as np

RESOLUTION_NS = 500


class FakeEvent:
    def __init__(self, cuda):
        self.cuda = cuda
        self.done_ns = None  # host time of completion

    def record(self, stream=None):
        self.cuda.call()
        stream = self.cuda.stream if stream is None else stream
        # An idle stream completes an event a launch latency after it was recorded.
        self.done_ns = max(stream.busy_until_ns, self.cuda.now_ns + self.cuda.launch_ns)

    def query(self):
        self.cuda.call()
        return self.done_ns is None or self.done_ns <= self.cuda.now_ns

    def elapsed_time(self, end):
        self.cuda.call()
        for event in (self, end):
            if event.done_ns is None:
                raise ValueError("Both events must be recorded before calculating elapsed time.")
            if event.done_ns > self.cuda.now_ns:
                raise RuntimeError("CUDA error: device not ready")
        ticks = self.cuda.device_ticks(end.done_ns) - self.cuda.device_ticks(self.done_ns)
        return float(np.float32(ticks * RESOLUTION_NS / 1e6))


class FakeStream:
    def __init__(self, cuda):
        self.cuda = cuda
        self.busy_until_ns = 0

    def work(self, ns):
        """Enqueue a kernel of ``ns`` host-clock nanoseconds; returns its true start and end."""
        start = max(self.busy_until_ns, self.cuda.now_ns + self.cuda.launch_ns)
        self.busy_until_ns = start + ns
        return start, start + ns


class FakeCuda:
    """Time moves by ``call_ns`` with every call of CUDA, or by :meth:`sleep`."""

    def __init__(self, now_ns=10_000_000_000, call_ns=1_500, launch_ns=4_000, drift=0.0):
        self.now_ns = now_ns
        self.call_ns = call_ns
        self.launch_ns = launch_ns
        self.drift = drift
        self.calls = 0
        self.events = 0
        self.in_capture = False
        self.capture_broken = False
        self.error = None
        self.stream = FakeStream(self)
        self.anchor_stream = FakeStream(self)

    def clock(self):
        return self.now_ns

    def sleep(self, ns):
        self.now_ns += ns

    def call(self):
        if self.in_capture:
            self.capture_broken = True
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        if self.error is not None:
            raise self.error
        self.calls += 1
        self.now_ns += self.call_ns

    def device_ticks(self, host_ns):
        return int((host_ns + 123_456_789) * (1 + self.drift)) // RESOLUTION_NS

    def event(self):
        self.events += 1
        return FakeEvent(self)

    def capturing(self):
        return self.in_capture
