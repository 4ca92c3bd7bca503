"""A download as a user sees it: what is tried, and a progress bar where stderr is a terminal."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn


class TerminalFetchDisplay:
    """Use as a context manager."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        self._bars = Progress(*columns, console=self._console, disable=not self._console.is_terminal)
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> TerminalFetchDisplay:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bars.stop()

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def progress(self, what: str, done_bytes: int, total_bytes: int) -> None:
        if what not in self._tasks:
            self._tasks[what] = self._bars.add_task(what, total=total_bytes)
        self._bars.update(self._tasks[what], completed=done_bytes, total=total_bytes)
