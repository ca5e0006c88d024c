"""`ajet.data`: lengths and batch size."""

from __future__ import annotations

from ajet.config.section import Section
from ajet.config.types import Positive


class DataConfig(Section):
    """`ajet.data`: lengths and batch size."""

    max_prompt_length: Positive = 3000
    """Tokens that a training sample's prompt may have (everything before the first reply)."""
    max_response_length: Positive = 15000
    """Tokens that follow the prompt in a training sample: all replies, tool results and later messages together."""
    train_batch_size: Positive = 32
    """Tasks a training step. Each is run `rollout.num_repeat` times."""
