"""What a model gets to read when it, or a tool, does something wrong."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from ajet.agents.ready import RunTests
from ajet.agents.tools import OpenTool, StatelessTool, ToolContext, ToolResult, Toolset, ToolSetupError, tool
from ajet.agents.tools.bash import Bash
from ajet.agents.tools.calculator import Calculator
from ajet.agents.tools.finish import Finish
from ajet.environment.sandboxes import SandboxError, SandboxSettings, open_sandbox


@tool
def repeat(text: str, times: int = 2) -> str:
    """Repeat a text.

    Args:
        text: What to repeat.
        times: How often.
    """
    return text * times


class Raw(StatelessTool):
    """Answers what the test wants."""

    def __init__(self, answer: Any, name: str = "raw") -> None:
        self.name, self.description = name, "Raw."
        self.parameters: dict[str, Any] = {"type": "object"}
        self.answer = answer

    async def run(self, arguments: dict[str, Any], context: ToolContext) -> ToolResult:
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


async def call(one: Any, arguments: Any, name: str | None = None, **options: Any) -> ToolResult:
    async with Toolset([one, Finish()], **options) as toolset:
        return await toolset.call(name or one.name, arguments)


def answer(*args: Any, **kwargs: Any) -> ToolResult:
    result = asyncio.run(call(*args, **kwargs))
    json.dumps(result.output).encode()
    return result


class Unspeakable:
    def __repr__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize("result", [Unspeakable(), {"a": Unspeakable()}, ToolResult(Unspeakable())])  # type: ignore[arg-type]
def test_a_result_that_can_not_be_shown_is_an_answer(result: Any) -> None:
    said = answer(Raw(result), {})
    assert not said.success and said.output == "raw failed: RuntimeError: no words"


def test_a_call_is_answered() -> None:
    result = answer(repeat, '{"text": "ab", "times": 3}')
    assert result.success and result.output == "ababab"


def test_a_whole_number_may_be_written_with_a_point() -> None:
    class Lines(Raw):
        async def run(self, arguments: dict[str, Any], context: ToolContext) -> ToolResult:
            return ToolResult(json.dumps(arguments))

    lines, whole = Lines(None), {"type": "integer"}
    named = {"first": whole, "span": {"type": "array", "items": whole}, "zoom": {"type": "number"}}
    lines.parameters["properties"] = named
    said = answer(lines, '{"first": 2.0, "span": [1.0, 3], "zoom": 1.0}')
    assert said.output == '{"first": 2, "span": [1, 3], "zoom": 1.0}'


def test_schemas_are_openais() -> None:
    async def schemas() -> list[dict[str, Any]]:
        async with Toolset([repeat, Finish()]) as toolset:
            return toolset.schemas()

    first, second = asyncio.run(schemas())
    assert first["type"] == "function" and first["function"]["name"] == "repeat"
    assert first["function"]["parameters"]["properties"]["text"]["description"] == "What to repeat."
    assert second["function"]["name"] == "finish"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ('{"text": "a', "aren't valid JSON"),
        ("[1]", "must be a JSON object, not list"),
        ('"x"', "must be a JSON object, not str"),
        ("{}", "the call lacks 'text'"),
        ("", "the call lacks 'text'"),
        ('{"text": 5}', "text: 5 is not of type 'string'"),
        ('{"text": "a", "times": "b"}', "times: 'b' is not of type 'integer'"),
        ('{"text": "a", "time": 3}', "it has no argument 'time'"),
        ('{"text": "a", "times": NaN}', "NaN is not valid JSON"),
        ("[" * 100_000, "nested too deeply"),
        ('{"text": "a", "times": ' + "9" * 5000 + "}", "value has 5000 digits"),
        (5, "must be a JSON object, not int"),
    ],
)
def test_bad_arguments_are_explained(arguments: Any, said: str) -> None:
    result = answer(repeat, arguments)
    assert not result.success and said in result.output
    assert "Expected: repeat(text: string, times?: integer)" in result.output


class Place(BaseModel):
    x: int


@tool
def go(days: int | None = None, place: Place | None = None, mode: Literal["a", "b"] | None = None) -> str:
    """Go there."""
    return "gone"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ('{"days": "1"}', "days: '1' is not valid under any of the given schemas"),
        ('{"place": {"x": "1"}}', "place.x: '1' is not of type 'integer'"),
        ('{"place": {}}', "place lacks 'x'"),
        ('{"mode": "c"}', "mode: 'c' is not one of ['a', 'b']"),
    ],
)
def test_what_may_be_left_out_is_explained_too(arguments: str, said: str) -> None:
    result = answer(go, arguments)
    assert not result.success and said in result.output
    assert 'Expected: go(days?: integer or null, place?: object or null, mode?: "a" | "b" or null)' in result.output


def test_a_name_that_does_not_exist_is_answered_with_those_that_do() -> None:
    result = answer(repeat, "{}", name="repeats")
    assert not result.success and "Did you mean 'repeat'?" in result.output and "finish" in result.output


class Awkward(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (ValueError("bad day"), "raw failed: ValueError: bad day"),
        (SystemExit(3), "SystemExit: 3"),
        (Awkward(), "can't be shown"),
        (ValueError("x" * 10_000_000), "left out"),
        (KeyError(), "raw failed: KeyError"),
        (asyncio.CancelledError("its own"), "raw failed: CancelledError: its own"),
    ],
)
def test_a_tool_that_raises_is_an_answer(raised: BaseException, said: str) -> None:
    result = answer(Raw(raised), "{}")
    assert not result.success and said in result.output and len(result.output) < 5000


def test_a_cancelled_call_is_no_answer() -> None:
    @tool(timeout=None)
    async def hang() -> None:
        """Hang."""
        began.set()
        await asyncio.Event().wait()

    began = asyncio.Event()

    async def main() -> None:
        calling = asyncio.create_task(call(hang, "{}"))
        await began.wait()
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling

    asyncio.run(main())


def test_a_server_that_does_not_close_takes_no_answer_away() -> None:
    class Source:
        tools = (repeat,)

        async def connect(self, context: ToolContext) -> Any:
            return self

        async def close(self) -> None:
            raise ConnectionError("it is gone")

    assert answer(Source(), '{"text": "ab"}', name="repeat").output == "abab"


def test_a_dead_sandbox_is_raised() -> None:
    with pytest.raises(SandboxError):
        answer(Raw(SandboxError("gone")), "{}")


def test_a_tool_that_hangs_is_stopped() -> None:
    @tool(timeout=None)
    async def hang() -> None:
        """Hang."""
        await asyncio.Event().wait()

    result = answer(hang, "{}", call_seconds=0.05)
    assert not result.success and "did not finish within 0.05 s" in result.output


def test_a_tool_with_a_limit_of_its_own_has_no_other() -> None:
    @tool(timeout=60)
    async def wait() -> str:
        """Wait."""
        await asyncio.sleep(0.2)
        return "done"

    async def in_sandbox() -> tuple[ToolResult, ToolResult]:
        async with open_sandbox(SandboxSettings(kind="none", network="host")) as sandbox:
            context = ToolContext(sandbox)
            async with Toolset([Bash(), RunTests("sleep 0.2", False)], context, call_seconds=0.01) as toolset:
                return await toolset.call("bash", {"command": "sleep 0.2"}), await toolset.call("run_tests", {})

    assert answer(wait, "{}", call_seconds=0.01).output == "done"
    assert all(result.success for result in asyncio.run(in_sandbox()))


def test_long_output_is_cut_in_the_middle() -> None:
    result = answer(repeat, {"text": "a", "times": 100_000_000}, output_chars=1000)
    assert result.success and len(result.output) < 1100 and "99999000 of 100000000 characters left out" in result.output


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (ToolResult("\ud800"), "?"),
        (ToolResult(b"\x00\xff" * 10), "[20 bytes of binary data]"),  # type: ignore[arg-type]
        ("plain", "plain"),
        (None, "done"),
        ({"a": [1, {2}]}, '{"a": [1, "{2}"]}'),
    ],
)
def test_whatever_a_tool_answers_becomes_text(value: Any, shown: str) -> None:
    assert answer(Raw(value), "{}").output == shown


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ToolSetupError, match="two tools are called 'finish'"):
        answer(Finish(), "{}")


@pytest.mark.parametrize("given", ["finish", len])
def test_what_is_no_tool_yet_is_refused_and_says_what_makes_one(given: Any) -> None:
    with pytest.raises(ToolSetupError, match=r"is not a tool: `make_tools\("):
        asyncio.run(Toolset([given]).__aenter__())


def test_a_schema_that_is_none_is_refused() -> None:
    class Wrong(Raw):
        def __init__(self) -> None:
            super().__init__(None, "wrong")
            self.parameters = {"type": "object", "properties": {"a": {"type": "strin"}}}

    with pytest.raises(ToolSetupError, match="not a valid JSON schema"):
        answer(Wrong(), "{}")


def test_a_reference_elsewhere_is_not_fetched() -> None:
    class Remote(Raw):
        def __init__(self) -> None:
            super().__init__(None, "remote")
            self.parameters = {"type": "object", "properties": {"a": {"$ref": "http://127.0.0.1:9/x.json"}}}

    result = answer(Remote(), {"a": 1})
    assert not result.success and "http://127.0.0.1:9/x.json" in result.output


def test_patterns_are_not_run_on_the_models_text() -> None:
    class Slow(Raw):
        def __init__(self) -> None:
            super().__init__(ToolResult("ok"), "slow")
            self.parameters = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^(a+)+$"}}}

    assert answer(Slow(), {"a": "a" * 40 + "!"}).output == "ok"


class Recorder(Raw):
    def __init__(self, name: str, log: list[str], fails: str = "") -> None:
        super().__init__(ToolResult("ok"), name)
        self.log, self.fails = log, fails

    async def open(self, context: ToolContext) -> OpenTool:
        if self.fails == "open":
            raise OSError("no")
        self.log.append(f"open {self.name}")
        return self  # type: ignore[return-value]

    async def close(self) -> None:
        self.log.append(f"close {self.name}")
        if self.fails == "close":
            raise OSError("no")


def test_tools_are_closed_whatever_happens() -> None:
    async def use(fails: str) -> list[str]:
        log: list[str] = []
        try:
            async with Toolset([Recorder("a", log), Recorder("b", log, fails), Recorder("c", log)]):
                raise KeyError
        except (KeyError, OSError):
            return log

    assert asyncio.run(use("close")) == ["open a", "open b", "open c", "close c", "close b", "close a"]
    assert asyncio.run(use("open")) == ["open a", "close a"]


@given(st.text() | st.recursive(st.none() | st.booleans() | st.floats() | st.text(), st.lists).map(json.dumps))
def test_any_text_as_arguments_is_answered(arguments: str) -> None:
    assert isinstance(answer(Calculator(), arguments).output, str)


@given(st.text())
def test_any_text_as_a_name_is_answered(name: str) -> None:
    assert not answer(Calculator(), "{}", name=name or "?").success


def test_a_reward_that_is_no_number_is_none() -> None:
    @tool
    def grade() -> ToolResult:
        """Grade it."""
        return ToolResult("graded", reward=float("nan"))

    result = answer(grade, {})
    assert not result.success and result.reward is None and "not a finite number" in result.output
