"""Putting wrappers into vLLM and taking them out again.

Every wrapper calls the original exactly once and outside any ``try`` of ours; what the hook adds
runs guarded: an exception there is counted, logged once for its hook point, and after
:data:`MAX_FAULTS` of them the hook point is taken out for good.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from .account import Account

MAX_FAULTS = 5
_MARK = "_stratoscope_point"
_logger = logging.getLogger("vllm.stratoscope")

Wrapper = Callable[..., Any]


class Patcher:
    """The wrappers of one process, by hook point name, and the faults of each."""

    def __init__(self, account: Account) -> None:
        self.account = account
        self._undo: dict[str, list[Callable[[], None]]] = {}
        self._faults: dict[str, int] = {}

    def wrap(self, owner: Any, name: str, point: str, make: Callable[[Wrapper], Wrapper]) -> bool:
        """Replace ``owner.name`` by ``make(original)``; False if ``owner`` has no such attribute.

        ``owner`` is a class or an instance. Wrapping twice is a no-op: vLLM loads plugins more
        than once in some processes.
        """
        original = getattr(owner, name, None)
        if original is None:
            return False
        if getattr(original, _MARK, None) == point:
            return True
        if point in self.account.disabled:
            return True
        own = name in vars(owner)
        wrapper = functools.wraps(original)(make(original))
        setattr(wrapper, _MARK, point)
        setattr(owner, name, wrapper)

        def undo() -> None:
            if vars(owner).get(name) is wrapper:  # someone may have wrapped us: then leave it
                if own:
                    setattr(owner, name, original)
                else:
                    delattr(owner, name)

        self._undo.setdefault(point, []).append(undo)
        return True

    def fault(self, point: str, error: BaseException) -> None:
        """Count an exception of the hook's own at ``point``; take the point out after a few."""
        self.account.errors += 1
        count = self._faults.get(point, 0) + 1
        self._faults[point] = count
        if count == 1:
            _logger.warning(
                "stratoscope: fault at hook point %s; vLLM is not affected", point, exc_info=error
            )
        if count == MAX_FAULTS:
            self.unhook(point)

    def unhook(self, point: str) -> None:
        """Take every wrapper of ``point`` out and keep it out."""
        if point in self.account.disabled:
            return
        self.account.disabled.append(point)
        for undo in self._undo.pop(point, []):
            try:
                undo()
            except (AttributeError, TypeError) as error:
                _logger.debug("stratoscope: cannot unhook %s: %s", point, error)
        _logger.warning("stratoscope: hook point %s turned off after %d faults", point, MAX_FAULTS)

    def unhook_all(self) -> None:
        """Take every wrapper out, in tests and when the hook gives up."""
        for undos in self._undo.values():
            for undo in undos:
                undo()
        self._undo.clear()


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls back right after a module has run, for modules that are not imported yet."""

    def __init__(self) -> None:
        self._callbacks: dict[str, list[Callable[[ModuleType], None]]] = {}
        self._finding: set[str] = set()

    def add(self, module: str, callback: Callable[[ModuleType], None]) -> None:
        self._callbacks.setdefault(module, []).append(callback)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._callbacks or fullname in self._finding:
            return None
        self._finding.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._finding.discard(fullname)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            for callback in self._callbacks.pop(fullname, []):
                callback(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_after_import = _AfterImport()


def when_imported(module: str, callback: Callable[[ModuleType], None]) -> None:
    """Call ``callback(module)`` now if ``module`` is imported already, else right after it is."""
    loaded = sys.modules.get(module)
    if loaded is not None and not getattr(getattr(loaded, "__spec__", None), "_initializing", False):
        callback(loaded)
        return
    _after_import.add(module, callback)
    if _after_import not in sys.meta_path:
        sys.meta_path.insert(0, _after_import)
