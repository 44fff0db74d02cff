"""A growing, bounded window of one engine's steps, as a live agent holds it."""

from __future__ import annotations

from .tables import StepTable, WorkerStepTable
from .timeline import EngineTimeline


class EngineWindow:
    """Collects an engine's tables as they arrive; :attr:`timeline` is rebuilt when it is asked for.

    Tables may arrive in any order and more than once. Not safe for use by several threads.
    """

    def __init__(self) -> None:
        self._steps: list[StepTable] = []
        self._workers: dict[int, list[WorkerStepTable]] = {}
        self._timeline: EngineTimeline | None = None

    def append_steps(self, table: StepTable) -> None:
        """Add rows of the engine core."""
        if len(table):
            self._steps.append(table)
            self._timeline = None

    def append_worker(self, rank: int, table: WorkerStepTable) -> None:
        """Add rows of one worker rank."""
        if len(table):
            self._workers.setdefault(rank, []).append(table)
            self._timeline = None

    def trim(self, before_ns: int) -> None:
        """Forget steps that ended before ``before_ns``, and the executions that go with them."""
        steps = StepTable.concat(self._steps)
        if not len(steps) or int(steps["sched_start_ns"][0]) >= before_ns:
            return  # nothing is that old: the timeline stays as it is
        ended = steps["update_end_ns"]
        last = steps["dispatch_end_ns"].copy()
        last[ended > 0] = ended[ended > 0]
        kept = steps.where(last >= before_ns)
        first_step = int(kept["step"][0]) if len(kept) else None
        self._steps = [kept] if len(kept) else []
        for rank, tables in list(self._workers.items()):
            table = WorkerStepTable.concat(tables)
            recent = table["exec_end_ns"] >= before_ns
            if first_step is not None:
                recent |= table["step"] >= first_step
            table = table.where(recent)
            if len(table):
                self._workers[rank] = [table]
            else:
                del self._workers[rank]
        self._timeline = None

    @property
    def timeline(self) -> EngineTimeline:
        """All that is in the window now. O(rows in the window) after a change, else free."""
        if self._timeline is None:
            steps = StepTable.concat(self._steps)
            workers = {rank: WorkerStepTable.concat(tables) for rank, tables in self._workers.items()}
            self._steps = [steps]
            self._workers = {rank: [table] for rank, table in workers.items()}
            self._timeline = EngineTimeline.build(steps, workers)
        return self._timeline

    def rows(self, limit: int) -> list[dict[str, int]]:
        """The newest ``limit`` rows of the step table, newest last, by column name."""
        steps = StepTable.concat(self._steps)
        names = steps.COLUMNS
        columns = [steps[name][-limit:].tolist() for name in names]
        return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]

    def __len__(self) -> int:
        return sum(len(table) for table in self._steps)
