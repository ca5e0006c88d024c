"""vLLM as the engine: on servers that we start, watch and stop, or inside this process."""
