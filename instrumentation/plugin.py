"""The entry point that vLLM calls in every process: ``vllm.general_plugins`` -> :func:`load`."""

from __future__ import annotations

import logging
import os
from types import ModuleType

from . import settings
from .trace_context import new_span_id

_logger = logging.getLogger("vllm.stratoscope")
_loaded_in_pid = 0


def load() -> None:
    """Install the hook in this process; safe to call more than once; never raises.

    Does nothing at all unless an OTLP endpoint is configured (see ``docs/configuration.md``).
    """
    global _loaded_in_pid
    if _loaded_in_pid == os.getpid():
        return
    try:
        configured = settings.read()
        if configured is None:
            return
        _loaded_in_pid = os.getpid()
        _install(configured)
    except Exception as error:
        _logger.warning("stratoscope: cannot load, vLLM runs without it: %s", error, exc_info=True)


def _install(configured: settings.Settings) -> None:
    from . import flush as _flush  # noqa: F401  heavy imports belong to vLLM's start, not to its first request
    from . import hook as hook_module
    from .core_hook import CoreHook
    from .frontend import FrontendHook
    from .patching import when_imported
    from .points import POINTS, Point
    from .worker import WorkerHook

    # Processes that this one starts share the id, so that a server's parts are known as one.
    os.environ.setdefault("STRATOSCOPE_INSTANCE_ID", f"{new_span_id():016x}")
    hook = hook_module.get(configured)
    hook.parts.update(frontend=FrontendHook(hook), core=CoreHook(hook), worker=WorkerHook(hook))

    def install(point: Point, module: ModuleType) -> None:
        make = getattr(hook.parts[point.hook], point.make)
        if point.argument is not None:
            make = make(point.argument)
        owner = getattr(module, point.owner, None)
        wrapped = owner is not None and hook.patcher.wrap(owner, point.attribute, point.name, make)
        if not wrapped and not point.optional:
            hook.account.missing.append(point.name)

    for point in POINTS:
        when_imported(point.module, lambda module, point=point: install(point, module))  # type: ignore[misc]
