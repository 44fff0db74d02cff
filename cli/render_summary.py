"""What a run amounts to, in a few lines: requests, latency, conservation, the hook's cost, the slowest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stratoscope.cli.console import layer_color
from stratoscope.cli.text import clean, count, duration, percent

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

Document = Mapping[str, Any]


def summary_lines(document: Document) -> list[Text]:
    """Three or four lines about the whole."""
    from rich.text import Text

    if not document["requests"]:
        return [Text("no finished request is recorded yet", style="bold")]
    lines = [
        Text(count(int(document["requests"]), "request"), style="bold").append(
            _outcomes(document), "not bold"
        )
    ]
    latency = _latency(document.get("latency") or {})
    if latency:
        lines.append(Text(latency))
    lines.append(conservation_line(document.get("conservation") or {}))
    hook = _hook(document.get("hook") or {})
    if hook:
        lines.append(Text(hook, style="dim"))
    return lines


def conservation_line(conservation: Document) -> Text:
    """Whether the segments add up to the measured latency, and how much stays unexplained."""
    from rich.text import Text

    residual_ns = conservation.get("max_abs_residual_ns")
    if residual_ns is None:
        return Text("no finished request to check the sums of", style="dim")
    if residual_ns == 0:
        text = Text("segments add up to the measured latency, to the nanosecond", style="green")
    else:
        text = Text(f"segments miss the measured latency by up to {residual_ns:,} ns", style="bold red")
    mean, p99 = conservation.get("unattributed_share_mean"), conservation.get("unattributed_share_p99")
    if mean is not None:
        shown = [percent(share) if share else "0%" for share in (mean, p99)]
        text.append(f"; unattributed {shown[0]} on average, {shown[1]} at P99", style="default")
    return text


def slowest_table(rows: Sequence[Document], width: int) -> RenderableType:
    """The slowest requests with what cost them most."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False)
    table.add_column("slowest", no_wrap=True)
    table.add_column("latency", justify="right", no_wrap=True)
    table.add_column("TTFT", justify="right", no_wrap=True)
    if width >= 100:
        table.add_column("tokens", justify="right", no_wrap=True)
    table.add_column("mostly", overflow="fold")
    for row in rows:
        cells: list[Any] = [
            # 8 digits are enough to tell them apart; `why` takes a unique beginning of an id.
            Text(
                clean(row["trace_id"], 40) if width >= 120 else clean(row["trace_id"], 40)[:12], style="cyan"
            ),
            duration(row.get("e2e_ms")),
            duration(row.get("ttft_ms")),
        ]
        if width >= 100:
            cells.append(f"{row.get('input_tokens') or 0}+{row.get('output_tokens') or 0}")
        table.add_row(*cells, top_causes(row.get("top_causes") or []))
    return table


def top_causes(causes: Sequence[Any], most: int = 3) -> Text:
    """``wait_slots 61%, decode 22%`` in the layers' colours."""
    from rich.text import Text

    text = Text()
    for cause in causes[:most]:
        if text:
            text.append(", ")
        if isinstance(cause, Mapping):
            layer, name = str(cause.get("layer", "")), clean(cause.get("cause", "?"), 40)
            text.append(name, style=layer_color(layer)).append(f" {percent(cause.get('share'))}")
        else:
            text.append(clean(cause, 60))
    return text


def _outcomes(document: Document) -> str:
    outcomes = document.get("outcomes") or {}
    parts = [f"{number:,} {clean(name, 20)}" for name, number in outcomes.items() if number]
    return f": {', '.join(parts)}" if parts else ""


def _latency(latency: Document) -> str:
    parts = []
    for key, words in (("e2e", "latency"), ("ttft", "TTFT"), ("itl", "ITL")):
        values = latency.get(key)
        if isinstance(values, Mapping):
            numbers = [
                f"{name} {duration(values[f'{name}_ms'])}"
                for name in ("p50", "p99")
                if values.get(f"{name}_ms") is not None
            ]
            if numbers:
                parts.append(f"{words} {', '.join(numbers)}")
    return "; ".join(parts)


def _hook(hook: Document) -> str:
    if hook.get("us_per_step") is None:
        return ""
    text = f"the hook cost {hook['us_per_step']:.1f} µs a step"
    if hook.get("us_per_step_overlapped") is not None:
        text += f" (and {hook['us_per_step_overlapped']:.1f} µs beside the workers)"
    if hook.get("us_per_request") is not None:
        text += f", {hook['us_per_request']:.0f} µs a request"
    losses = [
        f"{hook[key]:,} {words}"
        for key, words in (("dropped", "records lost"), ("errors", "errors"))
        if hook.get(key)
    ]
    return text + (f"; {', '.join(losses)}" if losses else "; nothing lost")
