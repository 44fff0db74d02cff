"""One request as a waterfall: where its time went, in order, and in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stratoscope.cli.console import layer_color
from stratoscope.cli.text import clean, duration, percent, seconds

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

Row = Mapping[str, Any]
SHORT_LIST = 20  # so many rows are shown whatever their size
MAX_ROWS = 40
SMALL_SHARE = 0.001
MAX_NEIGHBOURS = 8
MIN_BAR = 4
WIDE = 100  # columns from which on the group has a column
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def print_request(console: Console, document: Mapping[str, Any], everything: bool = False) -> None:
    """Title, waterfall, sentences, neighbours."""
    from rich.table import Table
    from rich.text import Text

    console.print(title(document))
    facts = _facts(document)
    if facts:
        console.print(Text(facts, style="dim"))
    console.print()
    waterfall = document.get("waterfall") or []
    if waterfall:
        console.print(waterfall_table(waterfall, console.width, console.options.ascii_only, everything))
        console.print()
    sentences = Table.grid(padding=(0, 1))
    for sentence in document.get("explanation") or []:
        sentences.add_row("•", Text(clean(sentence, 600)))
    if sentences.row_count:
        console.print(sentences)
    _print_neighbours(console, document.get("neighbours"))


def title(document: Mapping[str, Any]) -> Text:
    """The trace id, the latency and the outcome."""
    from rich.text import Text

    attributes = document.get("attributes") or {}
    text = Text("request ", style="bold").append(clean(document.get("trace_id", "?"), 64), style="bold cyan")
    e2e_s = _phase_s(document, "e2e")
    if e2e_s is not None:
        text.append(f"  {seconds(e2e_s)}", style="bold")
    outcome = attributes.get("outcome")
    if outcome:
        text.append(f"  {clean(outcome, 20)}", style="green" if outcome == "ok" else "yellow")
    return text


def waterfall_table(
    rows: Sequence[Row], width: int, ascii_only: bool = False, everything: bool = False
) -> Any:
    """A table of the rows with bars to scale, for ``width`` columns."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    end_ms = max(float(row["start_ms"]) + float(row["duration_ms"]) for row in rows)
    shown, hidden = (rows, []) if everything else _worth_showing(rows, end_ms)
    names = [_name(row) for row in shown]
    rest = f"{len(hidden)} shorter (--all)"
    groups = _changes([clean(row.get("group") or "", 14) for row in shown]) if width >= WIDE else []
    group_width = max(map(len, groups)) + 3 if groups else 0
    room = width - group_width - 32  # what the columns of fixed width and the gaps leave over
    name_width = min(max(map(len, names)), max(len(rest), room * 3 // 5))
    bar_width = max(MIN_BAR, room - name_width)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False)
    if groups:
        table.add_column("", no_wrap=True, style="dim")
    for name, fixed in (("from", 7), ("for", 7), ("share", 6)):
        table.add_column(name, justify="right", no_wrap=True, width=fixed)
    table.add_column("what", no_wrap=True, overflow="ellipsis", width=name_width)
    table.add_column("", no_wrap=True, width=bar_width)
    for number, (row, name) in enumerate(zip(shown, names, strict=True)):
        color = layer_color(str(row["layer"]))
        start_ms, length_ms = float(row["start_ms"]), float(row["duration_ms"])
        table.add_row(
            *([Text(groups[number])] if groups else []),
            Text(duration(start_ms), style="dim"),
            duration(length_ms),
            percent(length_ms / end_ms if end_ms else 0.0),
            Text(name, style=color),
            Text(bar(start_ms, length_ms, end_ms, bar_width, ascii_only), style=color),
        )
    if hidden:
        rest_ms = sum(float(row["duration_ms"]) for row in hidden)
        share = percent(rest_ms / end_ms if end_ms else 0.0)
        label = Text(rest, style="dim")
        table.add_row(*[""] * bool(groups), "", duration(rest_ms), share, label, "")
    return table


def bar(start: float, length: float, end: float, width: int, ascii_only: bool = False) -> str:
    """``width`` characters for [0, end], filled from ``start`` for ``length``; never quite empty."""
    if end <= 0:
        return " " * width
    first = min(int(start / end * width), width - 1)
    size = max(length / end * width, 0.0)
    if ascii_only:
        full = max(1, min(round(size), width - first))
        return " " * first + "#" * full + " " * (width - first - full)
    eighths = max(1, min(round(size * 8), (width - first) * 8))
    full, part = divmod(eighths, 8)
    text = " " * first + "█" * full + (_EIGHTHS[part] if part else "")
    return text.ljust(width)


def _worth_showing(rows: Sequence[Row], end_ms: float) -> tuple[Sequence[Row], Sequence[Row]]:
    """The rows to show, in order, and those left out: of a long list the shortest ones."""
    if len(rows) <= SHORT_LIST:
        return rows, []
    ranked = sorted(range(len(rows)), key=lambda i: -float(rows[i]["duration_ms"]))
    keep = {i for i in ranked[: MAX_ROWS - 1] if float(rows[i]["duration_ms"]) >= SMALL_SHARE * end_ms}
    return [rows[i] for i in sorted(keep)], [rows[i] for i in range(len(rows)) if i not in keep]


def _changes(words: Sequence[str]) -> list[str]:
    """The words, each only where it differs from the one before."""
    return [word if not i or words[i - 1] != word else "" for i, word in enumerate(words)]


def _name(row: Row) -> str:
    text = clean(row["cause"], 40)
    steps = row.get("steps")
    if isinstance(steps, int) and steps > 0:
        text += f" ({steps} step{'s' if steps > 1 else ''})"
    note = clean(row.get("note") or "", 60)
    # The reason of a wait is in its cause's name already, unless the scheduler gave several.
    return f"{text}: {note}" if note and note.replace(" ", "_") not in str(row["cause"]) else text


def _facts(document: Mapping[str, Any]) -> str:
    attributes = document.get("attributes") or {}
    parts = [clean(attributes[key], 40) for key in ("model", "route") if attributes.get(key)]
    ttft_s = _phase_s(document, "ttft")
    if ttft_s:
        parts.append(f"first token after {seconds(ttft_s)}")
    if attributes.get("input_tokens") is not None:
        parts.append(f"{attributes['input_tokens']} tokens in, {attributes.get('output_tokens', '?')} out")
    return ", ".join(parts)


def _phase_s(document: Mapping[str, Any], phase: str) -> float | None:
    found = (document.get("phases") or {}).get(phase)
    return None if found is None else float(found["seconds"])


def _print_neighbours(console: Console, neighbours: Any) -> None:
    from rich.text import Text

    if not isinstance(neighbours, list) or not neighbours:
        return
    console.print(Text("\nits steps also computed the prompts of", style="bold"))
    for neighbour in neighbours[:MAX_NEIGHBOURS]:
        cost_ms = float(neighbour.get("seconds") or 0) * 1e3
        words = f"{duration(cost_ms)}, {clean(neighbour.get('tokens'), 12)} tokens"
        console.print(
            Text("  ").append(clean(neighbour.get("trace_id", "?"), 64), style="cyan").append(f"  {words}")
        )
    if len(neighbours) > MAX_NEIGHBOURS:
        console.print(Text(f"  and {len(neighbours) - MAX_NEIGHBOURS} more (--json)", style="dim"))
