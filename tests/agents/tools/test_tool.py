"""`@tool`: what is made of a function."""

from __future__ import annotations

import asyncio
import threading
from datetime import date
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from ajet.agents.tools import ToolContext, ToolResult, Toolset, ToolSetupError, tool
from ajet.agents.tools.tool import run_in_thread


class Point(BaseModel):
    x: int
    y: int = 0


async def call(one: Any, arguments: Any, context: ToolContext | None = None) -> ToolResult:
    async with Toolset([one], context) as toolset:
        return await toolset.call(one.name, arguments)


def test_the_schema_says_what_the_function_says() -> None:
    @tool
    def plan(
        city: str, days: Annotated[int, Field(ge=1, le=9)] = 3, unit: Literal["C", "F"] = "C", title: str | None = None
    ) -> str:
        """Plan a trip.

        In two parts.

        Args:
            city (str): Where to.
            days: How long,
                at most.

        Returns:
            A text.
        """
        return f"{city} {days} {unit}"

    assert plan.name == "plan" and plan.description == "Plan a trip.\n\nIn two parts."
    properties = plan.parameters["properties"]
    assert properties["city"] == {"description": "Where to.", "type": "string"}
    assert properties["days"]["description"] == "How long, at most." and properties["days"]["maximum"] == 9
    assert properties["unit"]["enum"] == ["C", "F"] and "title" in properties
    assert plan.parameters["required"] == ["city"] and plan.parameters["additionalProperties"] is False
    assert plan("Rome") == "Rome 3 C"


def test_sphinx_docstrings_are_read_too() -> None:
    @tool
    def f(a: int) -> int:
        """Do it.

        :param int a: The number.
        :returns: Another.
        """
        return a

    assert f.description == "Do it." and f.parameters["properties"]["a"]["description"] == "The number."


def test_numpy_docstrings_are_read_too() -> None:
    @tool
    def f(a: int, b: str = "", c: str = "") -> int:
        """Do it.

        Well.

        Parameters
        ----------
        a : int, optional
            The number,
            on two lines.
        b, c : {'x', 'y'}
            Two texts.

        Returns
        -------
        int
            Another.
        """
        return a

    assert f.description == "Do it.\n\nWell."
    described = {name: schema["description"] for name, schema in f.parameters["properties"].items()}
    assert described == {"a": "The number, on two lines.", "b": "Two texts.", "c": "Two texts."}


def test_arguments_arrive_as_what_is_annotated() -> None:
    got: list[Any] = []

    @tool
    def take(point: Point, day: date, names: list[str], schema: dict[str, int]) -> Point:
        """Take."""
        got.extend([point, day, names, schema])
        return Point(x=point.x + 1)

    arguments = {"point": {"x": 1}, "day": "2026-01-02", "names": ["a"], "schema": {"k": 1}}
    result = asyncio.run(call(take, arguments))
    assert got == [Point(x=1), date(2026, 1, 2), ["a"], {"k": 1}]
    assert result.output == '{"x": 2, "y": 0}' and result.data == {"x": 2, "y": 0}


def test_a_value_that_only_the_type_refuses_is_explained() -> None:
    @tool
    def take(day: date) -> str:
        """Take."""
        return ""

    result = asyncio.run(call(take, {"day": "someday"}))
    assert not result.success and "day: Input should be a valid date" in result.output


def test_plain_functions_run_in_a_thread_and_coroutines_on_the_loop() -> None:
    seen: list[bool] = []

    @tool
    def plain() -> None:
        """Plain."""
        seen.append(threading.current_thread() is threading.main_thread())

    @tool(name="other")
    async def on_loop() -> None:
        """Async."""
        seen.append(threading.current_thread() is threading.main_thread())

    assert asyncio.run(call(plain, {})).output == "done" and asyncio.run(call(on_loop, {})).success
    assert seen == [False, True]


def test_the_context_is_given_and_not_shown() -> None:
    @tool
    def who(context: ToolContext, greeting: str) -> str:
        """Who."""
        return f"{greeting} {context.episode_id}"

    assert list(who.parameters["properties"]) == ["greeting"]
    assert asyncio.run(call(who, {"greeting": "hi"}, ToolContext(episode_id="e7"))).output == "hi e7"


def test_a_blocked_thread_is_left_behind() -> None:
    release = threading.Event()

    @tool(timeout=0.05)
    def block() -> None:
        """Block."""
        release.wait()

    result = asyncio.run(call(block, {}))
    release.set()
    assert not result.success and "did not finish within 0.05 s" in result.output


def test_a_call_that_is_cancelled_before_its_thread_begins_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[threading.Thread] = []
    monkeypatch.setattr(threading.Thread, "start", lambda self: made.append(self))

    async def main() -> None:
        task = asyncio.create_task(run_in_thread(lambda: made.clear()))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        made[0].run()

    asyncio.run(main())
    assert len(made) == 1


def test_its_own_timeout_error_is_its_own() -> None:
    @tool
    async def f() -> None:
        """F."""
        raise TimeoutError("the printer")

    assert asyncio.run(call(f, {})).output == "f failed: TimeoutError: the printer"


@pytest.mark.parametrize("error", [StopIteration("s"), SystemExit(2), KeyError("k"), asyncio.CancelledError("c")])
def test_whatever_it_raises_is_an_answer(error: BaseException) -> None:
    @tool(timeout=5)
    def f() -> None:
        """F."""
        raise error

    answer = asyncio.run(call(f, {}))
    assert not answer.success and "did not finish" not in answer.output


def test_a_tool_result_is_passed_on() -> None:
    @tool
    def f() -> ToolResult:
        """F."""
        return ToolResult("bye", reward=0.5, ends_episode=True)

    result = asyncio.run(call(f, {}))
    assert result.reward == 0.5 and result.ends_episode


def test_what_no_model_can_call_is_refused_at_once() -> None:
    def undocumented(a: int) -> None: ...

    def starred(*numbers: int) -> None:
        """Starred."""

    def unknown(a: threading.Thread) -> None:
        """Unknown type."""

    with pytest.raises(ToolSetupError, match="needs a docstring"):
        tool(undocumented)
    with pytest.raises(ToolSetupError, match="plain named parameters"):
        tool(starred)
    with pytest.raises(ToolSetupError, match="unknown"):
        tool(unknown)
    with pytest.raises(ToolSetupError, match="can't name a tool"):
        tool(name="a b")(undocumented)
