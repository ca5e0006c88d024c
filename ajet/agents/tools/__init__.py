"""What an agent may call: see `tool`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ajet.agents.tools.function_tool import FunctionTool, tool
from ajet.agents.tools.registry import ToolRegistry, get_global_tool_registry, make_tools, register_tool
from ajet.agents.tools.tool import (
    OpenTool,
    StatelessTool,
    Tool,
    ToolContext,
    ToolResult,
    ToolSetupError,
    ToolSource,
)
from ajet.agents.tools.toolset import Toolset
from ajet.schema.install import lazily

if TYPE_CHECKING:
    from ajet.agents.tools.toolset import schemas_of as schemas_of
    from ajet.agents.tools.toolset import tool_schema as tool_schema
    from ajet.agents.tools.toolset import type_of as type_of


__all__ = [
    "FunctionTool",
    "OpenTool",
    "StatelessTool",
    "Tool",
    "ToolContext",
    "ToolRegistry",
    "ToolResult",
    "ToolSetupError",
    "ToolSource",
    "Toolset",
    "get_global_tool_registry",
    "make_tools",
    "register_tool",
    "tool",
]

__getattr__ = lazily(
    __name__,
    {
        "schemas_of": "toolset",
        "tool_schema": "toolset",
        "type_of": "toolset",
    },
)
