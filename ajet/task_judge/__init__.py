"""How an output becomes a reward."""
