"""Progress for people: spinners and a live matrix on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from stratoscope.cli.text import clean

if TYPE_CHECKING:
    from rich.console import RenderableType

    from stratoscope.demo.load import ClientRequest


class Display:
    """Writes to ``console``."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def say(self, sentence: str, style: str = "") -> None:
        """One line, as it is."""
        self.console.print(Text(sentence, style=style))

    @contextlib.contextmanager
    def step(self, title: str) -> Iterator[Callable[[str], None]]:
        """A slow step: yields a function that tells how it is going, ends with the time it took."""
        started = time.monotonic()
        if not self.console.is_terminal:
            self.say(f"{title} …")
            yield lambda _: None
        else:
            columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
            with Progress(*columns, console=self.console, transient=True) as progress:
                task = progress.add_task(title, total=None)
                yield lambda words: progress.update(
                    task, description=f"{title}: {clean(words)}" if words else title
                )
        self.console.print(
            Text("✓ ", style="green").append(f"{title} ({time.monotonic() - started:.1f} s)", "")
        )

    @contextlib.contextmanager
    def load(self, title: str, total: int | None) -> Iterator[LoadView]:
        """The load: yields a view that takes finished requests and, now and then, the matrix."""
        view = LoadView(self, title, total)
        with view.live if view.live is not None else contextlib.nullcontext():
            yield view
        self.console.print(Text("✓ ", style="green").append(f"{title}: {view.words()}", ""))


class LoadView:
    """Counts finished requests; on a terminal it shows a bar and the matrix below it."""

    def __init__(self, display: Display, title: str, total: int | None) -> None:
        self._display, self._title, self._total = display, title, total
        self._outcomes: Counter[str] = Counter()
        self._told = 0
        self._matrix: RenderableType = ""
        self.live: Live | None = None
        if display.console.is_terminal:
            self._bar = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
            )
            self._task = self._bar.add_task(title, total=total)
            self.live = Live(
                console=display.console, transient=True, refresh_per_second=4, get_renderable=self._view
            )

    def done(self, result: ClientRequest) -> None:
        """Count one finished request."""
        self._outcomes[result.outcome] += 1
        count = self._outcomes.total()
        if self.live is not None:
            self._bar.update(self._task, completed=count)
        elif self._total and count * 4 // self._total > self._told:
            self._told = count * 4 // self._total
            self._display.say(f"  {count} of {self._total} requests: {self.words()}")

    def show(self, matrix: Any) -> None:
        """Show this below the bar from now on."""
        self._matrix = matrix

    def words(self) -> str:
        """``220 ok, 20 aborted``."""
        return ", ".join(f"{number} {name}" for name, number in self._outcomes.most_common()) or "nothing yet"

    def _view(self) -> RenderableType:
        return Group(self._bar, Text(f"  {self.words()}", style="dim"), "", self._matrix)
