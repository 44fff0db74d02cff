"""A device as it is being sampled: what is still worth asking it, and what its counters have counted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .. import semconv as sc
from ..metrics import Sample
from . import nvml_table as table
from .devices import Target


class Series:
    """A quantity of one device. Counters are counted from the first reading, over driver restarts."""

    __slots__ = ("attributes", "last", "quantity", "sent", "total")

    def __init__(self, quantity: table.Quantity, identity: Mapping[str, Any]) -> None:
        self.quantity = quantity
        self.attributes = {**identity, **quantity.attributes}
        self.last: int | None = None
        self.sent: int | None = None
        self.total = 0

    def sample(self, raw: int, now_ns: int, always: bool) -> Sample | None:
        """The series' value at ``now_ns``, from NVML's number; None if it did not change.

        ``always``: give it all the same. Encoding a point costs more than reading it.
        """
        if self.quantity.kind == "counter":
            if self.last is not None:
                self.total += raw - self.last if raw >= self.last else raw  # it fell: it began anew
            self.last, raw = raw, self.total
        if raw == self.sent and not always:
            return None
        self.sent = raw
        return self.quantity.sample(raw, self.attributes, now_ns)


class LiveCall:
    """A call still worth making."""

    __slots__ = ("call", "failures", "series")

    def __init__(self, call: table.Call, identity: Mapping[str, Any]) -> None:
        self.call = call
        self.series = [Series(quantity, identity) for quantity in call.quantities]
        self.failures = 0


class LiveField:
    """A field value still worth asking for."""

    __slots__ = ("failures", "field", "id", "series")

    def __init__(self, field: table.Field, number: int, identity: Mapping[str, Any]) -> None:
        self.field = field
        self.id = (number, field.scope)
        self.series = Series(field.quantity, identity)
        self.failures = 0


class Device:
    """A GPU, or a MIG device, which has only memory and processes of its own."""

    def __init__(self, nvml: Any, target: Target, parent_uuid: str = "") -> None:
        self.handle = target.handle
        self.uuid = target.uuid
        self.identity: dict[str, Any] = {sc.HW_ID: target.uuid}
        if parent_uuid:
            self.identity[sc.HW_PARENT] = parent_uuid
        self.description = self._describe(nvml)
        self.fast: list[LiveCall] = []
        self.slow: list[LiveCall] = []
        self.fields: list[LiveField] = []
        self.processes = [LiveCall(table.PROCESSES, self.identity)]
        if parent_uuid:
            self.fast = [LiveCall(table.MEMORY_CALL, self.identity)]
            return
        self.fast = [LiveCall(call, self.identity) for call in table.FAST_CALLS]
        self.slow = [LiveCall(call, self.identity) for call in table.SLOW_CALLS]
        for field in table.FIELDS:
            number = getattr(nvml, field.name, None)
            if number is not None:  # a constant that this pynvml lacks is a quantity left out
                self.fields.append(LiveField(field, number, self.identity))

    def _describe(self, nvml: Any) -> dict[str, Any]:
        described = {**self.identity, sc.HW_VENDOR: "NVIDIA"}
        try:
            described[sc.HW_MODEL] = str(nvml.nvmlDeviceGetName(self.handle))
            described[sc.HW_NAME] = f"gpu{nvml.nvmlDeviceGetIndex(self.handle)}"
        except nvml.NVMLError:
            return described  # the UUID says which device it is
        return described

    def status(self, lost: bool, now_ns: int) -> list[Sample]:
        """``hw.status``: one of ok and failed is 1. Only these points say name, model and vendor."""
        return [
            table.STATUS.sample(int(lost == failed), {**self.description, **attributes}, now_ns)
            for failed, attributes in table.STATES.items()
        ]
