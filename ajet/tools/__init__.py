"""What an agent may call: see `tool`."""

from ajet.tools.function_tool import FunctionTool, tool
from ajet.tools.registry import ToolRegistry, get_global_tool_registry, make_tools, register_tool
from ajet.tools.tool import (
    OpenTool,
    StatelessTool,
    Tool,
    ToolContext,
    ToolResult,
    ToolSetupError,
    ToolSource,
)
from ajet.tools.toolset import Toolset

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
