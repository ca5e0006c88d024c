"""The tool of the agent in docs/viewer.md's picture of a timeline: which moves of a frozen lake are safe.

`make pictures` runs it with scripted replies (`_lake_replies.yaml`): tools, environment and spans are real.
"""

from __future__ import annotations

from ajet import emit_message, operation

_AROUND = {"u": (-1, 0), "d": (1, 0), "l": (0, -1), "r": (0, 1)}


@operation(name="safe_moves")
def safe_moves(lake: str) -> str:
    """The moves that don't lead into a hole.

    lake: the picture of the lake
    """
    if "@" not in lake:
        raise ValueError("no @ in the picture")
    free = _free(lake.splitlines())
    emit_message(f"{len(free)} ways are open")
    return " ".join(free)


@operation(name="read the picture")
def _free(rows: list[str]) -> list[str]:
    row = next(index for index, line in enumerate(rows) if "@" in line)
    column = rows[row].index("@")
    places = {move: (row + down, column + right) for move, (down, right) in _AROUND.items()}
    inside = {move: at for move, at in places.items() if 0 <= at[0] < len(rows) and 0 <= at[1] < len(rows[0])}
    return [move for move, (y, x) in inside.items() if rows[y][x] != "H"]
