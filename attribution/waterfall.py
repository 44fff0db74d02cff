"""One request as a waterfall: a few readable stretches instead of a thousand segments."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from stratoscope.instrumentation import semconv as sc

from .segment import Segmented
from .stay import EngineStay
from .tables import Int64
from .taxonomy import CELL_INDEX, CELL_NAMES, CELLS, N_CELLS
from .timeline import EngineTimeline

ADMISSION, WAITING, PREFILL, DECODE, STALL, STREAM_OUT = GROUPS = (
    "admission", "waiting", "prefill", "decode", "stall", "stream-out",
)  # fmt: skip
_RUNNING, _INHERIT = -1, -2
_INTERFERENCE: Final = CELL_INDEX["model.prefill_interference"]


def _group_codes() -> Int64:
    admission = {"receive", "handler", "template", "tokenize", "preprocess", "ipc_request", "core_preprocess"}
    stream_out = {"ipc_response", "output_processing", "stream_wait", "flush", "respond"}
    codes = np.full(N_CELLS, _RUNNING, np.int64)
    for index, cell in enumerate(CELLS):
        if cell.layer == "unattributed":
            codes[index] = _INHERIT
        elif cell.cause in admission or cell.cause == "core_input_queue":
            codes[index] = GROUPS.index(ADMISSION)
        elif cell.cause in stream_out:
            codes[index] = GROUPS.index(STREAM_OUT)
        elif cell.cause == "preempted":
            codes[index] = GROUPS.index(STALL)
        elif cell.cause.startswith("wait_") and cell.cause != "wait_pipeline":
            codes[index] = GROUPS.index(WAITING)
    return codes


_GROUP_OF_CELL: Final = _group_codes()


@dataclass(frozen=True, slots=True)
class Share:
    """Time of one cell inside a stretch; ``steps``: how many engine steps it is spread over."""

    cell: str
    duration_ns: int
    steps: int
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Stretch:
    """Contiguous segments of one group; ``shares`` in order of first appearance sum to its duration."""

    group: str
    start_ns: int
    duration_ns: int
    steps: int
    shares: tuple[Share, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the waterfall: one cell's time within a stretch.

    Rows follow on each other without a gap. Cells that alternate within a stretch (thousands of
    decode steps) are laid one after the other: ``start_ns`` is exact for the stretch's first row.
    """

    group: str
    cell: str
    start_ns: int
    duration_ns: int
    steps: int
    reasons: tuple[str, ...] = ()


def stretches(segmented: Segmented) -> list[Stretch]:
    """The request's contiguous stretches, in order; their durations sum to its latency."""
    if not len(segmented.cell):
        return []
    codes = _codes(segmented)
    breaks = np.flatnonzero(np.diff(codes)) + 1
    bounds = [0, *breaks.tolist(), len(codes)]
    return [_stretch(segmented, int(codes[low]), low, high) for low, high in itertools.pairwise(bounds)]


def waterfall(segmented: Segmented) -> list[Row]:
    """The rows of the waterfall, in order; their durations sum to the request's latency."""
    rows = []
    for stretch in stretches(segmented):
        start = stretch.start_ns
        for share in stretch.shares:
            rows.append(Row(stretch.group, share.cell, start, share.duration_ns, share.steps, share.reasons))
            start += share.duration_ns
    return rows


def _codes(segmented: Segmented) -> Int64:
    """Group of each segment; unattributed time belongs to the group before it."""
    codes = _GROUP_OF_CELL[segmented.cell]
    in_ttft = np.arange(len(codes)) < segmented.n_ttft
    running = np.where(in_ttft, GROUPS.index(PREFILL), GROUPS.index(DECODE))
    codes = np.where(codes == _RUNNING, running, codes)
    own = np.where(codes == _INHERIT, -1, np.arange(len(codes)))
    source = np.maximum.accumulate(own)
    return np.where(source >= 0, codes[np.maximum(source, 0)], GROUPS.index(ADMISSION))


def _stretch(segmented: Segmented, code: int, low: int, high: int) -> Stretch:
    cell, step = segmented.cell[low:high], segmented.step[low:high]
    lengths = segmented.ends[low:high] - segmented.starts[low:high]
    found, first = np.unique(cell, return_index=True)
    shares = []
    for index in found[np.argsort(first)].tolist():
        mine = cell == index
        shares.append(
            Share(
                CELL_NAMES[index],
                int(lengths[mine].sum()),
                _count_steps(step[mine]),
                _reasons(segmented.reason[low:high][mine]),
            )
        )
    return Stretch(
        GROUPS[code], int(segmented.starts[low]), int(lengths.sum()), _count_steps(step), tuple(shares)
    )


def _count_steps(step: Int64) -> int:
    return len(np.unique(step[step >= 0]))


def _reasons(reason: Int64) -> tuple[str, ...]:
    known = {int(member): member.name.lower() for member in sc.WaitReason if member}
    return tuple(known[code] for code in np.unique(reason).tolist() if code in known)


@dataclass(frozen=True, slots=True)
class Interference:
    """What other requests' prompts cost in one step of one engine."""

    engine_uid: str
    step: int
    other_prefill_tokens: int
    duration_ns: int


def interference(segmented: Segmented, timelines: Mapping[str, EngineTimeline]) -> list[Interference]:
    """The steps in which other requests' prompts slowed this one, the costliest first.

    The requests with prompt chunks in those steps of that engine are the ones to name.
    """
    hit = (segmented.cell == _INTERFERENCE) & (segmented.engine >= 0)
    lengths = (segmented.ends - segmented.starts)[hit]
    found = []
    for index in np.unique(segmented.engine[hit]).tolist():
        engine = segmented.request.engines[index]
        timeline = timelines.get(engine.engine_uid)
        if timeline is None:
            continue
        mine = segmented.engine[hit] == index
        steps, group = np.unique(segmented.step[hit][mine], return_inverse=True)
        spent = np.zeros(len(steps), np.int64)
        np.add.at(spent, group, lengths[mine])
        stay = EngineStay(engine, timeline)
        own = stay.own_tokens(steps, sc.EventKind.PREFILL) + stay.own_tokens(steps, sc.EventKind.RECOMPUTE)
        others = np.maximum(timeline.prefill_tokens[np.searchsorted(timeline.step, steps)] - own, 0)
        for step, tokens, duration in zip(steps.tolist(), others.tolist(), spent.tolist(), strict=True):
            found.append(Interference(engine.engine_uid, step, tokens, duration))
    return sorted(found, key=lambda item: -item.duration_ns)
