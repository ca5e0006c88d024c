"""What an agent may call: see `tool`."""

from __future__ import annotations

from ajet.agents.tools.registry import ToolRegistry, get_global_tool_registry, make_tools, register_tool
from ajet.agents.tools.tool import (
    FunctionTool,
    OpenTool,
    StatelessTool,
    Tool,
    ToolContext,
    ToolResult,
    ToolSetupError,
    ToolSource,
    tool,
)
from ajet.agents.tools.toolset import Toolset, schemas_of, tool_schema, type_of

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
    "schemas_of",
    "tool",
    "tool_schema",
    "type_of",
]
