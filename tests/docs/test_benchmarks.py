"""The benchmarks still find what they import. None of them is run."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from support.pages import ROOT

SCRIPTS = sorted(file.stem for file in (ROOT / "benchmarks").glob("[!_]*.py"))


@pytest.mark.slow
def test_every_benchmark_can_be_imported() -> None:
    pytest.importorskip("playwright")
    program = f"import importlib\nfor name in {SCRIPTS}:\n    importlib.import_module(name)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])}
    ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_every_benchmark_is_on_the_page() -> None:
    page = (ROOT / "docs" / "benchmarks" / "index.md").read_text()
    assert set(re.findall(r"`(\w+)\.py`", page)) == {name for name in SCRIPTS if name != "common"}
