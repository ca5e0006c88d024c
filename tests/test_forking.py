"""What forked processes do before anything else."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
import numpy
from ajet.forking import reseed

before = "numpy.random" in sys.modules
reseed()
assert ("numpy.random" in sys.modules) == before, "it was imported for nothing"
numpy.random.seed(1)
first = numpy.random.random()
numpy.random.seed(1)
reseed()
assert numpy.random.random() != first
"""


def test_numbers_are_new_and_nothing_is_imported_for_them() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)
