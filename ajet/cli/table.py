"""`print_table`: aligned columns that fit the terminal. In a pipe or a file, nothing is cut."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence

from ajet.schema.printable import printable

GAP = "  "
LEAST = 8
"""Columns are cut no shorter than this."""
COLOURS = {"running": "36", "completed": "32", "failed": "31", "killed": "31", "interrupted": "33"}
"""Of cells that name a status."""


def print_table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = (), spare: Sequence[str] = ()
) -> None:
    """Print rows below a head. `right`: columns of numbers; `spare`: what is left out first on a narrow terminal."""
    head, rows = [printable(name) for name in head], [[printable(cell) for cell in row] for row in rows]
    terminal = sys.stdout.isatty()
    room = shutil.get_terminal_size().columns
    widths = [max(len(row[index]) for row in (head, *rows)) for index in range(len(head))]
    shown = list(range(len(head)))
    for name in spare if terminal else ():
        if sum(widths[index] for index in shown) + len(GAP) * (len(shown) - 1) > room:
            shown.remove(head.index(name))
    head, widths = [head[index] for index in shown], [widths[index] for index in shown]
    rows = [[row[index] for index in shown] for row in rows]
    right = [position for position, index in enumerate(shown) if index in right]
    if terminal:
        widths = _fitting(widths, [len(name) for name in head], room)
    colour = terminal and not os.environ.get("NO_COLOR")
    for number, row in enumerate((head, *rows)):
        cells = []
        for index, (cell, width) in enumerate(zip(row, widths, strict=True)):
            cut = cell if len(cell) <= width else f"{cell[: width - 1]}…"
            padded = f"{cut:>{width}}" if index in right else f"{cut:<{width}}"
            code = "1" if number == 0 else COLOURS.get(cell)
            cells.append(f"\033[{code}m{padded}\033[0m" if colour and code else padded)
        print(GAP.join(cells).rstrip())


def _fitting(widths: list[int], heads: list[int], room: int) -> list[int]:
    """Cut the widest column by one until all fit."""
    widths = list(widths)
    while sum(widths) + len(GAP) * (len(widths) - 1) > room:
        widest = max(range(len(widths)), key=lambda index: widths[index])
        if widths[widest] <= max(LEAST, heads[widest]):
            break
        widths[widest] -= 1
    return widths
