"""Every tutorial says what is learnt, its reward and what to expect, and stands in the gallery with a picture."""

from __future__ import annotations

import re

import pytest

from support.tutorial_runs import ROOT, TUTORIAL

GALLERY = (ROOT / "docs" / "tutorials.md").read_text(encoding="utf-8")
FOLDERS = sorted(folder.name for folder in TUTORIAL.glob("example_*"))
SECTIONS = {
    found[1]: section
    for section in re.split(r"^(?=## )", GALLERY, flags=re.M)
    if (found := re.search(r"tutorial/(example_\w+)/README", section))
}


@pytest.mark.parametrize("folder", FOLDERS)
def test_its_readme_says_what_to_expect(folder: str) -> None:
    text = (TUTORIAL / folder / "README.md").read_text(encoding="utf-8")
    assert "**What is learnt.** " in text and "**Reward.** " in text
    assert re.search(r"\*\*(Expected|Measured) curve\.\*\* ", text)
    assert re.search(r"^(ajet|python|AJET_\w+=\S+) .*tutorial/", text, re.M), "a command"


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_gallery_shows_it(folder: str) -> None:
    section = SECTIONS[folder]
    assert re.search(r"^!\[.+\]\(assets/.+\.(svg|png)\)$", section, re.M), "a picture"
    assert re.search(r"\br = |reward goes", section), "the reward"
    assert "```bash" in section
    readme = (TUTORIAL / folder / "README.md").read_text(encoding="utf-8")
    if "**Measured curve.** " in readme:
        assert re.search(r"reward\.png|prompt_tuning\.svg", section), "a curve"
