"""`Finish` and `Submit`: how an agent says that it is done, with an answer or with the files as they are."""

from __future__ import annotations

from ajet.agents.tools.tool import Arguments, StatelessTool, ToolContext, ToolResult


class Finish(StatelessTool):
    """Ends the episode with an answer: the result's `data["answer"]`."""

    def __init__(self, *, name: str = "finish") -> None:
        self.name = name
        self.description = "End the task with the final answer. Call it once, when the answer is known."
        self.parameters = {
            "type": "object",
            "properties": {"answer": {"type": "string", "description": "The final answer, complete"}},
            "required": ["answer"],
            "additionalProperties": False,
        }

    async def run(self, arguments: Arguments, context: ToolContext) -> ToolResult:
        return ToolResult(arguments["answer"], data={"answer": arguments["answer"]}, ends_episode=True)


class Submit(StatelessTool):
    """Ends the episode: what the agent did, for example to files, is the result."""

    def __init__(self, *, name: str = "submit") -> None:
        self.name = name
        self.description = "End the task: the work is done and ready to be judged as it is."
        self.parameters = {
            "type": "object",
            "properties": {"message": {"type": "string", "description": "What was done, in a sentence or two"}},
            "additionalProperties": False,
        }

    async def run(self, arguments: Arguments, context: ToolContext) -> ToolResult:
        message = arguments.get("message", "")
        return ToolResult(message or "submitted", data={"answer": message}, ends_episode=True)
