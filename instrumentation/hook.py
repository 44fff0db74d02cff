"""The hook's state in one process: identity, buffers, account, and the flush thread.

Everything the wrappers record lands in a ring (tables) or a bounded deque (finished requests);
only the flush thread turns them into OTLP, so no export work is ever done on vLLM's threads.
"""

from __future__ import annotations

import collections
import logging
import multiprocessing.util
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .account import Account
from .patching import Patcher
from .ring import Ring
from .settings import Settings
from .trace_context import new_span_id

if TYPE_CHECKING:
    from .flush import FlushThread
    from .gpu.nvml import NvmlSampler

_logger = logging.getLogger("vllm.stratoscope")


class Window:
    """A ring with what its window spans say beside the rows (role, engine, rank)."""

    __slots__ = ("attributes", "columns", "pending_since_ns", "record", "ring")

    def __init__(self, record: str, columns: tuple[str, ...], rows: int, attributes: dict[str, Any]) -> None:
        self.record = record
        self.columns = columns
        self.ring = Ring(len(columns), rows)
        self.attributes = attributes
        self.pending_since_ns = 0  # start of the oldest row that is held back; 0: none is


class Hook:
    """One per process; :func:`get` makes it. Threads of vLLM write, the flush thread reads."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.account = Account()
        self.patcher = Patcher(self.account)
        self.collectors: list[Callable[[], None]] = []  # hand over what is open when the process ends
        self.forgetters: list[Callable[[], None]] = []  # drop what belongs to the parent, after a fork
        self.parts: dict[str, Any] = {}  # frontend, core, worker: the objects behind the wrappers
        self._begin()

    def _begin(self) -> None:
        self.pid = os.getpid()
        self.process_uid = f"{new_span_id():016x}"
        self.windows: list[Window] = []
        # (kind, record object) of requests whose part in this process is over
        self.finished: collections.deque[tuple[str, Any]] = collections.deque()
        self.expanders: list[Callable[[], None]] = []  # run by the flush thread before it drains
        self.samplers: list[NvmlSampler] = []
        # server requests still open: exported as a table, so that a killed process leaves a trace
        self.open: dict[int, Any] = {}
        self.model_name = ""
        self._flush: FlushThread | None = None
        self._start_lock = threading.Lock()
        self._gave_up = False

    def after_fork(self) -> None:
        """In a forked child: the wrappers are here, the parent's records and threads are not."""
        missing, disabled = self.account.missing, self.account.disabled
        self.account.__init__()  # type: ignore[misc]  # in place: the wrappers hold this object
        self.account.missing, self.account.disabled = missing, disabled
        self._begin()
        for forget in self.forgetters:
            forget()

    def window(self, record: str, columns: tuple[str, ...], attributes: dict[str, Any]) -> Window:
        """A new table to record into; it is exported from now on, with ``attributes`` beside it."""
        window = Window(record, columns, self.settings.ring_rows, attributes)
        self.windows.append(window)
        self.start()
        return window

    def finish(self, kind: str, record: Any) -> None:
        """Hand a finished request record to the flush thread; drop and count if it lags behind."""
        if len(self.finished) >= self.settings.max_open_requests:
            self.account.dropped += 1
            return
        self.finished.append((kind, record))

    def start(self) -> None:
        """Start the flush thread if it does not run: at the first record, after the last fork."""
        if self._flush is not None or self._gave_up:
            return
        with self._start_lock:
            if self._flush is not None or self._gave_up:
                return
            from .flush import FlushThread  # imported already by the plugin: this cannot be slow

            try:
                self._flush = FlushThread(self)
                self._flush.start()
            except Exception as error:
                self.give_up(error)
                return
            # Runs at exit of the main process and of multiprocessing children, which skip atexit.
            multiprocessing.util.Finalize(None, self.shutdown, exitpriority=100)

    def give_up(self, error: BaseException) -> None:
        """There can be no export: take every wrapper out, vLLM serves on."""
        self._gave_up = True
        self.account.errors += 1
        self.patcher.unhook_all()
        _logger.warning("stratoscope: cannot start, recording is off: %s", error)

    def shutdown(self) -> None:
        """Close open requests as unfinished and give the flush thread two seconds."""
        flush, self._flush = self._flush, None
        self._gave_up = True
        if flush is None or os.getpid() != self.pid:
            return
        for sampler in self.samplers:
            sampler.stop(0.5)
        flush.stop(timeout_s=2.0)


_hook: Hook | None = None


def installed() -> Hook | None:
    """This process's hook, if the plugin has loaded one."""
    return _hook


def get(settings: Settings) -> Hook:
    """This process's hook, made on first use; a forked child gets it emptied."""
    global _hook
    if _hook is None:
        _hook = Hook(settings)
        os.register_at_fork(after_in_child=_hook.after_fork)
    return _hook
