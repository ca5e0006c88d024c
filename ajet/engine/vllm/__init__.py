"""vLLM as the engine: servers that we start, watch and stop, or inside this process."""
