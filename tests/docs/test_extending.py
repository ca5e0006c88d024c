"""Every example of `docs/dev/extending.md` works: applied to a copy of the source, its tests pass."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.pages import ROOT, Block, blocks_of

PAGE = ROOT / "docs" / "dev" / "extending.md"
FILES_AN_EXAMPLE_MAY_TOUCH = 3


def sections() -> dict[str, list[Block]]:
    """The titled blocks of each section."""
    text = PAGE.read_text(encoding="utf-8")
    headings = [
        (text.count("\n", 0, found.start()) + 1, found[1]) for found in re.finditer("^## (.+)$", text, re.MULTILINE)
    ]
    found: dict[str, list[Block]] = {title: [] for _, title in headings}
    for block in blocks_of(PAGE):
        found[max(heading for heading in headings if heading[0] < block.line)[1]].append(block)
    return found


def apply(block: Block, root: Path) -> None:
    """Write the new file, or make the edit: what stands without `+` must be in the file, exactly once."""
    file = root / block.title
    if block.language != "diff":
        assert not (ROOT / block.title).exists(), f"{block.title} exists already"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(block.code)
        return
    text = file.read_text()
    for hunk in block.code.split("@@\n"):
        lines = hunk.splitlines(keepends=True)
        before = "".join(line[1:] for line in lines if not line.startswith("+"))
        after = "".join(line[1:] for line in lines if not line.startswith("-"))
        assert text.count(before) == 1, f"{block.name}: {block.title} holds these lines {text.count(before)} times"
        text = text.replace(before, after)
    file.write_text(text)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What pytest says about the examples' tests."""
    root = tmp_path_factory.mktemp("copy")
    shutil.copytree(ROOT / "ajet", root / "ajet", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "tests" / "support", root / "tests" / "support")
    for file in ROOT.glob("tests/*.py"):
        shutil.copy(file, root / "tests")
    examples = [block for titled in sections().values() for block in titled]
    for block in examples:
        apply(block, root)
    tests = [block.title for block in examples if block.title.startswith("tests/")]
    flags = ("-p", "no:cacheprovider", "-rA", "--tb=short", "--continue-on-collection-errors")
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *flags, *tests],
        cwd=root,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(root / "tests")])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    return ran.stdout + ran.stderr


@pytest.mark.slow
@pytest.mark.parametrize("section", sections())
def test_the_example_works(section: str, report: str) -> None:
    tests = [block.title for block in sections()[section] if block.title.startswith("tests/")]
    why = [line for line in report.splitlines() if line.startswith("E  ")]
    assert tests, "the section has no test"
    for test in tests:
        about = [line for line in report.splitlines() if re.match(rf"(PASSED|FAILED|ERROR) {re.escape(test)}", line)]
        assert about and all(line.startswith("PASSED") for line in about), "\n".join([*about, *why] or [report])


@pytest.mark.parametrize("section", sections())
def test_the_table_says_what_the_example_touches(section: str) -> None:
    touched = {block.title for block in sections()[section] if not block.title.startswith("tests/")}
    assert 1 <= len(touched) <= FILES_AN_EXAMPLE_MAY_TOUCH
    anchor = section.lower().replace(" ", "-")
    rows = re.findall(rf"^\| \[[^|]*\]\(#{anchor}\).*$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert rows, "the table has no row for this section"
    edited = {block.title for block in sections()[section] if block.language == "diff"}
    assert edited <= set(re.findall(r"`(ajet/[\w/]+\.py)`", "\n".join(rows)))
