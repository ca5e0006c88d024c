"""Python for vLLM's own processes."""
