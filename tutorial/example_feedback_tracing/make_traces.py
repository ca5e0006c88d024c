"""Writes a small `studio.sqlite3` as AgentScope-Studio does for a shop's agent that looks up orders, and beside it the
conversations of a small model that often guesses or gives up.
"""

from __future__ import annotations

import json
import random
import sqlite3
import sys
from pathlib import Path

FILE = Path(__file__).parent / "data" / "studio.sqlite3"
CONVERSATIONS = 1200


def main(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    draw = random.Random(0)
    orders = list(range(10, 100))
    draw.shuffle(orders)
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE span_table (name TEXT, attributes TEXT)")
    for number, order in enumerate(orders):
        # one in ten answers is of no use
        reply = "I can't say." if number % 10 == 9 else f"I look up order \\boxed{{{order}}}"
        attributes = {
            "input": {"kwargs": {"msg": f"Msg(id='{number}', name='user', content='{_question(order)}', role='user')"}},
            "output": f"Msg(id='r{number}', name='agent', content={reply!r}, role='assistant')",
        }
        connection.execute("INSERT INTO span_table VALUES ('ReActAgent.reply', ?)", (json.dumps(attributes),))
    connection.commit()
    connection.close()
    rows = [_conversation(draw, draw.choice(orders)) for _ in range(CONVERSATIONS)]
    path.with_name("conversations.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


def _question(order: int) -> str:
    return f"Where is order {order}?"


def _conversation(draw: random.Random, order: int) -> dict[str, object]:
    """A third of the answers name the order, a third another one, and a third say nothing."""
    said = draw.choice([f"\\boxed{{{order}}}", f"\\boxed{{{draw.randint(10, 99)}}}", "I can't say."])
    return {"messages": [{"role": "user", "content": _question(order)}, {"role": "assistant", "content": said}]}


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FILE)
