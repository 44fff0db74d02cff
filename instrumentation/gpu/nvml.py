"""One thread that samples the GPUs of this process through NVML.

Example::

    sampler = NvmlSampler(hz=1.0, devices=["GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"])
    sampler.start()                 # returns at once; no driver: says so at debug level, stays off
    samples = sampler.drain()       # from the flush thread: what was read since the last call
    sampler.stop(timeout_s=1.0)

Promises: it never raises into its caller; the interpreter lock is free while the driver works; a
quantity that a GPU does not have is asked for once; a GPU that is lost is reported once and left
alone; and where the driver is slow the sampler slows down, so that it spends at most a twentieth
of the time inside it.

A value that did not change is given again only every :data:`SLOW_PERIOD_S`: hold on to the last.
"""

from __future__ import annotations

import collections
import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from .. import semconv as sc
from ..metrics import Sample
from . import devices as dev
from . import nvml_table as table
from .nvml_device import Device, LiveCall, LiveField

_logger = logging.getLogger("vllm.stratoscope")

MAX_HZ = 10.0
SLOW_PERIOD_S = 5.0  # limits, link, ECC and the process list
_BUSY_SHARE = 0.05  # of the time inside the driver, at most
_MAX_PERIOD_S = 60.0
_REOPEN_S = 30.0
_MAX_FAILURES = 5  # of one call in a row, where the error does not say that it is for good
# by nvmlValueType_t
_VALUE_FIELDS = {
    0: "dVal",
    1: "uiVal",
    2: "ulVal",
    3: "ullVal",
    4: "sllVal",
    5: "siVal",
    6: "usVal",
}
_WIDE_TYPES = frozenset({2, 3, 4})

# nvmlReturn_t, grouped by what it means for us
_LOST = frozenset({15, 16, 28})  # GPU_IS_LOST, RESET_REQUIRED, GPU_NOT_FOUND
_DRIVER_GONE = frozenset({1, 9, 18})  # UNINITIALIZED, DRIVER_NOT_LOADED, LIB_RM_VERSION_MISMATCH
# INSUFFICIENT_SIZE (a process more than counted), TIMEOUT, IRQ_ISSUE, IN_USE, MEMORY, NO_DATA,
# INSUFFICIENT_RESOURCES, NOT_READY, UNKNOWN
_TRANSIENT = frozenset({7, 10, 11, 19, 20, 21, 23, 27, 999})


class _DeviceLostError(Exception):
    pass


class _DriverGoneError(Exception):
    pass


class NvmlSampler:
    """Samples at ``hz`` (0: off; at most 10) from a daemon thread of its own.

    ``devices``: UUIDs or indices as in ``CUDA_VISIBLE_DEVICES``; None takes that variable, and
    without it every GPU. A worker passes its own: ``[devices.current_device()]``. At most
    ``max_samples`` wait to be drained; older ones make way and count in :attr:`dropped`.
    """

    def __init__(
        self,
        hz: float = 1.0,
        devices: Sequence[str] | None = None,
        environ: Mapping[str, str] | None = None,
        max_samples: int = 16384,
    ) -> None:
        self.period_s = 1.0 / min(hz, MAX_HZ) if hz > 0 else 0.0
        self.interval_s = self.period_s  # as slowed down for the driver's sake
        self.dropped = 0
        self._wanted = dev.visible(os.environ if environ is None else environ) if devices is None else devices
        self._samples: collections.deque[Sample] = collections.deque()
        self._max_samples = max_samples
        self._stop_event = threading.Event()
        self._thread: threading.Thread | None = None
        self._nvml: Any = None
        self._known: dict[str, Device] = {}
        self._devices: list[Device] = []
        self._lost: set[str] = set()
        self._slow_due_s = 0.0

    def start(self) -> None:
        """Start the thread, once. Initialising NVML can take seconds: it happens over there."""
        if self._thread is not None or not self.period_s or self._wanted == []:
            return
        self._thread = threading.Thread(target=self._run, name="stratoscope-nvml", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float = 1.0) -> None:
        """Ask the thread to end and wait up to ``timeout_s``; a driver call in progress may outlast it."""
        self._stop_event.set()
        if self._thread is not None:
            self._thread.join(timeout_s)

    @property
    def running(self) -> bool:
        """Whether the thread is alive (it ends by itself without a driver or a device)."""
        return self._thread is not None and self._thread.is_alive()

    def drain(self) -> list[Sample]:
        """Take all samples read since the last call, oldest first."""
        samples = self._samples
        return [samples.popleft() for _ in range(len(samples))]

    def _run(self) -> None:
        try:
            opened = self.open()
            while opened:
                self._sample_while_driver_lives()
                self.close()
                if self._stop_event.is_set() or not self._devices:
                    return
                opened = False
                while not opened and not self._stop_event.wait(_REOPEN_S):
                    opened = self.open()
        except Exception:
            _logger.debug("stratoscope: GPU sampling ends", exc_info=True)

    def open(self) -> bool:
        """Initialise NVML and find the devices; False, with a word at debug level, if there are none."""
        try:
            import pynvml

            pynvml.nvmlInit()
        except Exception as error:  # not installed, no library, no driver, no permission
            if not self._known:
                _logger.debug("stratoscope: no GPU evidence from NVML: %s", error)
            return False
        self._nvml = pynvml
        try:
            self._devices = self._find_devices()
        except pynvml.NVMLError as error:
            _logger.debug("stratoscope: NVML cannot list its GPUs: %s", error)
            self._devices = []
        if not self._devices:
            _logger.debug(
                "stratoscope: NVML has none of the GPUs of this process: %s",
                self._wanted,
            )
            self.close()
        return bool(self._devices)

    def _find_devices(self) -> list[Device]:
        found: dict[str, tuple[dev.Target, str]] = {}
        for target in dev.resolve(self._nvml, self._wanted):
            parent_uuid = ""
            if target.parent is not None:
                parent_uuid = str(self._nvml.nvmlDeviceGetUUID(target.parent))
                found.setdefault(parent_uuid, (dev.Target(target.parent, parent_uuid, None), ""))
            found.setdefault(target.uuid, (target, parent_uuid))
        for uuid, (target, parent_uuid) in found.items():
            if uuid in self._known:  # the driver came back: counters go on from where they were
                self._known[uuid].handle = target.handle
            else:
                self._known[uuid] = Device(self._nvml, target, parent_uuid)
        return [self._known[uuid] for uuid in found if uuid not in self._lost]

    def close(self) -> None:
        """Let NVML go. What has been sampled stays to be drained."""
        try:
            if self._nvml is not None:
                self._nvml.nvmlShutdown()
        except Exception:
            _logger.debug("stratoscope: nvmlShutdown", exc_info=True)

    def _sample_while_driver_lives(self) -> None:
        while self._devices:
            started_s = time.monotonic()
            try:
                self.sample_once()
            except _DriverGoneError as error:
                _logger.warning(
                    "stratoscope: NVIDIA driver gone (%s): no GPU samples until it is back",
                    error,
                )
                return
            elapsed_s = time.monotonic() - started_s
            self.interval_s = min(max(self.period_s, elapsed_s / _BUSY_SHARE), _MAX_PERIOD_S)
            if self._stop_event.wait(max(self.interval_s - elapsed_s, 0.0)):
                return

    def sample_once(self) -> None:
        """Read every device once, on the calling thread; between :meth:`open` and :meth:`close`."""
        slow = time.monotonic() >= self._slow_due_s
        if slow:
            self._slow_due_s = time.monotonic() + SLOW_PERIOD_S
        for device in list(self._devices):
            samples: list[Sample] = []
            try:
                self._read(device, slow, samples)
            except _DeviceLostError as error:
                self._devices.remove(device)
                self._lost.add(device.uuid)
                samples.extend(device.status(True, time.monotonic_ns()))
                _logger.warning(
                    "stratoscope: GPU %s is lost (%s): not sampled any more",
                    device.uuid,
                    error,
                )
            self._samples.extend(samples)
        while len(self._samples) > self._max_samples:
            self._samples.popleft()
            self.dropped += 1

    def _read(self, device: Device, slow: bool, out: list[Sample]) -> None:
        now_ns = time.monotonic_ns()
        points: list[Sample | None] = []
        for calls in (device.fast, device.slow) if slow else (device.fast,):
            for call in list(calls):
                values = self._call(device, calls, call) or ()
                for series, value in zip(call.series, values, strict=False):
                    points.append(series.sample(value, now_ns, slow))
        self._read_fields(device, slow, points, now_ns)
        out.extend(point for point in points if point is not None)
        if slow:
            out.extend(device.status(False, now_ns))
            for call in list(device.processes):
                processes = self._call(device, device.processes, call)
                if processes is not None:
                    out.extend(_process_samples(call, processes, now_ns))

    def _call(self, device: Device, calls: list[LiveCall], call: LiveCall) -> Any:
        """What the call gave, or None if it failed; it then leaves ``calls`` where that is for good."""
        try:
            values = call.call.read(self._nvml, device.handle)
        except Exception as error:
            if self._for_good(call, _code(error), error):
                calls.remove(call)
                if call.call.fallback is not None:
                    calls.append(LiveCall(call.call.fallback, device.identity))
            return None
        call.failures = 0
        return values

    def _read_fields(self, device: Device, slow: bool, out: list[Sample | None], now_ns: int) -> None:
        if not device.fields:
            return
        fields = device.fields
        try:
            values = self._nvml.nvmlDeviceGetFieldValues(device.handle, [field.id for field in fields])
        except Exception as error:
            for field in list(fields):
                self._field_failed(device, field, _code(error), error)
            return
        for field, value in zip(list(fields), values, strict=True):
            if value.nvmlReturn:
                self._field_failed(device, field, value.nvmlReturn, f"field {field.field.name}")
            elif value.valueType not in (_WIDE_TYPES if field.field.wide else _VALUE_FIELDS):
                fields.remove(field)
            else:
                field.failures = 0
                raw = getattr(value.value, _VALUE_FIELDS[value.valueType])
                out.append(field.series.sample(raw, now_ns, slow))

    def _field_failed(self, device: Device, field: LiveField, code: int, error: object) -> None:
        if self._for_good(field, code, error):
            device.fields.remove(field)
            if field.field.fallback is not None:
                device.fast.append(LiveCall(field.field.fallback, device.identity))

    def _for_good(self, item: LiveCall | LiveField, code: int, error: object) -> bool:
        """Whether a failed reading is not to be tried again. Raises if device or driver are gone."""
        if code in _LOST:
            raise _DeviceLostError(error)
        if code in _DRIVER_GONE:
            raise _DriverGoneError(error)
        item.failures += 1
        return code not in _TRANSIENT or item.failures >= _MAX_FAILURES


def _code(error: Exception) -> int:
    """nvmlReturn_t of an NVMLError; -1 for anything else, such as a pynvml without the function."""
    value = getattr(error, "value", -1)
    return value if isinstance(value, int) else -1


def _process_samples(call: LiveCall, processes: Sequence[Any], now_ns: int) -> list[Sample]:
    count, memory = call.series
    sized = [process for process in processes if process.usedGpuMemory is not None]
    sized.sort(key=lambda process: process.usedGpuMemory, reverse=True)
    return [
        count.quantity.sample(len(processes), count.attributes, now_ns),
        *(
            memory.quantity.sample(
                process.usedGpuMemory,
                {**memory.attributes, sc.PROCESS_PID: process.pid},
                now_ns,
            )
            for process in sized[: table.MAX_PROCESSES]
        ),
    ]
