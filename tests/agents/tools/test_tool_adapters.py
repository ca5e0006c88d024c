"""Tools of LangChain and AgentScope as ours, and ours as theirs, with the libraries themselves."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from ajet.agents.tools import ToolContext, ToolResult, Toolset, ToolSetupError, make_tools, tool
from ajet.agents.tools.registry import from_agentscope, from_langchain, to_agentscope, to_langchain


def call(specs: list[Any], name: str, arguments: Any) -> ToolResult:
    async def main() -> ToolResult:
        async with Toolset(make_tools(specs)) as toolset:
            return await toolset.call(name, arguments)

    return asyncio.run(main())


@tool
def divide(a: float, b: float) -> float:
    """Divide a by b.

    Args:
        a: Above the line.
        b: Below it.
    """
    return a / b


class Counter:
    """Counts its calls within an episode."""

    name = "counter"
    description = "Counts."
    parameters: dict[str, Any] = {"type": "object", "properties": {}}  # noqa: RUF012

    async def open(self, context: ToolContext) -> Any:
        class Open:
            count = 0

            async def call(self, arguments: dict[str, Any]) -> ToolResult:
                self.count += 1
                return ToolResult(str(self.count))

            async def close(self) -> None:
                pass

        return Open()


# ------------------------------------------------------------ LangChain


def test_from_langchain(tmp_path: Path) -> None:
    pytest.importorskip("langchain_core")
    (tmp_path / "lc_tools.py").write_text(
        "from langchain_core.tools import ToolException, tool\n"
        "@tool\n"
        "def weather(city: str, days: int = 1) -> dict:\n"
        "    '''The forecast of a city.'''\n"
        "    return {'city': city, 'days': days}\n"
        "@tool\n"
        "async def fails(x: int) -> str:\n"
        "    'Fails.'\n"
        "    raise ToolException('no ' + str(x))\n"
        "fails.handle_tool_error = True\n"
        "@tool\n"
        "def raises() -> str:\n"
        "    'Raises.'\n"
        "    raise ValueError('broken')\n"
        "both = [weather, fails]\n"
    )
    spec = f"{tmp_path}/lc_tools.py->weather"
    (made,) = make_tools([spec])
    assert made.name == "weather" and made.description == "The forecast of a city."  # type: ignore[union-attr]
    told = call([spec], "weather", '{"city": "Rome"}')
    assert told.success and json.loads(told.output) == {"city": "Rome", "days": 1}
    wrong = call([spec], "weather", '{"town": "Rome"}')
    assert not wrong.success and "lacks 'city'" in wrong.output
    told = call([f"{tmp_path}/lc_tools.py->both"], "fails", {"x": 7})
    assert (told.success, told.output) == (False, "no 7")
    told = call([f"{tmp_path}/lc_tools.py->raises"], "raises", {})
    assert not told.success and "ValueError: broken" in told.output
    with pytest.raises(ToolSetupError, match="takes no options"):
        make_tools([{spec: {"a": 1}}])


def test_to_langchain() -> None:
    pytest.importorskip("langchain_core")
    from langchain_core.utils.function_calling import convert_to_openai_tool

    async def main() -> None:
        async with Toolset([Counter(), divide]) as toolset:
            counter, made = to_langchain(toolset)
            assert [await counter.ainvoke({}) for _ in range(3)] == ["1", "2", "3"]
            assert convert_to_openai_tool(made)["function"]["parameters"]["required"] == ["a", "b"]
            assert await made.ainvoke({"a": 1, "b": 4}) == "0.25"
            asked = {"type": "tool_call", "id": "c1", "name": "divide", "args": {"a": 1, "b": 0}}
            message = await made.ainvoke(asked)
            assert message.status == "error" and "ZeroDivisionError" in message.content

    asyncio.run(main())


def test_there_and_back() -> None:
    pytest.importorskip("langchain_core")

    async def main() -> ToolResult:
        async with Toolset([divide]) as inner, Toolset([from_langchain(*to_langchain(inner))]) as toolset:
            return await toolset.call("divide", {"a": 6, "b": 4})

    assert asyncio.run(main()).output == "1.5"


# ------------------------------------------------------------ AgentScope


def test_from_agentscope() -> None:
    agentscope = pytest.importorskip("agentscope.tool")
    if not hasattr(agentscope, "ToolBase"):
        pytest.skip("needs AgentScope 2")
    from agentscope.message import TextBlock, ToolResultState

    def weather(city: str) -> Any:
        """The forecast.

        Args:
            city: Where.
        """
        if city == "Atlantis":
            return agentscope.ToolChunk(content=[TextBlock(text="no such city")], state=ToolResultState.ERROR)
        return f"sun in {city}"

    async def counts(to: int) -> Any:
        """Count."""
        for number in range(to):
            yield agentscope.ToolChunk(content=[TextBlock(text=f"{number} ")])

    specs = [agentscope.FunctionTool(weather), agentscope.FunctionTool(counts)]
    assert call(specs, "weather", {"city": "Rome"}).output == "sun in Rome"
    told = call(specs, "weather", {"city": "Atlantis"})
    assert (told.success, told.output) == (False, "no such city")
    assert call(specs, "counts", {"to": 3}).output == "0 1 2 "
    assert "lacks 'city'" in call(specs, "weather", {}).output
    # a plain function that answers in AgentScope's form, as in its 1.x
    adapted = from_agentscope(weather)
    assert adapted.parameters["properties"]["city"]["description"] == "Where."
    assert call([adapted], "weather", {"city": "Atlantis"}).output == "no such city"


def test_to_agentscope() -> None:
    agentscope = pytest.importorskip("agentscope.tool")
    if not hasattr(agentscope, "ToolBase"):
        pytest.skip("needs AgentScope 2")
    from agentscope.message import ToolCallBlock
    from agentscope.state import AgentState

    async def main() -> list[tuple[str, str]]:
        async with Toolset([Counter(), divide]) as toolset:
            kit = agentscope.Toolkit(tools=to_agentscope(toolset))
            schemas = await kit.get_tool_schemas()
            assert [each["function"]["name"] for each in schemas] == ["counter", "divide"]
            said = []
            for name, arguments in (("counter", {}), ("counter", {}), ("divide", {"a": 1, "b": 0})):
                block = ToolCallBlock(id="1", name=name, input=json.dumps(arguments))
                answers = [answer async for answer in kit.call_tool(block, AgentState())]
                said.append((answers[-1].content[0].text, answers[-1].state.value))
            return said

    said = asyncio.run(main())
    assert [text for text, _ in said[:2]] == ["1", "2"] and said[0][1] == "success"
    assert "ZeroDivisionError" in said[2][0] and said[2][1] == "error"
