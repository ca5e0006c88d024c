"""The `ajet` command: one file a subcommand, imported when it is used."""
