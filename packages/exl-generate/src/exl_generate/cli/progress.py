"""A bar on standard error while a model loads."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["loading_bar"]


@contextmanager
def loading_bar(name: str) -> Iterator[Callable[[int, int], None] | None]:
    """Gives a callback for `ExLlamaV2.load` that draws with rich, and takes the bar away at the end; None where
    standard error is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("loading {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(name)
        yield lambda index, total: bar.update(task, completed=index, total=total)
