"""Whether verl is installed. Asked of the installed packages: this folder's own name would pass for the module."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def verl_installed() -> bool:
    try:
        version("verl")
    except PackageNotFoundError:
        return False
    return True
