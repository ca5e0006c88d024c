"""Models behind an OpenAI-compatible server: an engine where that speaks token ids, a chat model anywhere."""
