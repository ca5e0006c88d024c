"""Whether bubblewrap works on this machine."""

from __future__ import annotations

import pytest

from ajet.environment.sandboxes import SandboxError
from ajet.environment.sandboxes.bubblewrap_arguments import probe


def has_bubblewrap() -> bool:
    try:
        probe()
    except SandboxError:
        return False
    return True


needs_bubblewrap = pytest.mark.skipif(not has_bubblewrap(), reason="bubblewrap can't make namespaces here")
