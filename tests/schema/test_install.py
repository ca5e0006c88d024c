"""How to install what is missing."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from ajet.schema import install
from ajet.schema.install import install_command

SOURCES = Path(__file__).parents[2] / "ajet"


def test_from_the_clone_with_its_tested_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "constraints").mkdir()
    (tmp_path / "constraints" / "verl.txt").touch()
    monkeypatch.setattr(install, "clone_in_use", lambda: tmp_path)
    assert install_command("verl") == f"pip install -c {tmp_path}/constraints/verl.txt -e '{tmp_path}[verl]'"
    assert install_command("vllm") == f"pip install -e '{tmp_path}[vllm]'"
    monkeypatch.chdir(tmp_path)
    assert install_command("verl") == "pip install -c constraints/verl.txt -e '.[verl]'"


def test_from_the_wheel_or_else_the_packages_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = tmp_path / "agentjet-0.1.0-py3-none-any.whl"
    wheel.touch()
    origin = {"url": wheel.as_uri()}
    said = SimpleNamespace(read_text=lambda _name: json.dumps(origin))
    needs = ["torch>=2.8", 'peft>=0.15; extra == "lora"', 'agentjet[lora]; extra == "dev"']
    monkeypatch.setattr(install, "clone_in_use", lambda: None)
    monkeypatch.setattr(install.metadata, "distribution", lambda _name: said)
    monkeypatch.setattr(install.metadata, "requires", lambda _name: needs)
    assert install_command("lora") == f"pip install '{wheel}[lora]'"
    wheel.unlink()
    assert install_command("lora") == "pip install 'peft>=0.15'"


def test_nothing_sends_anybody_to_our_name_on_an_index() -> None:
    """It belongs to somebody else."""
    root = SOURCES.parent
    names = ("docs", "benchmarks", "tutorial", "configs", "constraints")
    folders = [SOURCES, *(root / name for name in names)]
    files = [
        file for folder in folders for file in folder.rglob("*") if file.suffix in (".py", ".md", ".yaml", ".toml")
    ]
    for file in [*files, *root.glob("*.md")]:
        said = re.search(r"pip install [^\n]*?['\" ](agentjet|ajet)\b(?![-/.])", file.read_text(encoding="utf-8"))
        assert not said, f"{file}: {said and said[0]}"
