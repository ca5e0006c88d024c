"""OpenAI's and Anthropic's protocols over episode sessions, by HTTP or by a function call."""

from ajet.gateway.gateway import EpisodeKey, Gateway, GatewaySettings

__all__ = ["EpisodeKey", "Gateway", "GatewaySettings"]
