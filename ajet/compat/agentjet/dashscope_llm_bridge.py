"""`create_external_llm_fn`, which the judges of old files call. New code uses `ajet.task_judge.helper.HelperModel`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ajet.schema.chat import Message
from ajet.task_judge.helper import HelperModel


def create_external_llm_fn(alien_llm_model: str, alien_llm_response_length: int = 512) -> Callable[..., dict[str, Any]]:
    """A blocking function from messages to the helper model's reply (`HelperModel.former`), as a message."""
    model = HelperModel.former(alien_llm_model)

    def ask(
        messages: Sequence[Message], custom_sampling_params: dict[str, Any] | None = None, request_id: str = ""
    ) -> dict[str, Any]:
        sampling = {"max_tokens": alien_llm_response_length, **(custom_sampling_params or {})}
        return {"role": "assistant", "content": model.complete_blocking(messages, **sampling)}

    return ask
