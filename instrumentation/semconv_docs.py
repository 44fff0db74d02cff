"""Renders ``docs/telemetry.md`` from ``semconv.py``: ``python -m stratoscope.instrumentation.semconv_docs``.

The source is read as text, since its comments are half of the documentation.
"""

from __future__ import annotations

import re
from pathlib import Path

from . import semconv

_HEAD = """\
# What the hook sends

The wire contract between the hook and the agent. It is plain OTLP: spans for requests, spans that carry
tables ("windows") for steps, and metrics for samples; it passes any OpenTelemetry Collector unharmed. This
page is made from `instrumentation/semconv.py` (`python -m stratoscope.instrumentation.semconv_docs`), which
is the one place where names are defined.

- A request is one trace, under the client's own trace id, over all processes: the API server's span
  (`request.server`), a child for each engine request (`request.engine`), and a child for each engine request
  on each worker rank (`request.worker`).
- Windows are spans in traces of their own. A table is one bytes attribute: rows of little-endian int64, with
  the column names beside it. Readers pick columns by name; new ones may be added.
- Times are nanoseconds of `CLOCK_MONOTONIC`, one clock for all processes of a host; 0 means not recorded.
- Steps of a request without a row in its event table are plain decode steps, from its first to its last step
  and outside a preemption.

## scope and entry point

| name | meaning |
|---|---|
"""
_CONSTANT = re.compile(
    r'^(?P<indent> {4})?(?P<name>[A-Z][A-Z0-9_]*): Final = "(?P<value>[^"]+)"(?:  # (?P<note>.*))?$'
)
_MEMBER = re.compile(r"^    (?P<name>[A-Z][A-Z0-9_]*) = (?P<value>\d+)(?:  # (?P<note>.*))?$")
_COLUMN = re.compile(r'^    "(?P<name>[a-z0-9_]+)",(?:  # (?P<note>.*))?$')
_CLASS = re.compile(r"^class (?P<name>\w+)")
_TABLE = re.compile(r"^(?P<name>[A-Z_]+_COLUMNS): Final = \((?P<rest>.*)$")


def render() -> str:
    """The page."""
    lines = [_HEAD.rstrip()]
    source = Path(semconv.__file__).read_text(encoding="utf-8").splitlines()
    for line in source:
        lines += _line(line)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def _line(line: str) -> list[str]:
    if line.startswith("# --"):
        return ["", f"## {line.strip('# -')}", "", "| name | meaning |", "|---|---|"]
    if found := _CLASS.match(line):
        return ["", f"### {found['name']}", "", "| name | meaning |", "|---|---|"]
    if found := _TABLE.match(line):
        head = ["", f"### Table {found['name']}", "", "| column | meaning |", "|---|---|"]
        names = re.findall(r'"([a-z0-9_]+)"', found["rest"])
        return head + [f"| `{name}` | |" for name in names]
    if found := _CONSTANT.match(line):
        return [f"| `{found['value']}` | {_cell(found['note'] or found['name'].lower().replace('_', ' '))} |"]
    if found := _MEMBER.match(line):
        return [f"| {found['value']} {found['name']} | {_cell(found['note'])} |"]
    if found := _COLUMN.match(line):
        return [f"| `{found['name']}` | {_cell(found['note'])} |"]
    return []


def _cell(text: str | None) -> str:
    return (text or "").replace("|", "\\|")


if __name__ == "__main__":
    print(render(), end="")
