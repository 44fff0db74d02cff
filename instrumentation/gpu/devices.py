"""Which GPUs this process uses, as NVML knows them.

NVML ignores ``CUDA_VISIBLE_DEVICES``, so its value is resolved here by CUDA's own rules: a list of
indices, GPU UUIDs (or unique beginnings of them) or MIG UUIDs, cut at the first entry that names
nothing. Indices count in PCI bus order, as NVML and ``CUDA_DEVICE_ORDER=PCI_BUS_ID`` do; CUDA's
default order differs from it only where a host mixes GPU models.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Target(NamedTuple):
    """A GPU (``parent`` is None) or a MIG device with its GPU's handle; both are NVML handles."""

    handle: Any
    uuid: str
    parent: Any | None


def current_device() -> str | None:
    """UUID of the calling thread's CUDA device, without prefix; None where CUDA is not in use.

    Call it on the worker's own thread: the current device is a property of the thread. It never
    initialises CUDA.
    """
    torch = sys.modules.get("torch")
    try:
        if torch is None or not torch.cuda.is_initialized():
            return None
        return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    except Exception:  # an old torch without uuid, ROCm, a broken context
        return None


def visible(environ: Mapping[str, str]) -> list[str] | None:
    """Entries of ``CUDA_VISIBLE_DEVICES``; None: unset, all devices; empty: no device."""
    value = environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return None
    entries: list[str] = []
    for entry in (part.strip() for part in value.split(",")):
        if not entry or entry.startswith("-") or entry.lower() in ("void", "none", "nodevfiles"):
            break
        if entry not in entries:
            entries.append(entry)
    return entries


def resolve(nvml: Any, wanted: Sequence[str] | None) -> list[Target]:
    """NVML targets for ``wanted`` (None: every GPU), without duplicates.

    Raises ``NVMLError`` only if NVML cannot even count its devices.
    """
    if wanted is None:
        wanted = [str(index) for index in range(nvml.nvmlDeviceGetCount())]
    targets: dict[str, Target] = {}
    for entry in wanted:
        target = _find(nvml, entry)
        if target is None:
            break
        targets.setdefault(target.uuid, target)
    return list(targets.values())


def _find(nvml: Any, entry: str) -> Target | None:
    try:
        if entry.isdigit():
            handle = nvml.nvmlDeviceGetHandleByIndex(int(entry))
            return Target(handle, str(nvml.nvmlDeviceGetUUID(handle)), None)
    except nvml.NVMLError:
        return None
    prefixes = ("",) if entry.startswith(("GPU-", "MIG-")) else ("GPU-", "MIG-")
    for uuid in (prefix + entry for prefix in prefixes):
        try:
            handle, parent = nvml.nvmlDeviceGetHandleByUUID(uuid), None
            if uuid.startswith("MIG-"):
                parent = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
            return Target(handle, str(nvml.nvmlDeviceGetUUID(handle)), parent)
        except nvml.NVMLError:
            continue
    return _abbreviated(nvml, entry) if entry.startswith("GPU-") else None


def _abbreviated(nvml: Any, beginning: str) -> Target | None:
    found: list[Target] = []
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            uuid = str(nvml.nvmlDeviceGetUUID(handle))
        except nvml.NVMLError:
            continue
        if uuid.startswith(beginning):
            found.append(Target(handle, uuid, None))
    return found[0] if len(found) == 1 else None
