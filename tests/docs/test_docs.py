"""The documentation says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from stratoscope.collector import config_docs
from stratoscope.instrumentation import semconv, semconv_docs
from stratoscope.instrumentation.points import INSTANCE_POINTS, POINTS, SUPPORTED_VLLM, TESTED_VLLM

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


def test_every_standard_variable_that_is_read_is_documented() -> None:
    page = (ROOT / "docs/configuration.md").read_text()
    code = [path for folder in ("instrumentation", "cli") for path in (ROOT / folder).rglob("*.py")]
    pattern = re.compile(r"\bOTEL_[A-Z_]*[A-Z](?![A-Z_*])")  # not OTEL_EXPORTER_OTLP_*
    found = {name for path in code for name in pattern.findall(path.read_text())}
    assert "OTEL_EXPORTER_OTLP_ENDPOINT" in found
    assert not {name for name in found if not re.search(rf"\b{name}\b", page)}


def test_compatibility_lists_every_hook_point_and_no_other() -> None:
    page = (ROOT / "docs/compatibility.md").read_text()
    rows = page.partition("## Every hook point")[2].splitlines()
    for point in POINTS:
        start = f"| `{point.name}` | `{point.module}.{point.owner}.{point.attribute}` | {point.gives}"
        assert any(row.startswith(start) for row in rows), start
    for name, wrapped in INSTANCE_POINTS.items():
        method = wrapped.partition(" ")[0]
        assert any(row.startswith(f"| `{name}` | on the instance: `{method}`") for row in rows), name
    named = set(re.findall(r"`((?:core|frontend|worker)\.\w+)`", page))
    assert named == {point.name for point in POINTS} | set(INSTANCE_POINTS)
    assert sum(row.startswith("| `") for row in rows) == len(POINTS) + len(INSTANCE_POINTS)


def test_compatibility_names_the_versions() -> None:
    page = (ROOT / "docs/compatibility.md").read_text()
    tested = page.partition("Tested: ")[2].partition("Supported by name: ")
    assert all(version in tested[0] for version in TESTED_VLLM)
    assert tested[2].startswith(SUPPORTED_VLLM.removeprefix(">="))


def test_the_readme_leads_to_every_page() -> None:
    page = (ROOT / "README.md").read_text()
    assert not [path.name for path in ROOT.glob("docs/*.md") if f"(docs/{path.name})" not in page]


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_relative_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", path.read_text()):
        if "://" not in target:
            assert (path.parent / target).exists(), target
