"""The documentation says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from stratoscope.collector import config_docs
from stratoscope.instrumentation import semconv, semconv_docs
from stratoscope.instrumentation.points import POINTS

ROOT = Path(__file__).parents[2]
DOCS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
CODE = [path for path in ROOT.glob("*/**/*.py") if ".venv" not in path.parts and "typings" not in path.parts]


def test_telemetry_is_made_from_semconv() -> None:
    assert (ROOT / "docs/telemetry.md").read_text() == semconv_docs.render()


def test_telemetry_names_every_constant_column_and_code() -> None:
    page = (ROOT / "docs/telemetry.md").read_text()
    for name, value in vars(semconv).items():
        if name.isupper() and isinstance(value, str):
            assert f"`{value}`" in page, name
        elif name.endswith("_COLUMNS"):
            assert all(f"`{column}`" in page for column in value), name
    for enum in (semconv.EventKind, semconv.WaitReason, semconv.StepFlag):
        assert all(f"{int(member)} {member.name}" in page for member in enum)


def test_agent_keys_are_made_from_the_configuration_classes() -> None:
    assert (ROOT / "docs/agent-keys.md").read_text().strip() == config_docs.render().strip()


def test_every_variable_is_documented_and_none_is_made_up() -> None:
    found = {name for path in CODE for name in re.findall(r"STRATOSCOPE_[A-Z_]+[A-Z]", path.read_text())}
    page = (ROOT / "docs/configuration.md").read_text()
    assert found == set(re.findall(r"STRATOSCOPE_[A-Z_]+[A-Z]", page))


def test_compatibility_knows_the_hook_points_that_differ() -> None:
    page = (ROOT / "docs/compatibility.md").read_text()
    names = {point.name for point in POINTS}
    named = set(re.findall(r"`((?:core|frontend|worker)\.\w+)`", page))
    assert named and named <= names | {"core.preempt_request", "worker.sample_tokens"}


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_relative_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", path.read_text()):
        if "://" not in target:
            assert (path.parent / target).exists(), target
