"""Which tokens count as control tokens."""

from __future__ import annotations

import pytest

from ajet.context_tracker import Renderer
from ajet.context_tracker.encoder import _plain_encoder, control_tokens
from ajet.engine.model_source import ModelSource
from ajet.schema.errors import InvalidRequestError


def test_boilerplate_that_is_one_token_is_no_control_token() -> None:
    tokenizer = ModelSource.resolve("tiny:qwen2-0.3m").tokenizer()
    chosen = control_tokens(tokenizer, tokenizer.chat_template)
    assert {"<|im_start|>", "<|im_end|>", "<|endoftext|>"} <= set(chosen)
    assert all(token.startswith("<|") for token in chosen), 'a JSON fragment such as \'{"name": "\' is ordinary text'


def test_half_a_surrogate_pair_is_refused_with_its_place() -> None:
    tokenizer = ModelSource.resolve("tiny:qwen2-0.3m").tokenizer()
    renderer = Renderer(tokenizer)
    with pytest.raises(InvalidRequestError, match=r"half of a surrogate pair \(\\ud83d, after '.*a smile: '\)"):
        renderer.render([{"role": "user", "content": "a smile: \ud83d"}])


def test_a_tokenizer_that_panics_refuses_the_text() -> None:
    """As the real one does at millions of blanks: with what isn't even an Exception. This one is a stand-in."""

    class PanicException(BaseException):
        pass

    class Backend:
        padding = truncation = None
        encode_special_tokens = False

        def encode_batch_fast(self, texts: list[str], add_special_tokens: bool) -> list[int]:
            raise PanicException("regex")

    class Tokenizer:
        backend_tokenizer = Backend()

    with pytest.raises(InvalidRequestError, match="can't encode this text"):
        _plain_encoder(Tokenizer())(" " * 1000)
