"""A linear training row: one root-to-leaf path of a call tree, for trainers that know only rows (verl, trinity)."""

from __future__ import annotations

from dataclasses import dataclass

from ajet.schema.call_tree import BoolArray, FloatArray, IntArray


@dataclass(slots=True)
class Sample:
    """`prompt_ids` carry no loss; `response_*` are aligned with `response_ids`."""

    episode_id: str
    agent: str
    prompt_ids: IntArray
    response_ids: IntArray
    response_mask: BoolArray
    """True where a token was sampled, is trained, and is trained in this sample."""
    logprobs: FloatArray
    """The sampler's; 0.0 on context tokens."""
    call_of_token: IntArray
    """Index in the tree's calls of the call that sampled each response token, -1 for context: credit is per call."""
    versions: IntArray
    """Policy version of each response token, -1 for context."""
