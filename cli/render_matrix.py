"""The attribution matrix as a table: causes by layer down, latency bands across."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from stratoscope.cli.console import layer_color
from stratoscope.cli.text import clean, count, percent, seconds

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

LAYERS = ("model", "framework", "infrastructure", "unattributed")
SMALL_SHARE = 0.001
WIDE = 100  # columns from which on a cell shows seconds beside its share
PHASE_WORDS = {
    "e2e": "whole latency",
    "ttft": "time to first token",
    "decode": "first token to last byte",
    "itl": "between tokens",
}


@dataclass
class Grid:
    """One phase of the matrix: ``cells[layer, cause][band]`` in seconds, and sums."""

    bands: list[str] = field(default_factory=list)
    requests: dict[str, int] = field(default_factory=dict)
    cells: dict[tuple[str, str], dict[str, float]] = field(default_factory=dict)

    def band_s(self, band: str) -> float:
        """Seconds in one band."""
        return sum(row.get(band, 0.0) for row in self.cells.values())

    @property
    def total_s(self) -> float:
        """Seconds in all bands."""
        return sum(map(self.band_s, self.bands))


def grid(rows: Iterable[Mapping[str, Any]], phase: str) -> Grid:
    """The rows of one phase, with the bands in the order in which they come."""
    result = Grid()
    for row in rows:
        if row["phase"] != phase:
            continue
        band = str(row["band"])
        if band not in result.requests:
            result.bands.append(band)
            result.requests[band] = 0
        result.requests[band] = max(result.requests[band], int(row.get("requests") or 0))
        cell = result.cells.setdefault((str(row["layer"]), str(row["cause"])), {})
        cell[band] = cell.get(band, 0.0) + float(row["seconds"])
    return result


def matrix_table(
    rows: Iterable[Mapping[str, Any]], phase: str, width: int, everything: bool = False
) -> RenderableType:
    """The table for ``width`` columns. Causes under 0.1 % in every band are summed up in one line
    a layer, unless ``everything``."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    data = grid(rows, phase)
    if not data.total_s:
        return Text(f"no time is recorded for {PHASE_WORDS.get(phase, phase)} yet", style="dim")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False)
    table.add_column(f"{PHASE_WORDS.get(phase, phase)}", no_wrap=True, overflow="ellipsis", ratio=None)
    for band in data.bands:
        table.add_column(_heading(band, data), justify="right", no_wrap=True)
    table.add_column("all", justify="right", no_wrap=True)
    for layer in [*LAYERS, *sorted({key[0] for key in data.cells} - set(LAYERS))]:
        _add_layer(table, data, layer, width >= WIDE, everything)
    table.add_section()
    sums = [Text(seconds(data.band_s(band)), style="bold") for band in data.bands]
    table.add_row(Text("total", style="bold"), *sums, Text(seconds(data.total_s), style="bold"))
    return table


def _heading(band: str, data: Grid) -> Text:
    from rich.text import Text

    return Text(clean(band, 24)).append(f"\n{count(data.requests[band], 'req')}", style="dim not bold")


def _add_layer(table: Any, data: Grid, layer: str, wide: bool, everything: bool) -> None:
    from rich.text import Text

    of_layer = {cause: row for (name, cause), row in data.cells.items() if name == layer}
    causes = {cause: row for cause, row in of_layer.items() if sum(row.values()) > 0}
    if not causes:
        return
    color = layer_color(layer)
    total = {band: sum(row.get(band, 0.0) for row in causes.values()) for band in data.bands}
    title = Text(clean(layer), style=f"bold {color}")
    table.add_row(title, *_cells(total, data, color, wide, bold=True))
    small: dict[str, float] = {}
    hidden = 0
    for cause, row in sorted(causes.items(), key=lambda item: -sum(item[1].values())):
        if not everything and _is_small(row, data):
            hidden += 1
            for band, value in row.items():
                small[band] = small.get(band, 0.0) + value
        else:
            table.add_row(Text(f"  {clean(cause, 40)}"), *_cells(row, data, color, wide))
    if hidden:
        label = Text(f"  {count(hidden, 'more cause')}", style="dim")
        table.add_row(label, *_cells(small, data, color, wide))


def _is_small(row: Mapping[str, float], data: Grid) -> bool:
    return all(
        row.get(band, 0.0) < SMALL_SHARE * data.band_s(band) for band in data.bands if data.band_s(band)
    )


def _cells(row: Mapping[str, float], data: Grid, color: str, wide: bool, bold: bool = False) -> list[Text]:
    cells = [_cell(row.get(band, 0.0), data.band_s(band), color, wide, bold) for band in data.bands]
    return [*cells, _cell(sum(row.values()), data.total_s, color, True, bold)]


def _cell(value_s: float, of_s: float, color: str, wide: bool, bold: bool) -> Text:
    """Seconds and share on a background as strong as the share."""
    from rich.style import Style
    from rich.text import Text

    share = value_s / of_s if of_s else 0.0
    words = f"{percent(share):>6}"
    if wide:
        words = f"{seconds(value_s) if value_s else '':>7} {words}"
    if bold:
        return Text(words, style=Style(bold=True, color=color))
    if share < 0.005:
        return Text(words, style="dim")
    return Text(words, style=Style(color="#ffffff", bgcolor=_shade(color, share)))


def _shade(color: str, share: float) -> str:
    strength = 0.15 + 0.6 * min(1.0, share / 0.5)
    red, green, blue = (round(int(color[i : i + 2], 16) * strength) for i in (1, 3, 5))
    return f"#{red:02x}{green:02x}{blue:02x}"
