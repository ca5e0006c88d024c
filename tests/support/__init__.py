"""What several tests share: servers, worlds, models and programs that they start."""

from pathlib import Path

SUPPORT = Path(__file__).parent
TESTS = SUPPORT.parent
ROOT = TESTS.parent
