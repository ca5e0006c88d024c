"""What a user reads of a traceback, and that it names the cause."""

from __future__ import annotations

import asyncio
import textwrap
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ajet.schema.episode import Failure
from ajet.schema.errors import concurrently, condensed, user_line


def text_of(act: Callable[[], Any]) -> str:
    try:
        act()
    except BaseException as error:  # noqa: BLE001 - any will do
        return "".join(traceback.format_exception(error))
    raise AssertionError("nothing was raised")


def own_code(folder: Path, source: str) -> Callable[[], Any]:
    file = folder / "agent.py"
    file.write_text(textwrap.dedent(source))
    names: dict[str, Any] = {}
    exec(compile(file.read_text(), str(file), "exec"), names)  # noqa: S102 - the test's own text
    return names["act"]


def test_the_innermost_line_of_the_users_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    act = own_code(
        tmp_path,
        """
        import json

        def read(text):
            return json.loads(text)

        def act():
            return read("{")
        """,
    )
    said = text_of(act)
    assert user_line(said) == f"{tmp_path}/agent.py:5 in read"
    monkeypatch.chdir(tmp_path)
    assert user_line(said) == "agent.py:5 in read"
    short = condensed(said)
    assert "return json.loads(text)" in short
    assert "raw_decode" not in short
    assert "\n  … lines in libraries: " in short
    assert short.splitlines()[-1].startswith("json.decoder.JSONDecodeError")


def test_the_users_line_in_a_group_of_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    act = own_code(
        tmp_path,
        """
        import asyncio

        async def fail():
            raise KeyError("mine")

        async def both():
            async with asyncio.TaskGroup() as group:
                group.create_task(fail())

        def act():
            asyncio.run(both())
        """,
    )
    said = text_of(act)
    assert user_line(said) == "agent.py:5 in fail"
    assert "KeyError: 'mine'" in condensed(said)
    assert "base_events.py" not in condensed(said)


def test_a_line_can_be_named_where_the_working_folder_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert user_line('  File "/code/agent.py", line 3, in execute') == "/code/agent.py:3 in execute"


def test_without_the_users_code_nothing_is_left_out() -> None:
    said = 'Traceback\n  File "/usr/lib/python3.11/json/x.py", line 3, in load\nE: x'
    assert user_line(said) == ""
    assert condensed(said) == said
    assert Failure("KeyError", "'x'\nmore", said).in_short == "KeyError: 'x'"
    assert Failure("KeyError", "", "").in_short == "KeyError: "
    assert condensed("") == ""


@pytest.mark.anyio
async def test_an_error_of_work_side_by_side_keeps_its_cause() -> None:
    disk = OSError("no space left")

    async def fails() -> None:
        raise ValueError("not written") from disk

    with pytest.raises(ValueError, match="not written") as raised:
        await concurrently([asyncio.sleep(600), fails()])
    assert raised.value.__cause__ is disk
