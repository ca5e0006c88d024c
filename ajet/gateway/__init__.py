"""OpenAI's and Anthropic's protocols over episode sessions, by HTTP or by a function call."""
