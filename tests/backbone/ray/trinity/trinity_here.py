"""Whether Trinity-RFT is installed, and whether this process may import it without vLLM."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version


def trinity_installed() -> bool:
    try:
        version("trinity-rft")
    except PackageNotFoundError:
        return False
    return True


def enter_cpu() -> None:
    """Before Trinity is imported: as the launcher does on a machine without a GPU."""
    from ajet.backbone.ray.trinity import plugin

    os.environ[plugin.CPU] = "1"
    plugin.install()
