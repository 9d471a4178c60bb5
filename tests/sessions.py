"""Read how Linux schedules the session of a process."""

from __future__ import annotations

from pathlib import Path

__all__ = ["niceness_of_session"]


def niceness_of_session(process: int | str) -> int:
    """Return the niceness that the session of a process has relative to other sessions, from -20 to 19.

    It is 0 for a process that the kernel counts to no session: its file is empty where none of its ancestors
    started one, as under an init that is the parent of all commands.
    """
    fields = Path(f"/proc/{process}/autogroup").read_text(encoding="ascii").split()
    return int(fields[-1]) if fields else 0
