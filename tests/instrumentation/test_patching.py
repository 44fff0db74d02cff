"""Wrappers: called once, taken out after faults, put on late imports too."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stratoscope.instrumentation.account import Account
from stratoscope.instrumentation.patching import MAX_FAULTS, Patcher, when_imported


class Engine:
    def __init__(self) -> None:
        self.calls = 0

    def step(self) -> int:
        """One step."""
        self.calls += 1
        return self.calls


@pytest.fixture
def patcher() -> Iterator[Patcher]:
    made = Patcher(Account())
    yield made
    made.unhook_all()


def counting(seen: list[str]) -> Callable[[Any], Any]:
    def make(original: Any) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            seen.append("called")
            return original(*args, **kwargs)

        return wrapper

    return make


@pytest.mark.parametrize("on_instance", [False, True])
def test_wrap_is_idempotent_and_undone(patcher: Patcher, on_instance: bool) -> None:
    engine, seen = Engine(), list[str]()
    owner: Any = engine if on_instance else Engine
    assert patcher.wrap(owner, "step", "point", counting(seen))
    assert patcher.wrap(owner, "step", "point", counting(seen))
    assert engine.step() == 1
    assert seen == ["called"]
    assert engine.step.__doc__ == "One step."
    patcher.unhook("point")
    assert engine.step() == 2
    assert seen == ["called"]
    assert "step" not in vars(engine)
    assert patcher.account.disabled == ["point"]


def test_a_missing_attribute_is_false_and_harmless(patcher: Patcher) -> None:
    assert not patcher.wrap(Engine, "step_with_batch_queue", "point", counting([]))


def test_a_point_goes_out_after_a_few_faults(patcher: Patcher, caplog: pytest.LogCaptureFixture) -> None:
    def make(original: Any) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            patcher.fault("point", ValueError("ours"))
            return result

        return wrapper

    engine = Engine()
    patcher.wrap(engine, "step", "point", make)
    for expected in range(1, MAX_FAULTS + 4):
        assert engine.step() == expected
    assert patcher.account.errors == MAX_FAULTS
    assert patcher.account.disabled == ["point"]
    assert not patcher.wrap(engine, "absent", "point", make)
    assert patcher.wrap(engine, "step", "point", make) and "step" not in vars(engine)
    assert len([record for record in caplog.records if "fault at hook point" in record.message]) == 1


def test_a_wrapper_above_ours_is_left_alone(patcher: Patcher) -> None:
    engine, ours, theirs = Engine(), list[str](), list[str]()
    patcher.wrap(engine, "step", "point", counting(ours))
    engine.step = counting(theirs)(engine.step)  # type: ignore[method-assign]
    patcher.unhook("point")
    assert engine.step() == 1
    assert theirs == ["called"]


def test_a_module_is_patched_when_it_is_imported_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "late_module_for_test.py").write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    seen: list[int] = []
    when_imported("late_module_for_test", lambda module: seen.append(module.VALUE))
    assert seen == []
    importlib.import_module("late_module_for_test")
    assert seen == [1]
    when_imported("late_module_for_test", lambda module: seen.append(module.VALUE + 1))
    assert seen == [1, 2]
    monkeypatch.delitem(sys.modules, "late_module_for_test")


def test_an_import_that_fails_still_fails_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_module_for_test.py").write_text("raise RuntimeError('theirs')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    when_imported("broken_module_for_test", lambda module: None)
    with pytest.raises(RuntimeError, match="theirs"):
        importlib.import_module("broken_module_for_test")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("absent_module_for_test")
