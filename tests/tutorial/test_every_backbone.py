"""The YAML of every tutorial is one that each backbone takes; where one does not, its README says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ajet.cli.main import main
from support.ports import free_port
from support.tutorial_runs import ROOT, TINY, TUTORIAL

LOCAL_ALONE = {
    "example_countdown/cold_start.yaml": "only `local` trains on recorded conversations",
    "example_feedback_tracing/cold_start.yaml": "only `local` trains on recorded conversations",
    "example_learning_to_ask/cold_start.yaml": "only `local` trains on recorded conversations",
    "example_rubrics_judge/cold_start.yaml": "only `local` trains on recorded conversations",
    "example_werewolves/cold_start.yaml": "only `local` trains on recorded conversations",
    "example_chat_service/chat_service.yaml": "starts its episodes itself",
}
"""What the others say to those that only `local` can run."""
IN_README = {
    "cold_start.yaml": "`cold_start.yaml` runs on `local` alone",
    "chat_service.yaml": "on `local` alone",
}
NEEDS = {
    "example_coding_agent/codex.yaml": "the program 'codex' isn't in the sandbox",
    "example_appworld/appworld.yaml": "Connection refused",
}
"""What must be installed or started first, where it is not there."""
PORTS = ("WORLD_PORT", "RULE_REVIEWER_PORT", "RULE_GRADER_PORT", "RULE_JUDGE_PORT")
"""Where the services of the YAMLs answer: other tests run beside these."""
CONFS = sorted(
    str(file.relative_to(TUTORIAL))
    for file in TUTORIAL.glob("example_*/*.yaml")
    if "ajet" in (yaml.safe_load(file.read_text()) or {})
)


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What feedback_tracing's own script makes, which its users run first."""
    file = tmp_path_factory.mktemp("traces") / "studio.sqlite3"
    subprocess.run([sys.executable, str(TUTORIAL / "example_feedback_tracing/make_traces.py"), str(file)], check=True)
    return [
        f"task_reader.feedback_tracing.base_url={file}",
        f"trainer_common.algorithm.sft.demonstrations={file.with_name('conversations.jsonl')}",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("backbone", ["verl", "trinity"])
@pytest.mark.parametrize("conf", CONFS)
def test_it_is_valid(
    conf: str, backbone: str, traces: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    for name in PORTS:
        monkeypatch.setenv(name, str(free_port()))
    made = traces if "feedback_tracing" in conf else []
    code = main(["validate", f"tutorial/{conf}", f"--backbone={backbone}", TINY, *made])
    said = capsys.readouterr().err
    if conf in LOCAL_ALONE:
        assert code and LOCAL_ALONE[conf] in said
        assert IN_README[Path(conf).name] in (TUTORIAL / conf).with_name("README.md").read_text()
    elif conf in NEEDS and code:
        assert NEEDS[conf] in said
        pytest.skip(f"needs {NEEDS[conf]}")
    else:
        assert code == 0, said
