"""The terminal: consoles, colours, JSON output and SVG export. rich is imported on first use."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from stratoscope.cli.errors import PROBLEM, CliError

if TYPE_CHECKING:
    from rich.console import Console

LAYER_COLORS: Final = {
    "model": "#4e9fe5",
    "framework": "#e0a03a",
    "infrastructure": "#b98ae0",
    "unattributed": "#9a9a9a",
}
SVG_WIDTH: Final = 110


def layer_color(layer: str) -> str:
    """The colour of a layer, the same in every view."""
    return LAYER_COLORS.get(layer, LAYER_COLORS["unattributed"])


def make_console(stderr: bool = False) -> Console:
    """A console on stdout, or stderr. ``NO_COLOR`` and ``COLUMNS`` are respected, and without a
    terminal there are no colours."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False)


def show(
    paint: Callable[[Console], None], svg: str | None = None, title: str = "", stderr: bool = False
) -> None:
    """Let ``paint`` print on the terminal, and into an SVG picture too if ``svg`` names a file.

    The picture has its own width and colours, whatever the terminal. Raises :class:`CliError`.
    """
    paint(make_console(stderr))
    if svg is None:
        return
    from rich.console import Console

    canvas = Console(
        record=True,
        width=SVG_WIDTH,
        file=io.StringIO(),
        force_terminal=True,
        color_system="truecolor",
        highlight=False,
        legacy_windows=False,
        _environ={},
    )
    paint(canvas)
    try:
        canvas.save_svg(svg, title=title)
    except OSError as error:
        raise CliError(f"--svg {svg}: cannot be written: {error.strerror or error}", PROBLEM) from error


def print_json(document: Any) -> None:
    """One JSON document on stdout."""
    json.dump(document, sys.stdout, ensure_ascii=True, indent=2, allow_nan=False)
    sys.stdout.write("\n")
