"""Fields that would change what is sampled or what the request means, and that can't be honoured: refused by name."""

from __future__ import annotations

from typing import Any

from ajet.gateway.fields import BadField

NO_EFFECT = "this server can't honour it, and ignoring it would change the meaning of the request"
_FORCED = "replies are sampled as the policy gives them; use response_format, which is asked for and checked"
_RENDERED = "the prompt is rendered by the model's own chat template"

UNSET: tuple[Any, ...] = (None, False, "", [], {})

REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "functions": ((), "use tools and tool_choice"),
    "function_call": ((), "use tools and tool_choice"),
    "logit_bias": ((), NO_EFFECT),
    "logits_processors": ((), NO_EFFECT),
    "allowed_token_ids": ((), NO_EFFECT),
    "bad_words": ((), NO_EFFECT),
    "min_tokens": ((), NO_EFFECT),
    "use_beam_search": ((), NO_EFFECT),
    "length_penalty": ((1,), NO_EFFECT),
    "guided_json": ((), _FORCED),
    "guided_regex": ((), _FORCED),
    "guided_choice": ((), _FORCED),
    "guided_grammar": ((), _FORCED),
    "guided_json_object": ((), _FORCED),
    "structural_tag": ((), _FORCED),
    "structured_outputs": ((), _FORCED),
    "add_generation_prompt": ((True,), _RENDERED),
    "continue_final_message": ((), _RENDERED),
    "chat_template": ((), _RENDERED),
    "documents": ((), _RENDERED),
    "truncate_prompt_tokens": ((), "prompts are taken whole or refused"),
    "prompt_logprobs": ((), NO_EFFECT),
    "include_stop_str_in_output": ((), NO_EFFECT),
    "skip_special_tokens": ((True,), NO_EFFECT),
    "web_search_options": ((), NO_EFFECT),
    "audio": ((), NO_EFFECT),
    "prediction": ((), NO_EFFECT),
    "echo": ((), NO_EFFECT),
    "suffix": ((), NO_EFFECT),
    "mcp_servers": ((), NO_EFFECT),
    "container": ((), NO_EFFECT),
}
"""Field → values besides unset ones that ask for nothing, and why anything else is refused."""


def refuse_unsupported(body: dict[str, Any], choices: int = 1) -> None:
    """Raise BadField for the first field that can't be honoured. `choices`: the request's `n`."""
    for key in REFUSED.keys() & body.keys():
        neutral, why = REFUSED[key]
        if body[key] not in UNSET and body[key] not in neutral:
            raise BadField(key, f"{key} is not supported: {why}")
        if body[key] is False and True in neutral:
            raise BadField(key, f"{key}: false is not supported: {why}")
    if body.get("best_of") not in (None, choices):
        raise BadField("best_of", f"best_of is not supported: {NO_EFFECT}")
