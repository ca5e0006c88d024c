"""The settings of model calls, and how a client's sampling parameters are merged with them.

While training, the YAML decides temperature, top_p and top_k of trained calls (the client's own are ignored, which is
logged once): the recorded log-probabilities then match what the loss assumes. Calls that aren't trained keep their
client's settings.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from operator import attrgetter
from typing import Any, NamedTuple

from ajet.schema.chat import SIDE_MODEL, Sampling

log = logging.getLogger(__name__)

_decided = attrgetter(
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed")
)
"""The parameters that the YAML decides while training."""
_warned: set[str] = set()


def _warn_once(message: str, *args: object) -> None:
    """Log a warning only the first time, as it would apply to thousands of calls."""
    if message not in _warned:
        _warned.add(message)
        log.warning(message, *args)


class SeedKey(NamedTuple):
    """The seed of the randomness in an episode's replies."""

    seed: int = 0
    step: int = 0
    task: str = ""
    repeat: int = 0
    occurrence: int = 0
    """The index of this group among the task's groups in the step."""

    def of_call(self, agent: str, index: int) -> int:
        """The seed of an agent's `index`-th call, of 48 bits: exact in any JSON reader."""
        group = (self.occurrence,) if self.occurrence else ()  # a task's only group keeps its previous seed
        text = "\x1f".join(map(str, (self.seed, self.step, self.task, self.repeat, agent, index, *group)))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big")


class EmbeddingEndpoint(NamedTuple):
    """An OpenAI-compatible endpoint that makes embeddings."""

    base_url: str | None
    """None: the environment's `OPENAI_BASE_URL`, else OpenAI's own."""
    api_key: str
    model: str

    @classmethod
    def from_config(cls, config: Any) -> EmbeddingEndpoint | None:
        """`helper.embedding_model` at the helper's address; None if there is none."""
        helper = config.ajet.helper
        if helper.embedding_model is None:
            return None
        return cls(
            helper.base_url, helper.api_key or os.environ.get("OPENAI_API_KEY") or "none", helper.embedding_model
        )


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """How the replies of an episode are sampled."""

    training: bool = True
    """The YAML's sampling overrides the client's on trained calls."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    trainable_targets: tuple[str, ...] = ()
    """The targets that are trained; empty: all."""
    untrained_models: tuple[str, ...] = ()
    """Patterns of requested model names whose calls aren't trained."""
    embeddings: EmbeddingEndpoint | None = None
    """The endpoint that answers requests for embeddings."""
    force_disable_toolcalls: bool = False
    log_tool_format_check: bool = False
    """Log each reply with a malformed tool call."""
    log_tool_format_error_detail: bool = False
    """Also log what was wrong with it."""
    seed_key: SeedKey = field(default_factory=SeedKey)

    @classmethod
    def from_config(
        cls,
        config: Any,
        *,
        validation: bool = False,
        trainable_targets: list[str] | tuple[str, ...] | None = None,
        step: int = 0,
        task: str = "",
        repeat: int = 0,
        occurrence: int = 0,
    ) -> SessionSettings:
        """From a loaded `Config`. `validation` uses `rollout.val_kwargs`, and lets clients choose for themselves."""
        rollout = config.ajet.rollout
        temperature, top_p, top_k = rollout.temperature, rollout.top_p, rollout.top_k
        if validation:
            val = rollout.val_kwargs
            temperature, top_p, top_k = validation_temperature(config), val.top_p, val.top_k
        return cls(
            training=not validation,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            trainable_targets=tuple(trainable_targets or ()),
            untrained_models=(*rollout.untrained_models, SIDE_MODEL),
            embeddings=EmbeddingEndpoint.from_config(config),
            force_disable_toolcalls=rollout.force_disable_toolcalls,
            log_tool_format_check=config.ajet.context_tracker.log_tool_format_check,
            log_tool_format_error_detail=config.ajet.context_tracker.log_tool_format_error_detail,
            seed_key=SeedKey(rollout.seed, step, task, repeat, occurrence),
        )

    def log_tool_format(self, episode_id: str, agent: str, malformed: Sequence[str]) -> None:
        """Log the malformed tool calls of a reply, if the configuration asks for it."""
        bad = [why for why in malformed if why.startswith("tool call")]
        if bad and (self.log_tool_format_check or self.log_tool_format_error_detail):
            detail = f": {'; '.join(bad)}" if self.log_tool_format_error_detail else ""
            log.warning("episode %s: malformed tool call by %s%s", episode_id, agent, detail)

    def trains(self, target: str) -> bool:
        """Whether calls of this target are trained."""
        return not self.trainable_targets or target in self.trainable_targets

    def untrained_model(self, name: str) -> bool:
        """Whether a requested model name means that the call isn't trained."""
        return any(fnmatchcase(name, pattern) for pattern in self.untrained_models)

    @property
    def default_sampling(self) -> Sampling:
        """The sampling of a call whose client sets no parameters."""
        return Sampling(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k)

    def sampling(self, asked: Sampling, *, trained: bool, seed: int) -> Sampling:
        """The sampling of one call. `max_tokens` stays as requested: the tracker knows how much room is left."""
        if not (self.training and trained):
            return replace(asked, seed=seed if asked.seed is None else asked.seed)
        ours = Sampling(
            self.temperature,
            self.top_p,
            self.top_k,
            max_tokens=asked.max_tokens,
            stop=asked.stop,
            stop_token_ids=asked.stop_token_ids,
            seed=seed,
            ignore_eos=asked.ignore_eos,
        )
        if _decided(asked) != (self.temperature, self.top_p, self.top_k, 0.0, 0.0, 0.0, 1.0, None):
            _warn_once(
                "While training, the YAML decides the sampling (temperature %s, top_p %s, top_k %s, no penalties, our "
                "own seeds); what a client asks for instead is ignored.",
                self.temperature,
                self.top_p,
                self.top_k,
            )
        return ours


def validation_temperature(config: Any) -> float:
    """The temperature of validation; 0 where it is greedy. `val_pass_n` above 1 asks for replies that differ."""
    val, pass_n = config.ajet.rollout.val_kwargs, config.ajet.trainer_common.val_pass_n
    sampled = (pass_n or 1) > 1 if val.do_sample is None else val.do_sample
    if not sampled:
        return 0.0
    return float(config.ajet.rollout.temperature if val.temperature is None else val.temperature)
