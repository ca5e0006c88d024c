"""What a public repository has beside its code: every command in it is one that exists."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from ajet.schema import __version__

ROOT = Path(__file__).parents[2]
TARGETS = set(re.findall(r"^([a-z0-9-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def load(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text())


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_each_command_of_a_workflow_is_a_target_or_installs_a_package(workflow: Path) -> None:
    commands = [
        step["run"]
        for job in yaml.safe_load(workflow.read_text())["jobs"].values()
        for step in job["steps"]
        if "run" in step
    ]
    assert commands
    for command in commands:
        assert command.startswith("sudo apt-get ") or command.removeprefix("make ") in TARGETS, command


def test_hooks_and_pages_name_targets_that_exist() -> None:
    hooks = [hook["entry"] for repo in load(".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]]
    assert hooks and all(hook.removeprefix("make ") in TARGETS for hook in hooks)
    for page in (
        "AGENTS.md",
        "CONTRIBUTING.md",
        "README.md",
        ".github/PULL_REQUEST_TEMPLATE.md",
        "docker/cpu.Dockerfile",
    ):
        for line in re.findall(r"^\s*make [^#\n]*|`make [^`]*`|RUN make \S+", (ROOT / page).read_text(), re.MULTILINE):
            words = [word for word in shlex.split(line.strip("` \n").partition("make ")[2]) if "=" not in word]
            assert set(words) <= TARGETS, (page, line)


def test_the_rooms_of_agents_md_are_those_of_the_package_in_their_order() -> None:
    from test_layering import ROOMS

    listed = re.findall(
        r"`([a-z_]+)`[,.]", (ROOT / "AGENTS.md").read_text().partition("## Rooms")[2].partition("`docs/")[0]
    )
    assert listed == list(ROOMS)


def test_files_and_folders_that_agents_md_names_exist() -> None:
    named = re.findall(r"`((?:docs|tests|ajet)/[\w./]+|\w+\.md)`", (ROOT / "AGENTS.md").read_text())
    assert named and all((ROOT / name).exists() for name in named)


def test_the_services_of_compose_run_commands_that_exist() -> None:
    from ajet.cli.main import COMMANDS

    services = load("docker/compose.yaml")["services"]
    assert all(service["command"][0] in COMMANDS for service in services.values())
    assert all(port.startswith("127.0.0.1:") for service in services.values() for port in service["ports"])


def test_the_citation_names_this_version() -> None:
    citation = load("CITATION.cff")
    assert (citation["version"], citation["license"]) == (__version__, "Apache-2.0")
