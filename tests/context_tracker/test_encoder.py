"""Which tokens count as control tokens."""

from __future__ import annotations

from ajet.context_tracker.encoder import control_tokens
from ajet.engine.model_source import ModelSource


def test_boilerplate_that_is_one_token_is_no_control_token() -> None:
    tokenizer = ModelSource.resolve("tiny:qwen2-0.3m").tokenizer()
    chosen = control_tokens(tokenizer, tokenizer.chat_template)
    assert {"<|im_start|>", "<|im_end|>", "<|endoftext|>"} <= set(chosen)
    assert all(token.startswith("<|") for token in chosen), 'a JSON fragment such as \'{"name": "\' is ordinary text'
