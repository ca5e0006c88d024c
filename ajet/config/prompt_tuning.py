"""`ajet.prompt_tuning`: the prompt templates that workflows are given by name, and how they are tuned."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator
from pydantic_core import PydanticCustomError

from ajet.config.kinds import OptimiserName, ProposerName
from ajet.config.section import AboveZero, Count, NonNegative, Positive, Section, Temperature


class TemplateConfig(Section):
    """One prompt template: its text, or a file that holds it."""

    text: str | None = None
    file: str | None = None
    engine: Literal["f-string", "jinja"] = "f-string"
    """How placeholders are written: `{name}`, or Jinja's `{{ name }}`."""

    @model_validator(mode="after")
    def _one_of_both(self) -> TemplateConfig:
        if (self.text is None) == (self.file is None):
            raise PydanticCustomError("template", "should have either `text` or `file`")
        return self


class APOConfig(Section):
    """`ajet.prompt_tuning.apo`: criticism of episodes, edits that answer it, and a beam of the best."""

    beam_width: Positive = 4
    """Candidates that survive a round."""
    branch_factor: Positive = 4
    """Criticisms, and so edits, of each survivor in a round."""
    critique_batch: Positive = 4
    """Search tasks whose episodes one criticism reads."""
    score_batch: Positive = 16
    """Validation tasks on which the candidates of a round are compared."""


class GEPAConfig(Section):
    """`ajet.prompt_tuning.gepa`: reflective mutation on a Pareto front, by the `gepa` package."""

    minibatch: Positive = 3
    """Search tasks on which a mutation must beat its parent before validation."""
    merges: Count = 5
    """Most merges of two candidates of the front. 0: none."""
    selection: Literal["pareto", "current_best", "epsilon_greedy", "top_k_pareto"] = "pareto"
    """How the parent of a mutation is chosen."""
    perfect_score: float = 1.0
    """A parent that earns this on the whole minibatch isn't mutated."""


class BestOfConfig(Section):
    """`ajet.prompt_tuning.best_of`: rewrites that look at no episode; the baseline."""

    proposals: Positive = 4
    """Rewrites in a round. Each is tried on all validation tasks."""


class TokenPriceConfig(Section):
    """`ajet.prompt_tuning.budget.price_per_million`: the price of a million tokens of the tuned model."""

    input: NonNegative = 0.0
    """Price of a million prompt tokens of the tuned model."""
    output: NonNegative = 0.0
    """Price of a million sampled tokens."""


class SearchBudgetConfig(Section):
    """`ajet.prompt_tuning.budget`: what a search may spend. What has begun when a limit is reached still finishes."""

    episodes: Positive | None = None
    """Most episodes, the confirmation included. null: no limit."""
    tokens: Positive | None = None
    """Most tokens of episodes and proposer together. null: no limit."""
    money: AboveZero | None = None
    """Most that they may cost: the tuned model by `price_per_million`, the helper by its own. null: no limit."""
    price_per_million: TokenPriceConfig = TokenPriceConfig()
    """The price of a million tokens of the tuned model."""
    seconds: AboveZero | None = None
    """Longest time, over all resumes. null: no limit."""


class PromptTuningConfig(Section):
    """`ajet.prompt_tuning`: prompt templates, and how `--backbone=prompt` tunes them."""

    templates: dict[str, str | TemplateConfig] = {}
    """First texts by name, for `tuner.prompt("name")`: a text, or `{text: …}` or `{file: …}` with `engine: f-string |
    jinja`."""
    tune: Literal["together", "in_turn"] = "together"
    """Several templates: a proposal may change all, or one in each round."""
    algorithm: OptimiserName = "apo"
    """Which search: `apo`, `gepa`, `best_of`, or your own as `module->Class`."""
    proposer: ProposerName = "helper"
    """Who writes proposals: the `helper` model of `ajet.helper`, the `tuned` model itself, or `module->function`."""
    proposer_temperature: Temperature = 1.0
    """Temperature of the proposer."""
    proposer_timeout: AboveZero = 300.0
    """Seconds for one answer of the proposer, retries included. If all of a round fail, the search ends, and can be
    resumed."""
    rounds: Positive | None = None
    """Most rounds. null: the algorithm's own number (apo 3, gepa 30, best_of 3)."""
    repeats: Positive = 1
    """Episodes of each candidate on each task."""
    validation_tasks: Positive | None = None
    """Most tasks on which candidates are validated. null: all but the confirmation's."""
    confirmation_tasks: Count | None = None
    """Tasks kept until the end, to compare the best with the first template. 0: none. null: half of the validation
    split, or a quarter of the tasks."""
    max_template_length: Positive = 20000
    """Most characters of a proposed template."""
    proposal_retries: Count = 2
    """How often the proposer is asked again, after a proposal that is refused."""
    apo: APOConfig = APOConfig()
    """Keys of `algorithm: apo`."""
    gepa: GEPAConfig = GEPAConfig()
    """Keys of `algorithm: gepa`."""
    best_of: BestOfConfig = BestOfConfig()
    """Keys of `algorithm: best_of`."""
    budget: SearchBudgetConfig = SearchBudgetConfig()
    """What a search may spend."""
