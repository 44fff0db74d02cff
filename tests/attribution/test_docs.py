"""The pages about causes say what the code does."""

from __future__ import annotations

from pathlib import Path

import pytest

from stratoscope.attribution.docs import render
from stratoscope.attribution.taxonomy import CELL_NAMES, PHASES

DOCS = Path(__file__).parents[2] / "docs"


def test_causes_page_is_up_to_date():
    assert (DOCS / "causes.md").read_text() == render(), (
        "run: python -m stratoscope.attribution.docs > docs/causes.md"
    )


@pytest.mark.parametrize("name", CELL_NAMES)
def test_every_cause_is_explained_once(name):
    assert render().count(f"| `{name}` |") == 1


def test_method_page_defines_every_phase():
    text = (DOCS / "attribution.md").read_text()
    assert all(f"**{phase}**" in text for phase in PHASES)
