"""Writes a query, has it checked, and rewrites it. The reward: does it return what the right query returns?

Each role is an agent with its own target, so `trainable_targets` can train the writer alone.
"""

from __future__ import annotations

import re
import sqlite3
from pathlib import Path
from typing import Any

from ajet import AjetTuner, Workflow, WorkflowOutput, WorkflowTask

DATA = Path(__file__).parent / "data"
REWRITES = 2
MOST_ROWS, MOST_STEPS, MOST_BYTES = 200, 2_000_000, 1_000_000
READING = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}

WRITE = "You write one SQLite query that answers the question. Answer with the query in a ```sql block.\n\n{schema}"
CHECK = "You check a SQLite query. If it answers the question, say CORRECT. Else say what is wrong.\n\n{schema}"
REWRITE = "You repair a SQLite query. Answer with the new query in a ```sql block.\n\n{schema}"


class Database:
    """A database that is only read: the query is a model's."""

    def __init__(self, name: str) -> None:
        file = DATA / f"{name}.sqlite"
        if not file.is_file():
            raise FileNotFoundError(f"{file} is missing: run {Path(__file__).parent / 'make_databases.py'}")
        self._connection = sqlite3.connect(f"file:{file}?mode=ro", uri=True)
        self.schema = "\n".join(sql for (sql,) in self._connection.execute("SELECT sql FROM sqlite_master"))
        self._connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MOST_BYTES)  # zeroblob(10**9) fills the memory
        self._connection.set_authorizer(
            lambda action, *_: sqlite3.SQLITE_OK if action in READING else sqlite3.SQLITE_DENY
        )

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """What a query returns. Raises sqlite3.Error; a query that takes too long is interrupted."""
        self._connection.set_progress_handler(lambda: 1, MOST_STEPS)
        return self._connection.execute(query).fetchmany(MOST_ROWS)

    def close(self) -> None:
        self._connection.close()


def query_in(reply: str) -> str:
    """The query that a reply holds: the last block of SQL, or else the whole text."""
    blocks = re.findall(r"```(?:sql)?\s*(.*?)```", reply, re.DOTALL | re.IGNORECASE)
    return (blocks[-1] if blocks else reply).strip().rstrip(";")


def same_result(database: Database, query: str, gold: str) -> bool:
    """Execution accuracy: the same rows, in the same order if the right query asks for one."""
    try:
        found = database.rows(query)
    except (sqlite3.Error, sqlite3.Warning):
        return False
    wanted = database.rows(gold)
    return found == wanted if "order by" in gold.lower() else sorted(map(repr, found)) == sorted(map(repr, wanted))


class SqlAgent(Workflow):
    name: str = "sql"
    trainable_targets: list[str] | None = ["write", "rewrite"]  # noqa: RUF012 - a pydantic field

    async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        task = workflow_task.task
        database = Database(task.metadata["database"])

        async def ask(role: str, prompt: str, text: str) -> str:
            client = tuner.as_raw_openai_sdk_client(agent_name=role, target_tag=role)
            system = {"role": "system", "content": prompt.format(schema=database.schema)}
            reply = await client.chat.completions.create(messages=[system, {"role": "user", "content": text}])
            return reply.choices[0].message.content or ""

        try:
            query, rewrites = query_in(await ask("write", WRITE, task.main_query)), 0
            while rewrites < REWRITES:
                seen = f"Question: {task.main_query}\nQuery: {query}\nIt returns: {self._result(database, query)}"
                opinion = await ask("check", CHECK, seen)
                if "CORRECT" in opinion and "INCORRECT" not in opinion:
                    break
                query = query_in(await ask("rewrite", REWRITE, f"{seen}\nObjection: {opinion}"))
                rewrites += 1
            right = same_result(database, query, task.metadata["gold"])
        finally:
            database.close()
        metrics = {"rewrites": float(rewrites)}
        return WorkflowOutput(
            reward=float(right), is_success=right == 1, metadata={"query": query}, log_metrics=metrics
        )

    @staticmethod
    def _result(database: Database, query: str) -> str:
        try:
            return repr(database.rows(query)[:5])
        except (sqlite3.Error, sqlite3.Warning) as error:
            return f"error: {error}"
