"""What a package index shows of the README needs no file beside it."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

from support.pages import ROOT


@pytest.mark.slow
def test_the_wheels_description_has_no_relative_link_or_picture(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    subprocess.run([*pip, str(ROOT)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = message_from_bytes(archive.read(name))
    assert metadata["Description-Content-Type"] == "text/markdown"
    text = metadata.get_payload(decode=True).decode()
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    assert "![" not in text and "<img" not in text and "mermaid" not in text
    targets = re.findall(r"\]\(\s*([^)]*)\)|^\[[^\]]+\]:\s*(\S+)|<a\b[^>]*href=.([^\"']*)", prose, re.MULTILINE)
    assert all(target.startswith("https://") for found in targets for target in found if target), targets
    assert targets, "links to other sites stay"
    assert text.startswith("# AgentJet\n")
    original = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"^## .+", original, re.MULTILINE) == re.findall(r"^## .+", text, re.MULTILINE)
    for fence in ("bash", "python", "yaml", "jsonl"):
        assert re.findall(rf"^```{fence}.*?^```", original, re.M | re.S) == re.findall(
            rf"^```{fence}.*?^```", text, re.M | re.S
        )
