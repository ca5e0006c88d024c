"""`ajet.helper`: the model of agents whose target is not trained."""

from __future__ import annotations

from ajet.config.section import Section


class HelperConfig(Section):
    """`ajet.helper`: the model of agents whose target is not trained, at any OpenAI-compatible endpoint."""

    model: str | None = None
    """Its name there. null: such agents talk to the tuned model too; their calls are recorded and not trained."""
    base_url: str | None = None
    """Address of the endpoint, ending in `/v1`. null: OPENAI_BASE_URL, else OpenAI's."""
    api_key: str | None = None
    """Key for the endpoint, best as `${oc.env:NAME}`. null: OPENAI_API_KEY."""
