"""Names of systems that people come from, bound to our parts: a module or folder for each."""
