"""How far a process gives way to others on its machine.

A decode step that waits for a processor is a gap in every stream of it; a chunk of a prompt can wait a little. Where
both kinds of worker share cores, the scheduler of Linux otherwise treats them alike, and two busy engines may sit on
one core for tens of milliseconds while short work has the other one.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

# Where the kernel groups processes by session, `nice` counts inside of a session alone, and this between sessions.
_SESSION_GROUP = Path("/proc/self/autogroup")


def give_way(steps: int, session_group: Path = _SESSION_GROUP) -> None:
    """Lowers this process's priority by so many steps of `nice` (0: not at all). Every thread made from now on has it;
    threads that run already keep theirs, so it is called first. Nothing ever gives it back.

    A session is moved only by the process that leads it: what a terminal started would take its shell along.
    """
    if not steps:
        return
    os.nice(steps)
    if os.getsid(0) == os.getpid():
        with suppress(OSError):  # another kernel, or one that does not group
            session_group.write_text(str(steps), encoding="ascii")
