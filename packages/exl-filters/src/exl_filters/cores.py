"""Count the cores that this process may use, and lower its scheduling priority."""

from __future__ import annotations

import contextlib
import os
import time

__all__ = ["NICENESS", "available_cores", "yield_cores"]

NICENESS = 5
"""A process of this niceness gets a quarter of a core that it shares with one of niceness 0."""
# Linux lets unprivileged processes set the niceness of a session once in 0.1 s, all sessions together.
TRIES, PAUSE_SECONDS = 5, 0.1
HIGHEST = 19


def available_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def yield_cores(niceness: int = NICENESS) -> None:
    """Raise the niceness of this process, and that of its session if it leads one. A no-op where neither is possible.

    Where Linux schedules by sessions (`sched_autogroup_enabled`), the niceness of a process counts only against others
    of its session, and the session's niceness against other sessions. A new session starts at 0, whatever that of its
    parent, so the niceness of the parent's session is added.
    """
    with contextlib.suppress(AttributeError, OSError):  # AttributeError: Windows
        os.nice(niceness)
        if os.getsid(0) != os.getpid():
            return
        of_session = min(HIGHEST, niceness + _session_niceness(os.getppid()))
        for _ in range(TRIES):
            try:
                with open("/proc/self/autogroup", "w", encoding="ascii") as file:
                    file.write(str(of_session))
                return
            except BlockingIOError:
                time.sleep(PAUSE_SECONDS)


def _session_niceness(process: int) -> int:
    """Return the niceness of a process's session; 0 where Linux does not report it."""
    try:
        with open(f"/proc/{process}/autogroup", encoding="ascii") as file:
            return int(file.read().split()[-1])
    except (OSError, ValueError, IndexError):
        return 0
