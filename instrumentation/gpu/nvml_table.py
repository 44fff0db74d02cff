"""What is read from NVML, as data: calls, field values, and the metric each value becomes.

Choices that cost or correctness forced:

* ``NVML_FI_DEV_POWER_INSTANT`` before ``nvmlDeviceGetPowerUsage``, which on newer GPUs is a
  one-second average (and slower to read).
* PCIe bytes only by cumulative counters: ``nvmlDeviceGetPcieThroughput`` blocks for 20 ms.
* Throttled time by ``NVML_FI_DEV_PERF_POLICY_*``: the field ids of the newer
  ``CLOCKS_EVENT_REASON_*_SLOWDOWN`` counters moved between driver releases.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from .. import semconv as sc
from ..metrics import Kind, Sample

MAX_PROCESSES: Final = 16  # series per device; the largest by memory
_GPU: Final = {sc.HW_TYPE: "gpu"}
_ALL_LINKS: Final = 0xFFFFFFFF  # scope id: sum over the device's NVLinks
_MHZ: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Quantity:
    """One series of a device: NVML's number times ``scale`` is the value in ``unit``."""

    name: str
    unit: str
    description: str
    kind: Kind = "gauge"
    attributes: Mapping[str, str] = field(default_factory=dict)
    scale: int | float = 1

    def sample(self, raw: int, attributes: Mapping[str, Any], time_ns: int) -> Sample:
        """``raw`` as NVML gives it, with the ``attributes`` of the whole series."""
        value = raw * self.scale
        return Sample(
            self.name,
            self.unit,
            self.description,
            self.kind,
            value,
            attributes,
            time_ns,
        )


@dataclass(frozen=True, slots=True)
class Call:
    """A call of NVML: ``read(nvml, handle)`` gives one number for each of ``quantities``
    (:data:`PROCESSES`: a list of processes).

    ``fallback`` takes its place where the driver does not have it.
    """

    read: Callable[[Any, Any], Any]
    quantities: tuple[Quantity, ...]
    fallback: Call | None = None


@dataclass(frozen=True, slots=True)
class Field:
    """A field value, read with all others in one call. ``name`` is pynvml's constant.

    ``wide``: the number must come as 64 bits. A 32-bit byte counter wraps several times between
    two samples, and what it says is then worth nothing.
    """

    name: str
    quantity: Quantity
    scope: int = 0
    wide: bool = False
    fallback: Call | None = None


REASONS: Final = {  # bits of the clocks event ("throttle") reasons
    0x001: "gpu_idle",
    0x002: "applications_clocks_setting",
    0x004: "sw_power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal_slowdown",
    0x040: "hw_thermal_slowdown",
    0x080: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}


def _clock(kind: str, constant: str) -> Call:
    attributes = {sc.GPU_CLOCK: kind}
    quantity = Quantity(sc.M_GPU_CLOCK, "Hz", "Current clock.", attributes=attributes, scale=_MHZ)
    return Call(
        lambda nv, h: (nv.nvmlDeviceGetClockInfo(h, getattr(nv, constant)),),
        (quantity,),
    )


def _clock_limit(kind: str, constant: str) -> Call:
    attributes = {sc.GPU_CLOCK: kind}
    quantity = Quantity(sc.M_GPU_CLOCK_LIMIT, "Hz", "Highest clock.", attributes=attributes, scale=_MHZ)
    return Call(
        lambda nv, h: (nv.nvmlDeviceGetMaxClockInfo(h, getattr(nv, constant)),),
        (quantity,),
    )


def _clocks_event(reason: str) -> Quantity:
    attributes = {sc.GPU_REASON: reason}
    return Quantity(
        sc.M_GPU_CLOCKS_EVENT,
        "1",
        "1: the reason holds clocks down.",
        attributes=attributes,
    )


def _throttled(reason: str) -> Quantity:
    return Quantity(
        sc.M_GPU_THROTTLE_TIME, "s", "Time in which clocks were held down.", "counter",
        {sc.GPU_REASON: reason}, 1e-9,
    )  # fmt: skip


def _temperature(location: str) -> Quantity:
    attributes = {**_GPU, sc.HW_SENSOR_LOCATION: location}
    return Quantity(sc.M_TEMPERATURE, "Cel", "Temperature.", attributes=attributes)


def _io(link: str, direction: str, scale: int) -> Quantity:
    attributes = {sc.GPU_LINK: link, sc.IO_DIRECTION: direction}
    return Quantity(
        sc.M_GPU_IO,
        "By",
        "Bytes sent and received by the GPU.",
        "counter",
        attributes,
        scale,
    )


def _error(kind: str) -> Quantity:
    attributes = {**_GPU, sc.ERROR_TYPE: kind}
    return Quantity(sc.M_ERRORS, "{error}", "Errors since the hook started.", "counter", attributes)


def _ecc(kind: str, constant: str) -> Call:
    return Call(
        lambda nv, h: (nv.nvmlDeviceGetTotalEccErrors(h, getattr(nv, constant), nv.NVML_VOLATILE_ECC),),
        (_error(f"ecc_{kind}"),),
    )


def _split(mask: int) -> tuple[int, ...]:
    return tuple(1 if mask & bit else 0 for bit in REASONS)


def _used_and_total(memory: Any) -> tuple[int, int]:
    return memory.used, memory.total


def _gpu_and_memory(rates: Any) -> tuple[int, int]:
    return rates.gpu, rates.memory


_POWER = Quantity(sc.M_POWER, "W", "Power drawn by the board.", attributes=_GPU, scale=1e-3)
_GPU_TEMPERATURE = (_temperature("gpu"),)
_CLOCKS_EVENT = tuple(_clocks_event(reason) for reason in REASONS.values())
_MEMORY = (
    Quantity(sc.M_GPU_MEMORY_USAGE, "By", "Memory in use by all processes.", "updown"),
    Quantity(sc.M_GPU_MEMORY_LIMIT, "By", "Size of the memory.", "updown"),
)
_UTILIZATION = (
    Quantity(sc.M_GPU_UTILIZATION, "1", "Share of time in which a kernel ran.",
             attributes={sc.HW_GPU_TASK: "general"}, scale=0.01),
    Quantity(sc.M_GPU_MEMORY_BUSY, "1", "Share of time in which memory was read or written.", scale=0.01),
)  # fmt: skip

MEMORY_CALL: Final = Call(
    lambda nv, h: _used_and_total(nv.nvmlDeviceGetMemoryInfo(h, nv.nvmlMemory_v2)),
    _MEMORY,
    # The first version counts memory reserved by the driver as used.
    Call(lambda nv, h: _used_and_total(nv.nvmlDeviceGetMemoryInfo(h)), _MEMORY),
)

FAST_CALLS: Final = (
    _clock("graphics", "NVML_CLOCK_GRAPHICS"),
    _clock("sm", "NVML_CLOCK_SM"),
    _clock("memory", "NVML_CLOCK_MEM"),
    Call(lambda nv, h: (nv.nvmlDeviceGetTemperature(h, nv.NVML_TEMPERATURE_GPU),), _GPU_TEMPERATURE,
         Call(lambda nv, h: (nv.nvmlDeviceGetTemperatureV(h, nv.NVML_TEMPERATURE_GPU),), _GPU_TEMPERATURE)),
    Call(lambda nv, h: _gpu_and_memory(nv.nvmlDeviceGetUtilizationRates(h)), _UTILIZATION),
    Call(lambda nv, h: _split(nv.nvmlDeviceGetCurrentClocksEventReasons(h)), _CLOCKS_EVENT,
         Call(lambda nv, h: _split(nv.nvmlDeviceGetCurrentClocksThrottleReasons(h)), _CLOCKS_EVENT)),
    MEMORY_CALL,
)  # fmt: skip

SLOW_CALLS: Final = (
    _clock_limit("graphics", "NVML_CLOCK_GRAPHICS"),
    _clock_limit("sm", "NVML_CLOCK_SM"),
    _clock_limit("memory", "NVML_CLOCK_MEM"),
    Call(lambda nv, h: (nv.nvmlDeviceGetEnforcedPowerLimit(h),),
         (Quantity(sc.M_GPU_POWER_LIMIT, "W", "Power limit in force.", scale=1e-3),)),
    Call(lambda nv, h: (nv.nvmlDeviceGetCurrPcieLinkGeneration(h),),
         (Quantity(sc.M_GPU_PCIE_GENERATION, "1", "Current PCIe generation."),)),
    Call(lambda nv, h: (nv.nvmlDeviceGetCurrPcieLinkWidth(h),),
         (Quantity(sc.M_GPU_PCIE_WIDTH, "{lane}", "Current PCIe width."),)),
    _ecc("corrected", "NVML_MEMORY_ERROR_TYPE_CORRECTED"),
    _ecc("uncorrected", "NVML_MEMORY_ERROR_TYPE_UNCORRECTED"),
)  # fmt: skip

FIELDS: Final = (
    Field("NVML_FI_DEV_POWER_INSTANT", _POWER,
          fallback=Call(lambda nv, h: (nv.nvmlDeviceGetPowerUsage(h),), (_POWER,))),
    Field("NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION",
          Quantity(sc.M_ENERGY, "J", "Energy used since the hook started.", "counter", _GPU, 1e-3)),
    Field("NVML_FI_DEV_MEMORY_TEMP", _temperature("memory")),
    Field("NVML_FI_DEV_PERF_POLICY_POWER", _throttled("power")),
    Field("NVML_FI_DEV_PERF_POLICY_THERMAL", _throttled("thermal")),
    Field("NVML_FI_DEV_PERF_POLICY_SYNC_BOOST", _throttled("sync_boost")),
    Field("NVML_FI_DEV_PERF_POLICY_BOARD_LIMIT", _throttled("board_limit")),
    Field("NVML_FI_DEV_PERF_POLICY_RELIABILITY", _throttled("reliability")),
    Field("NVML_FI_DEV_PCIE_COUNT_TX_BYTES", _io("pcie", "transmit", 1), wide=True),
    Field("NVML_FI_DEV_PCIE_COUNT_RX_BYTES", _io("pcie", "receive", 1), wide=True),
    Field("NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX", _io("nvlink", "transmit", 1024), _ALL_LINKS, wide=True),
    Field("NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX", _io("nvlink", "receive", 1024), _ALL_LINKS, wide=True),
    Field("NVML_FI_DEV_PCIE_REPLAY_COUNTER", _error("pcie_replay")),
    Field("NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL", _error("nvlink_crc_flit")),
    Field("NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL", _error("nvlink_replay")),
    Field("NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL", _error("nvlink_recovery")),
)  # fmt: skip

STATUS: Final = Quantity(sc.M_STATUS, "1", "1: the device is in this state.", "updown")
STATES: Final = {
    False: {**_GPU, sc.HW_STATE: "ok"},
    True: {**_GPU, sc.HW_STATE: "failed"},
}  # by: lost
PROCESSES: Final = Call(
    lambda nv, h: nv.nvmlDeviceGetComputeRunningProcesses(h),  # objects with pid and usedGpuMemory
    (
        Quantity(
            sc.M_GPU_PROCESSES,
            "{process}",
            "Compute processes on the device.",
            "updown",
        ),
        Quantity(
            sc.M_GPU_PROCESS_MEMORY,
            "By",
            "Device memory of a compute process.",
            "updown",
        ),
    ),
)
