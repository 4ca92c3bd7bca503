"""What a user sees while a cluster comes up and runs: progress on stderr, and one line on stdout when it is ready."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from deploy.cluster_plan import ClusterPlan
from deploy.supervised_process import ProcessState, SupervisedProcess, describe_status

DRAINED = describe_status(0)  # an operator's doing: by itself a worker never ends well
_COLOURS = {ProcessState.READY: "green", ProcessState.FAILED: "red", ProcessState.BACKING_OFF: "yellow"}


class TerminalDisplay:
    """A spinner for each process where stderr is a terminal, a line for each change where it is not."""

    def __init__(self, file: TextIO | None = None) -> None:
        """`file`: a text file that takes the lines; None: stderr."""
        self._console = Console(file=file, stderr=file is None, highlight=False)
        self._started_s = time.monotonic()
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._is_serving = False
        self._is_stopping = False

    def planned(self, plan: ClusterPlan) -> None:
        if not self._console.is_terminal:
            return
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TextColumn("{task.fields[state]}"))
        self._progress = Progress(*columns, TimeElapsedColumn(), console=self._console, transient=True)
        for spec in plan.processes:
            self._tasks[spec.name] = self._progress.add_task(spec.name, total=1, state="waiting", start=False)
        self._progress.start()

    def changed(self, process: SupervisedProcess) -> None:
        if self._progress is not None:
            self._show(self._progress, process)
        elif not self._is_stopping:
            self._say(process)

    def ready(self, plan: ClusterPlan, logs: Path) -> None:
        """The one line that scripts wait for; behind it, on stderr, where to look when something is odd."""
        self._close()
        self._is_serving = True
        grpc = f" · {plan.grpc_address} (gRPC)" if plan.grpc_address else ""
        took_s = time.monotonic() - self._started_s
        sys.stdout.write(
            f"Tandem serves {plan.model_name} at {plan.url} (OpenAI API){grpc} · {plan.summary} · "
            f"ready in {took_s:.1f} s\n"
        )
        sys.stdout.flush()
        self._console.print(f"logs: {logs}", style="dim", markup=False, soft_wrap=True)

    def stopping(self) -> None:
        self._close()
        self._is_stopping = True
        what = "stopping, running requests may end (Ctrl-C: now)" if self._is_serving else "stopping what was started"
        self._console.print(f"{what} …", style="dim")

    def _show(self, progress: Progress, process: SupervisedProcess) -> None:
        task = self._tasks[process.spec.name]
        if process.state is ProcessState.STARTING:
            progress.start_task(task)
        progress.update(task, state=_styled(process.state), completed=1 if process.state is ProcessState.READY else 0)

    def _say(self, process: SupervisedProcess) -> None:
        state, name = process.state, process.spec.name
        if state is ProcessState.READY:
            self._console.print(f"{name} ready after {process.ready_after_s:.1f} s")
        elif state is ProcessState.BACKING_OFF:
            how = "drained and ended" if process.last_exit == DRAINED else f"ended unasked ({process.last_exit})"
            self._console.print(f"{name} {how}, starting it again", style="yellow")
        elif state is ProcessState.FAILED and self._is_serving:  # before that it ends the start, which says why
            self._console.print(process.failure, style="red", markup=False, soft_wrap=True)

    def _close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def _styled(state: ProcessState) -> str:
    colour = _COLOURS.get(state)
    return f"[{colour}]{state.value}[/{colour}]" if colour else state.value
