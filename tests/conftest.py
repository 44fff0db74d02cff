"""In CI a test that skips because something is not installed is a failure: nothing may be missing there."""

from __future__ import annotations

import os

import pytest

_skipped: list[str] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note each skip."""
    if report.skipped and not hasattr(report, "wasxfail"):
        _note(report.nodeid, report.longrepr)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Note each module skipped as a whole."""
    if report.skipped:
        _note(report.nodeid, report.longrepr)


def _note(where: str, why: object) -> None:
    reason = why[2] if isinstance(why, tuple) else why
    _skipped.append(f"{where}: {reason}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the run in CI if anything was skipped for want of a package or a program."""
    missing = [line for line in _skipped if "could not import" in line or "not installed" in line]
    if missing and os.environ.get("CI") == "true":
        session.exitstatus = 1
        print("\nskipped in CI, where nothing may be missing:", *missing, sep="\n  ")
