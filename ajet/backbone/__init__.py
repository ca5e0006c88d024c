"""Who owns the loop. `ajet.backbone.<name>.run(config, experiment) -> int` is one run; the int is the exit code."""
