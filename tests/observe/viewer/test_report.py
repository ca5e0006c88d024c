"""The report is one file that needs nothing else, and shows hostile text as text."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from ajet.cli.runs import report
from ajet.observe.run_files import UnreadableFileError
from ajet.observe.viewer.report import _label
from ajet.schema.errors import UserError

pytest.importorskip("matplotlib")


@pytest.mark.slow
def test_report_is_self_contained(experiments: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "report.html"
    assert report([str(experiments / "math-agent"), "-o", str(target)]) == 0
    html = target.read_text()
    assert re.search(r"</style>\s*</head><body>\s*<h1>math-agent</h1>", html)
    assert html.count("data:image/png;base64,") >= 10
    assert not re.search(r"""(src|href)=["'](?!data:)""", html) and "<script" not in html
    assert "Best" in html and "A shop sells" in html
    pictures = sorted(path.name for path in (tmp_path / "report_plots").iterdir())
    assert "return.png" in pictures and "kl.png" in pictures
    assert (tmp_path / "report_plots" / "return.png").read_bytes().startswith(b"\x89PNG")
    assert str(target) in capsys.readouterr().out


def test_a_report_follows_no_link_out_of_the_folder(tmp_path: Path) -> None:
    folder, target = tmp_path / "run", tmp_path / "report.html"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    (tmp_path / "elsewhere").write_text("secret: 1")
    (folder / "config.resolved.yaml").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnreadableFileError, match=r"config\.resolved\.yaml"):
        report([str(folder), "-o", str(target)])
    assert not target.exists()


def test_report_of_nothing_is_an_error_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such run"):
        report([str(tmp_path)])


def test_lines_of_a_plot_are_named_for_people() -> None:
    assert [_label(name, ["return/mean", "val/return/mean"]) for name in ("return/mean", "val/return/mean")] == [
        "training", "validation",
    ]  # fmt: skip
    assert _label("success/pass@2", ["success/pass@2", "success/pass@4"]) == "pass@2"


@pytest.mark.slow
def test_what_reorders_or_hides_text_is_shown_escaped(experiments: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "math-agent"
    shutil.copytree(experiments / "math-agent", folder)
    config = folder / "config.resolved.yaml"
    config.write_text(config.read_text() + "\nuser: {a: 'x\u202egnp.exe\u200b'}\n")
    assert report([str(folder), "-o", str(tmp_path / "report.html")]) == 0
    html = (tmp_path / "report.html").read_text()
    assert "x\\u202egnp.exe\\u200b" in html
    assert "\u202e" not in html
