"""``docs/causes.md`` from the table in :mod:`.taxonomy`.

Example: ``python -m stratoscope.attribution.docs > docs/causes.md``
"""

from __future__ import annotations

import sys

from .taxonomy import CELLS, LAYERS, Cell

_INTRO = """# Causes

Every nanosecond of a request's latency is charged to one cause, named `layer.cause`, and carries one
label for each layer: what the model, the framework and the infrastructure were doing. A label that
no evidence supports is `unknown`. How time is cut and charged is told in [attribution.md](attribution.md).

This page is generated from `attribution/taxonomy.py`; do not edit it:
`python -m stratoscope.attribution.docs > docs/causes.md`.
"""
_TITLES = {
    "model": "Model: work on tokens",
    "framework": "Framework: vLLM and its API server",
    "infrastructure": "Infrastructure: the machine",
    "unattributed": "Unattributed: time that the records do not explain",
}


def render() -> str:
    """The page as Markdown."""
    parts = [_INTRO]
    for layer in LAYERS:
        cells = [cell for cell in CELLS if cell.layer == layer]
        if cells:
            parts.append(f"## {_TITLES[layer]}\n\n" + "\n".join(_table(cells)) + "\n")
    return "\n".join(parts)


def _table(cells: list[Cell]) -> list[str]:
    head = ["| cause | meaning | evidence | model label | framework label |", "|---|---|---|---|---|"]
    return head + [
        f"| `{cell.name}` | {cell.meaning} | {cell.evidence} | {cell.model} | {cell.framework} |"
        for cell in cells
    ]


if __name__ == "__main__":
    sys.stdout.write(render())
