"""The model function: all that an agent needs of a model.

    async def model(messages, *, tools=None, **sampling) -> message

`messages`, `tools` and the returned assistant message are plain dicts in OpenAI's form. `tuner.as_model_function()` is
the model being trained; `as_model_function` makes one from a client or any coroutine, so that one agent serves for a
script, an evaluation and training alike.
"""

from __future__ import annotations

from typing import Any, Protocol

Message = dict[str, Any]
ToolSchema = dict[str, Any]


class ModelFunction(Protocol):
    """Awaits one model call. Raises what its client raises; an agent never turns that into a reply."""

    async def __call__(
        self, messages: list[Message], *, tools: list[ToolSchema] | None = None, **sampling: Any
    ) -> Message: ...
