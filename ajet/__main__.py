"""`python -m ajet` is the `ajet` command."""

from __future__ import annotations

from ajet.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
