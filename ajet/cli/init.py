"""`ajet init NAME`: create a project folder (workflow, YAML, data, README, test) that runs as it is.

With `--example quickstart` it is the job of `make demo`: its workflow, tasks, model and YAML, to run and to change.
`ajet init --skill` writes a skill instead: a folder that teaches a coding agent to train an agent with these commands.
"""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from ajet.schema.errors import UserError
from ajet.system.command_line import CommandParser

TEMPLATE = Path(__file__).parent / "project_template"
AGENT_TEMPLATE = Path(__file__).parent / "agent_template"
SKILL = Path(__file__).parent / "skill"
SKILL_PLACE = ".claude/skills/agentjet"
"""Where Claude Code looks for it in a project; Codex looks in `.agents/skills`."""
AGENTS = ("react", "tool")
EXAMPLES = ("quickstart",)
QUICKSTART = "tutorial/example_math_agent/quickstart"
"""Where a clone has it."""
PACKED = Path(__file__).parent / "examples" / "quickstart"
"""Where a wheel has it."""
TRAINING_TASKS, VALIDATION_TASKS = 64, 16


def run(argv: Sequence[str]) -> int:
    """Create the folder and print the next steps."""
    parser = CommandParser("ajet init", description=__doc__)
    parser.add_argument("name", metavar="NAME", nargs="?", help="the new folder; its last part is the project's name")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--agent", choices=AGENTS, help="a ready agent instead of a workflow of your own")
    kind.add_argument("--example", choices=EXAMPLES, help="a whole job, model included")
    kind.add_argument(
        "--skill", metavar="DIR", nargs="?", const=SKILL_PLACE, help=f"a skill for coding agents ({SKILL_PLACE})"
    )
    arguments = parser.parse_args(argv)
    if arguments.skill is not None:
        if arguments.name:
            parser.error("--skill takes one folder, and nothing else: ajet init --skill [DIR]")
        return write_skill(Path(arguments.skill))
    if arguments.name is None:
        parser.error("NAME is missing: ajet init my-agent")
    folder, agent = Path(arguments.name), arguments.agent
    project = folder.name
    if not re.fullmatch(r"[A-Za-z][\w-]*", project):
        raise UserError(f"{project!r} can't be a project's name\n    use a letter, then letters, digits, - and _")
    _refuse_if_used(folder)
    if arguments.example is not None:
        copy_quickstart(folder)
        print(
            f"\nNext:\n"
            f"  cd {folder}\n"
            f"  ajet --conf quickstart.yaml    # train: some minutes on two cores\n"
            f"  ajet view quickstart           # every episode, in the browser\n"
            f"Then change workflow.py, data/ or quickstart.yaml, and run it again with --fresh."
        )
        return 0
    written = make_project(folder, project, agent)
    for file in written:
        print(f"  {folder / file}")
    print(
        f"\nNext:\n"
        f"  cd {folder}\n"
        f"  ajet --conf {project}.yaml --backbone=debug    # run two tasks and show the episodes\n"
        f"  ajet --conf {project}.yaml                     # train\n"
        f"Then {'set up the agent in ' + project + '.yaml' if agent else 'put your agent in workflow.py'} and "
        f"{'put ' if agent else ''}your tasks in data/."
    )
    return 0


def _refuse_if_used(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} already exists\n    choose another name, or an empty folder")


def write_skill(folder: Path) -> int:
    """Write the skill, and say how a coding agent finds it."""
    _refuse_if_used(folder)
    shutil.copytree(SKILL, folder, dirs_exist_ok=True)
    for file in sorted(folder.rglob("*.md")):
        print(f"  {file}")
    print(
        "\nClaude Code reads .claude/skills/agentjet, Codex .agents/skills/agentjet. Then ask for what you want:\n"
        '  claude "Train my agent in agent.py with AgentJet"'
    )
    return 0


def make_project(folder: Path, project: str, agent: str | None = None) -> list[Path]:
    """Write the files. Returns their paths within the folder. `agent`: a ready agent instead of a workflow."""
    written = []
    template = TEMPLATE if agent is None else AGENT_TEMPLATE
    for source in sorted(template.rglob("*")):
        if not source.is_file() or source.suffix not in (".py", ".md", ".yaml"):
            continue
        name = source.relative_to(template)
        target = name.with_name(name.name.replace("project.yaml", f"{project}.yaml"))
        (folder / target).parent.mkdir(parents=True, exist_ok=True)
        text = source.read_text(encoding="utf-8").replace("PROJECT", project).replace("type: react", f"type: {agent}")
        (folder / target).write_text(text, encoding="utf-8")
        written.append(target)
    for split, count in (("train", TRAINING_TASKS), ("validation", VALIDATION_TASKS)):
        target = Path("data") / f"{split}.jsonl"
        (folder / target).parent.mkdir(exist_ok=True)
        lines = [json.dumps(sum_task(split, index)) for index in range(count)]
        (folder / target).write_text("\n".join(lines) + "\n", encoding="utf-8")
        written.append(target)
    return written


def copy_quickstart(folder: Path) -> None:
    """Write the demo's job, with paths within the folder."""
    clone = Path(__file__).parents[2]
    parts = PACKED if PACKED.is_dir() else clone / QUICKSTART
    config = PACKED / "quickstart.yaml" if PACKED.is_dir() else clone / "configs/quickstart.yaml"
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("cold_start", "data"):
        shutil.copytree(parts / name, folder / name)
    shutil.copyfile(parts / "workflow.py", folder / "workflow.py")
    text = config.read_text(encoding="utf-8").replace(f"{QUICKSTART}/cold_start", "./cold_start")
    text = text.replace(f"{QUICKSTART}/", "").replace("configs/quickstart.yaml", "quickstart.yaml")
    (folder / "quickstart.yaml").write_text(text, encoding="utf-8")
    for file in ("quickstart.yaml", "workflow.py", "data/", "cold_start/"):
        print(f"  {folder / file}")


def sum_task(split: str, index: int) -> dict[str, str]:
    """A small sum, the same in every new project."""
    draw = random.Random(f"{split}:{index}")
    left, right = draw.randint(0, 49), draw.randint(0, 49)
    return {"id": f"{split}-{index}", "question": f"What is {left} + {right}?", "answer": str(left + right)}
