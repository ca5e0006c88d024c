"""From whole sessions to tasks: `NAME_origin.jsonl` → `NAME_processed.jsonl` → `NAME.jsonl`.

    python tutorial/example_learning_to_ask/process.py data/train_origin.jsonl --base-url URL --model NAME

A session is `{"session_id", "diagn", "messages"}`. Each of the patient's turns makes a round: what was said up to it,
and what the doctor asked afterwards, which the helper model extracts. A round is left out if the doctor went on but
asked for nothing that the model could name. Finished rounds are kept in `NAME_processed.jsonl`, so an interrupted run
goes on there.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

PROMPT = """Below is the rest of a conversation between a doctor and a patient.

<remaining_chat>
{remaining_chat}
</remaining_chat>

Which facts about the patient does the doctor ask for in it? Answer with JSON: {{"info_set": ["…", …]}}"""
SCHEMA = {
    "type": "object",
    "properties": {"info_set": {"type": "array", "items": {"type": "string"}}},
    "required": ["info_set"],
}


class BadSession(ValueError):
    """A line that is no session: names file and line."""


def read_sessions(path: Path) -> list[dict[str, Any]]:
    """The sessions of a file. Raises BadSession."""
    sessions = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            session = json.loads(line)
            assert isinstance(session["session_id"], str | int)
            assert all(
                m["role"] in ("user", "assistant") and isinstance(m["content"], str) for m in session["messages"]
            )
        except (ValueError, KeyError, TypeError, AssertionError):
            raise BadSession(
                f'{path}:{number}: expected {{"session_id": …, "diagn": …, "messages": [{{"role": "user", …}}, …]}}'
            ) from None
        sessions.append(session)
    return sessions


def rounds(session: dict[str, Any]) -> list[dict[str, Any]]:
    """A round for each of the patient's turns: what was said so far, and what follows."""
    messages = session["messages"]
    made = []
    for at, message in enumerate(messages):
        if message["role"] != "user" or (at + 1 < len(messages) and messages[at + 1]["role"] == "user"):
            continue
        rest = messages[at + 1 :]
        made.append(
            {
                "id": f"{session['session_id']}_{len(made)}",
                "session_id": session["session_id"],
                "diagn": session.get("diagn", ""),
                "messages": messages[: at + 1],
                "remaining_chat": "\n".join(f"{m['role']}: {m['content']}" for m in rest),
                "stop": all(m["role"] != "user" for m in rest),
            }
        )
    return made


async def extract(made: list[dict[str, Any]], processed: Path, helper: Any) -> list[dict[str, Any]]:
    """The rounds with their `info_set`. What the file holds already is not asked again."""
    from ajet.task_judge.helper import Asker
    from ajet.task_judge.helper_answers import read_json

    asker = Asker(helper, max_concurrent=16)
    known: dict[str, dict[str, Any]] = {}
    if processed.exists():
        rows = (json.loads(line) for line in processed.read_text(encoding="utf-8").splitlines())
        known = {row["id"]: row for row in rows}

    async def one(row: dict[str, Any]) -> dict[str, Any]:
        if known.get(row["id"], {}).get("remaining_chat") == row["remaining_chat"]:
            return known[row["id"]]
        info: list[str] = []
        if not row["stop"]:
            question = PROMPT.format(remaining_chat=row["remaining_chat"])
            said = await asker.ask([{"role": "user", "content": question}], lambda text: read_json(text, SCHEMA))
            info = said["info_set"]
        done = row | {"info_set": info}
        with processed.open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(done, ensure_ascii=False)}\n")
        return done

    asked = [asyncio.ensure_future(one(row)) for row in made]
    return list(await asyncio.gather(*asked))


def tasks(done: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows that training reads."""
    return [
        {
            "task_id": row["id"],
            "main_query": "[no query]",
            "init_messages": row["messages"],
            "metadata": {
                "session_id": row["session_id"],
                "diagn": row["diagn"],
                "decision_truth": "stop" if row["stop"] else "continue",
                "info_truth": row["info_set"],
            },
        }
        for row in done
        if row["stop"] or row["info_set"]
    ]


def main() -> None:
    from ajet.schema.errors import AjetError
    from ajet.task_judge.helper import HelperModel

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("origin", type=Path, help="a file NAME_origin.jsonl")
    parser.add_argument("--base-url", required=True, help="the helper model's endpoint")
    parser.add_argument("--model", required=True)
    parser.add_argument("--api-key", default="none")
    arguments = parser.parse_args()
    origin: Path = arguments.origin
    if not origin.name.endswith("_origin.jsonl"):
        parser.error(f"{origin}: expected a name like train_origin.jsonl")
    processed = origin.with_name(origin.name.replace("_origin.jsonl", "_processed.jsonl"))
    helper = HelperModel(arguments.model, arguments.base_url, arguments.api_key)
    try:
        made = [row for session in read_sessions(origin) for row in rounds(session)]
        done = asyncio.run(extract(made, processed, helper))
    except (BadSession, AjetError, OSError) as error:
        sys.exit(f"error: {error}")
    out = origin.with_name(origin.name.replace("_origin", ""))
    rows = tasks(done)
    out.write_text("".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows), encoding="utf-8")
    print(f"{out}: {len(rows)} tasks from {len(made)} rounds")


if __name__ == "__main__":
    main()
