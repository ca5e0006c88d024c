"""What an engine is asked and what it answers: token ids in, token ids and logprobs out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort"]


GREEDY_BELOW = 1e-5
"""Lower temperatures are 0: dividing logits by less would overflow float32."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one reply is drawn."""

    temperature: float = 1.0
    """0 is greedy, and so is anything below `GREEDY_BELOW`, which is stored as 0. See `logprob_temperature`."""
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    """Strings that end the reply. They cut the text, never the ids."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end the reply, besides the model's own end tokens. If one is sampled, it is part of `token_ids`."""
    seed: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.temperature, int | float) and 0 < self.temperature < GREEDY_BELOW:
            object.__setattr__(self, "temperature", 0.0)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature == 0

    @property
    def logprob_temperature(self) -> float:
        """The temperature of the recorded logprobs, and of those that are trained: greedy replies have those of 1."""
        return self.temperature or 1.0


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One reply to draw."""

    prompt_ids: list[int]
    sampling: Sampling
    session_id: str = ""
    """The episode. Engines with several replicas keep an episode on one of them, so that its prefix stays cached."""
    top_logprobs: int = 0
    deadline_s: float | None = None
    """Seconds left rather than a clock time, because it may cross machines."""


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """Tokens as they appear, for streaming."""

    token_ids: list[int]
    logprobs: list[float]


@dataclass(slots=True)
class Completion:
    """One drawn reply.

    `logprobs[i]` = log_softmax(logits / T)[token_ids[i]] over the full vocabulary, before truncation and penalties.
    """

    token_ids: list[int]
    """Everything sampled, a sampled end token or stop string included."""
    logprobs: list[float]
    finish_reason: FinishReason
    stopped_by: str | int | None = None
    """The stop string or the end token's id, when `finish_reason` is `stop`."""
    versions: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])
    """[(index of first token, policy version), …]"""
    top_logprobs: list[list[tuple[int, float]]] | None = None
    cached_prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class EngineCapabilities:
    """What an engine can do. What it can't honour is refused, or named at the start of the run; it is never ignored."""

    name: str
    exact_tokens: bool = True
    """Takes token ids and returns sampled ids with logprobs. An engine without this can serve helpers but can't be used
    for training."""
    load_weights: bool = False
    max_model_len: int | None = None
