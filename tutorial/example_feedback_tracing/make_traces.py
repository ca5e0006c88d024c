"""Writes a small `studio.sqlite3` as AgentScope-Studio does for an agent that was asked sums in production."""

from __future__ import annotations

import json
import random
import sqlite3
import sys
from pathlib import Path

FILE = Path(__file__).parent / "data" / "studio.sqlite3"


def main(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    draw = random.Random(0)
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE span_table (name TEXT, attributes TEXT)")
    for number in range(60):
        a, b = draw.randint(2, 49), draw.randint(2, 49)
        # one in ten answers is of no use
        reply = "I can't say." if number % 10 == 9 else f"{a} + {b} is \\boxed{{{a + b}}}"
        attributes = {
            "input": {"kwargs": {"msg": f"Msg(id='{number}', name='user', content='What is {a} + {b}?', role='user')"}},
            "output": f"Msg(id='r{number}', name='agent', content={reply!r}, role='assistant')",
        }
        connection.execute("INSERT INTO span_table VALUES ('ReActAgent.reply', ?)", (json.dumps(attributes),))
    connection.commit()
    connection.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FILE)
