"""Training as a user sees it: one bar for each stage where stderr is a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

SECONDS_PER_LINE = 30.0


class TrainingDisplay:
    """Use as a context manager."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bars = Progress(*columns, console=self._console, disable=not self._console.is_terminal)
        self._tasks: dict[str, TaskID] = {}
        self._last_line_s = 0.0

    def __enter__(self) -> TrainingDisplay:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bars.stop()

    def progress(self, stage: str, done: int, total: int) -> None:
        if stage not in self._tasks:
            self._tasks[stage] = self._bars.add_task(stage, total=total)
        self._bars.update(self._tasks[stage], completed=min(done, total))
        if self._bars.disable and (done >= total or time.monotonic() - self._last_line_s > SECONDS_PER_LINE):
            self._last_line_s = time.monotonic()
            self._console.print(f"{stage}: {done} of {total}")
