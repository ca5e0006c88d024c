"""Models on OpenAI-compatible servers: an engine if the server returns token ids, otherwise a chat model only."""
