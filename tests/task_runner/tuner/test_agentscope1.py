"""AgentScope 1.0.x, which can't share an environment with 2.x: run by `make test-agentscope1`."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import pytest

from ajet.task_runner.tuner import AjetTuner
from support.frameworks import QUESTIONS, SYSTEM, calculate, check

try:
    VERSION = version("agentscope")
except PackageNotFoundError:
    VERSION = "absent"

pytestmark = pytest.mark.skipif(not VERSION.startswith("1."), reason=f"agentscope 1.0.x is needed, here is {VERSION}")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("near", [True, False], ids=["in_process", "http"])
@pytest.mark.parametrize("formatter", ["OpenAIChatFormatter", "DashScopeChatFormatter"])
def test_react_agent(formatter: str, stream: bool, near: bool) -> None:
    """DashScope's formatter writes parts without a type, whose text is null beside tool calls."""

    async def job(tuner: AjetTuner) -> list[str]:
        from agentscope import formatter as formatters
        from agentscope.agent import ReActAgent
        from agentscope.memory import InMemoryMemory
        from agentscope.message import Msg, TextBlock
        from agentscope.tool import Toolkit, ToolResponse

        def calculator(expression: str) -> ToolResponse:
            """Calculate an arithmetic expression.

            Args:
                expression (str): the expression
            """
            return ToolResponse(content=[TextBlock(type="text", text=calculate(expression))])

        calculator.__name__ = "calculate"
        toolkit = Toolkit()
        toolkit.register_tool_function(calculator)
        agent = ReActAgent(
            name="solver",
            sys_prompt=SYSTEM,
            model=tuner.as_agentscope_model("solver", stream=stream),
            formatter=getattr(formatters, formatter)(),
            memory=InMemoryMemory(),
            toolkit=toolkit,
        )
        return [(await agent(Msg("user", question, "user"))).get_text_content() for question in QUESTIONS]

    check(job, near=near)
