"""Tables for people: with rich on a terminal, plain columns elsewhere."""

from __future__ import annotations

import sys

__all__ = ["show_table"]


def show_table(title: str, header: list[str], rows: list[list[str]]) -> None:
    """Print a titled table to standard output."""
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table

        table = Table(title=title, title_justify="left", show_header=any(header))
        for i, name in enumerate(header):
            table.add_column(name, justify="left" if i == 0 else "right")
        for row in rows:
            table.add_row(*row)
        Console().print(table)
        return
    lines = [header, *rows] if any(header) else rows
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    print(f"{title}:")
    for line in lines:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
