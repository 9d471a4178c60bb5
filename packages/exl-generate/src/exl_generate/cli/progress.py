"""Progress on standard error: a bar while a model loads, a bar with the time left while a model is converted."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["conversion_progress", "is_dumb", "loading_bar"]


def is_dumb() -> bool:
    """Whether the terminal can neither move the cursor nor show colours."""
    return os.environ.get("TERM", "").lower() in ("dumb", "unknown")


@contextmanager
def loading_bar(name: str) -> Iterator[Callable[[int, int], None] | None]:
    """Yield a callback (index, total) for `ExLlamaV2.load` that draws a bar, which is removed at the end.

    Yields None if standard error is not a terminal that can redraw a line.
    """
    if not sys.stderr.isatty() or is_dumb():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("loading {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(name)
        yield lambda index, total: bar.update(task, completed=index, total=total)


@contextmanager
def conversion_progress(name: str) -> Iterator[Callable[[int, int, str], None]]:
    """Yield a callback (done, total, matrix) for `quantize_model`: a bar with the time left on a terminal, which is
    removed at the end, and one line a matrix elsewhere."""
    if not sys.stderr.isatty() or is_dumb():
        yield lambda done, total, key: print(f"{done}/{total} {key}", file=sys.stderr, flush=True)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("converting to {task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
        TextColumn("{task.fields[matrix]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(name, total=None, matrix="")
        yield lambda done, total, key: bar.update(task, completed=done, total=total, matrix=key)
