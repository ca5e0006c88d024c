"""Ready agents, usable with or without training: see `model_function`."""
