"""`ajet.helper`: the model of agents whose target is not trained, and of readers and judges that ask one."""

from __future__ import annotations

from ajet.config.section import Section
from ajet.config.types import AboveZero, NonNegative, Positive


class HelperPriceConfig(Section):
    """`ajet.helper.price_per_million`: what a million tokens cost, in any currency; counts against `max_cost`."""

    input: NonNegative = 0.0
    """Price of a million prompt tokens."""
    output: NonNegative = 0.0
    """Price of a million tokens of replies."""


class HelperConfig(Section):
    """`ajet.helper`: the model of agents whose target is not trained, at any OpenAI-compatible endpoint. Readers and
    judges ask it through `ajet.helper.HelperModel`; the limits hold for their calls, in each process."""

    model: str | None = None
    """Its name there. null: such agents talk to the tuned model too; their calls are recorded and not trained."""
    base_url: str | None = None
    """Address of the endpoint, ending in `/v1`. null: OPENAI_BASE_URL, else OpenAI's."""
    api_key: str | None = None
    """Key for the endpoint, best as `${oc.env:NAME}`. null: OPENAI_API_KEY."""
    max_calls: Positive | None = None
    """How many calls `HelperModel` may make; one more is an error. null: no limit."""
    max_tokens: Positive | None = None
    """How many tokens, prompts and replies together, those calls may take. null: no limit."""
    max_cost: AboveZero | None = None
    """How much those calls may cost, by `price_per_million`. null: no limit."""
    price_per_million: HelperPriceConfig = HelperPriceConfig()
