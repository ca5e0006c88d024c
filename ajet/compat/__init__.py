"""Names of systems that people come from, bound to our parts: one module for each."""
