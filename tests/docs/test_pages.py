"""What the pages state is true: links lead somewhere, files and keys exist, YAML loads, command lines are accepted."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from ajet.backbone.launch import parse_arguments
from ajet.cli.main import COMMANDS
from ajet.config import Config, load_config
from ajet.config.keys import known_keys
from ajet.config.old_keys import is_old
from ajet.config.section import Block as FreeBlock
from ajet.task_runner.tuner import AjetTuner
from support.pages import PAGES, ROOT, Block, blocks

PAGE_NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
DOCS = ROOT / "docs"


def prose(page: Path) -> str:
    """The page without its code blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def is_key(path: tuple[str, ...]) -> bool:
    """Whether the schema has this key, or leaves it to the user or to another program."""
    known = known_keys()
    above = [known[path[:end]] for end in range(1, len(path)) if path[:end] in known]
    return (
        path in known
        or is_old(path[1:])
        or any(
            key.field.annotation is FreeBlock or (key.section and key.section.model_config.get("extra") == "allow")
            for key in above
        )
    )


# ------------------------------------------------------------ links, names, navigation


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    plain = (re.sub(r"[^\w\s-]", "", heading.lower()).strip() for heading in headings)
    return {re.sub(r"[\s-]+", "-", heading) for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=PAGE_NAMES)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        other = page.parent / name if name else page
        assert other.exists(), target
        assert not anchor or anchor in anchors(other), target


@pytest.mark.parametrize("page", PAGES, ids=PAGE_NAMES)
def test_named_files_exist(page: Path) -> None:
    named = re.findall(r"`((?:ajet|benchmarks|configs|docs|tests|tutorial)/[\w./-]+)`", prose(page))
    missing = [name for name in named if not (ROOT / name).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=PAGE_NAMES)
def test_named_objects_exist(page: Path) -> None:
    if page.name == "CHANGELOG.md":  # it also names what is gone
        return
    for name in re.findall(r"`(ajet(?:\.\w+)+)(?:->(?:\w+))?`", prose(page)):
        path = tuple(name.split("."))
        if is_key(path):
            continue
        module, _, last = name.rpartition(".")
        try:
            import_module(name)
        except ModuleNotFoundError:
            assert hasattr(import_module(module), last), name


@pytest.mark.parametrize("page", PAGES, ids=PAGE_NAMES)
def test_named_keys_exist(page: Path) -> None:
    """Keys are written with or without `ajet.`, as `section.key` or `section.key: value`."""
    sections = {path[1] for path in known_keys() if len(path) > 2} - {"user", "verl", "trinity", "helper"}
    for name in re.findall(r"`(?:ajet\.)?(\w+(?:\.\w+)+)(?:[:=][^`]*)?`", prose(page)):
        path = ("ajet", *name.split("."))
        place = ROOT.joinpath(*(path[:-1] if path[-1][0].isupper() else path))  # a class is in its module
        is_module = place.exists() or place.with_suffix(".py").exists()
        if path[1] in sections and path[-1] not in ("py", "json", "md") and not is_module:
            assert is_key(path), name


def test_the_glossary_names_what_the_code_defines() -> None:
    source = "\n".join(file.read_text(encoding="utf-8") for file in (ROOT / "ajet").rglob("*.py"))
    for row in re.findall(r"^\| \*\*.*\| (.*) \|$", (DOCS / "glossary.md").read_text(), re.MULTILINE):
        for name, attribute in re.findall(r"`([A-Z]\w+)(?:\.(\w+))?`", row):
            (defined,) = re.findall(rf"^class {name}\b.*?(?=^\S|\Z)", source, re.MULTILINE | re.DOTALL)[:1] or [""]
            assert defined and re.search(rf"^    (?:async )?(?:def )?{attribute}\b", defined, re.MULTILINE), name


def test_the_navigation_has_every_page() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    nav = set(re.findall(r"[\w/]+\.md", text))
    assert nav == {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}


def test_the_pages_of_users_stay_short() -> None:
    """Not those of contributors, of the configuration, which is generated, and in Chinese."""
    pages = [page for page in DOCS.rglob("*.md") if page.relative_to(DOCS).parts[0] not in ("dev", "config", "zh")]
    sizes = {str(page.relative_to(DOCS)): page.stat().st_size for page in pages}
    assert not {name: size for name, size in sizes.items() if size > 25_000}
    assert sum(sizes.values()) <= 300_000, "say it once, link to it elsewhere, and move internals to docs/dev/"


def test_the_pages_load_nothing_from_other_hosts() -> None:
    for page in DOCS.rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        assert not re.search(r"!\[[^\]]*\]\(https?:|<(script|img|iframe|link)\b|```mermaid", text), page


def test_the_commands_page_has_every_command() -> None:
    table = (DOCS / "commands.md").read_text().split("## Subcommands")[1].split("\n## ")[0]
    assert set(re.findall(r"`ajet ([a-z]+)", table)) == set(COMMANDS)


# ------------------------------------------------------------ data and commands


@pytest.mark.parametrize("block", blocks("yaml"), ids=lambda block: block.name)
def test_yaml_loads(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    value = yaml.safe_load(block.code)
    if not isinstance(value, dict) or "ajet" not in value:
        return
    monkeypatch.setenv("MY_KEY", "key")
    monkeypatch.setenv("HELPER_KEY", "key")
    monkeypatch.chdir(tmp_path)
    for named in re.findall(r"[\w./]+\.(?:jsonl|yaml|py)\b", block.code):
        (tmp_path / named).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / named).touch()
    for named in re.findall(r"(?:training|validation)_path: (\w+)", block.code):
        (tmp_path / named).mkdir()
    file = tmp_path / "page.yaml"
    file.write_text(yaml.safe_dump(value))
    load_config(file, complete=False)


@pytest.mark.parametrize("block", blocks("json"), ids=lambda block: block.name)
def test_json_loads(block: Block) -> None:
    json.loads(block.code)


class Parsed(Exception):
    """The command line was accepted."""


def accept(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `ajet` parse these words and do no more."""
    if words[0] not in COMMANDS:
        for override in parse_arguments(words).overrides:
            key = override.partition("=")[0]
            path = ("ajet", *key.removeprefix("ajet.").split("."))
            assert is_key(path), override
        return

    def parse(parser: argparse.ArgumentParser, argv: Any = None, namespace: Any = None) -> Any:
        _, rest = argparse.ArgumentParser.parse_known_args(parser, argv, namespace)
        if rest and not all("=" in word and not word.startswith("-") for word in rest):
            parser.error(f"unknown: {rest}")
        raise Parsed

    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parse)
        patch.setattr(argparse.ArgumentParser, "parse_intermixed_args", parse)
        if words[0] not in (
            "vllm",
            "validate",
            "config",
            "eval",
            "chat",
            "serve",
            "rubrics",
            "tasks",
            "rollout",
            "tune",
        ):  # these pass arguments on
            module, _, function = (COMMANDS[words[0]].function or f"{words[0]}.run").partition(".")
            with pytest.raises(Parsed):
                getattr(import_module(f"ajet.cli.{module}"), function)(words[1:])


def command_lines() -> list[Any]:
    lines = []
    for block in blocks("bash"):
        joined = block.code.replace("\\\n", " ")
        for line in joined.splitlines():
            words = shlex.split(line, comments=True)
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words = words[1:]
            if "&&" in words:
                words = words[words.index("&&") + 1 :]
            if words:
                lines.append(pytest.param(words, id=f"{block.name}-{' '.join(words[:3])}"))
    return lines


@pytest.mark.parametrize("words", command_lines())
def test_commands_are_accepted(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for word in words:
        if re.match(r"(benchmarks|configs|tests|tutorial)/", word):
            assert (ROOT / word.partition("->")[0]).exists(), word
    program = Path(words[0]).name
    if program == "ajet":
        accept(words[1:], monkeypatch)
    elif program == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif program.startswith("python") and words[1].endswith(".py"):
        assert (ROOT / words[1]).is_file()
    elif "install" in words:
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        for named in re.findall(r"(?:agentjet|\.)\[([\w,-]+)\]", " ".join(words)):
            assert set(named.split(",")) <= set(extras)


# ------------------------------------------------------------ Python


@pytest.mark.parametrize(
    "block", [block for block in blocks("python") if not block.title], ids=lambda block: block.name
)
def test_python_compiles_and_names_methods_that_exist(block: Block) -> None:
    body = "".join(f"    {line}\n" if line else "\n" for line in block.code.splitlines())
    compile(f"async def page():\n{body}", block.name, "exec")
    for method in re.findall(r"\btuner\.(\w+)", block.code):
        assert hasattr(AjetTuner, method), method


# ------------------------------------------------------------ Hyper-parameters


def hyper_parameters() -> list[list[str]]:
    """The rows of the page's tables that begin with a key, as their cells."""
    lines = (DOCS / "hyper_parameters.md").read_text().splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if re.match(r"\| `\w+\.", line)]


def test_the_defaults_of_hyper_parameters_are_those_of_the_config() -> None:
    for key, default, *_ in [row for row in hyper_parameters() if len(row) < 5]:
        found: Any = Config().ajet
        for name in key.strip("`").split("."):
            found = getattr(found, name)
        assert found == yaml.safe_load(default.split("`")[1]), key


def test_the_values_by_model_size_are_those_of_the_configs() -> None:
    page = (DOCS / "hyper_parameters.md").read_text()
    files = re.findall(r"`(configs/[\w.]+)`", page.partition("## By model size")[2].partition("parameters |")[0])
    for key, *values in [row for row in hyper_parameters() if len(row) == 5]:
        for file, value in zip(files, values, strict=True):
            found: Any = load_config(ROOT / file, complete=False).ajet
            for name in key.strip("`").split("."):
                found = getattr(found, name)
            assert found == yaml.safe_load(value.strip("`")), (file, key)
