"""The lock: it holds what `pyproject.toml` asks for, with hashes, and `make audit` reads it."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distribution, distributions
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from support.http_server import Server

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCK = (ROOT / "constraints/lock.txt").read_text()
ENTRIES = re.findall(r"^([^\s=]+)==([^\s;]+)[^\n]*\n((?:    --hash=sha256:[0-9a-f]{64}[^\n]*\n?)+)", LOCK, re.MULTILINE)
AUDIT = [sys.executable, str(ROOT / "constraints/audit.py"), "--url"]


def asked_for(extra: str = "dev") -> list[Requirement]:
    """What `pip install -e '.[dev]'` asks for here."""
    waiting, found = [*PROJECT["dependencies"], f"agentjet[{extra}]"], []
    while waiting:
        requirement = Requirement(waiting.pop())
        if requirement.name == PROJECT["name"]:
            waiting += [line for extra in requirement.extras for line in PROJECT["optional-dependencies"][extra]]
        elif requirement.marker is None or requirement.marker.evaluate():
            found.append(requirement)
    return found


def test_the_lock_holds_what_the_project_asks_for() -> None:
    torch = (ROOT / "constraints/torch.txt").read_text().strip().partition("==")[2]
    pinned = {canonicalize_name(name): version for name, version, _ in ENTRIES} | {"torch": torch}
    for requirement in asked_for():
        name = canonicalize_name(requirement.name)
        assert name in pinned and requirement.specifier.contains(pinned[name], prereleases=True), (
            f"{requirement}, but the lock has {pinned.get(name)}: run `make lock`"
        )


def test_everything_in_the_lock_has_hashes_and_no_address() -> None:
    assert len(ENTRIES) == len(re.findall("^[^ #\n]", LOCK, re.MULTILINE)) > 150
    assert "://" not in LOCK and not re.search("^torch==", LOCK, re.MULTILINE)


def brought(extra: str) -> set[str]:
    """The packages that are there after `pip install '.[extra]'`, by what each asks for in turn."""
    waiting, found, seen = asked_for(extra), set[str](), set[str]()
    while waiting:
        requirement = waiting.pop()
        if str(requirement) in seen:
            continue
        seen.add(str(requirement))
        try:
            package = distribution(requirement.name)
        except PackageNotFoundError:  # of another build: torch for CUDA asks for more
            continue
        found.add(requirement.name)
        for each in map(Requirement, package.requires or ()):
            wanted = [{"extra": name} for name in ("", *requirement.extras)]
            if each.marker is None or any(map(each.marker.evaluate, wanted)):
                waiting.append(each)
    return found


@pytest.mark.slow
def test_what_the_train_extra_installs_is_enough_to_train(tmp_path: Path) -> None:
    """transformers needs packages that it doesn't ask for, and the environment of the tests has those of all extras."""
    packages, project = tmp_path / "packages", tmp_path / "mine"
    packages.mkdir()
    for name in brought("train"):
        package = distribution(name)
        for top in {file.parts[0] for file in package.files or ()} - {"..", "bin", "__pycache__"}:
            if not (packages / top).exists():
                (packages / top).symlink_to(Path(str(package.locate_file(top))))
    (packages / "ajet").symlink_to(ROOT / "ajet")

    def ajet(*arguments: str, folder: Path = tmp_path) -> None:
        code = f"import sys; sys.path.insert(0, {str(packages)!r}); from ajet.cli.main import main; sys.exit(main())"
        command = [sys.executable, "-I", "-S", "-c", code, *arguments]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    ajet("init", "mine")
    ajet("--conf", "mine.yaml", "trainer_common.total_training_steps=1", folder=project)
    ajet("export", "weights", "mine", "model", folder=project)


def audit(url: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*AUDIT, url], capture_output=True, text=True, check=False)


def test_an_audit_names_what_is_affected_and_what_fixes_it() -> None:
    """The server's answers have the shape of OSV's."""
    affected = {"httpx": "0.28.9"}

    def handle(_path: str, body: dict[str, Any], _key: str) -> Any:
        names = [query["package"]["name"] for query in body["queries"]]
        assert "torch" in names and all(query["version"] for query in body["queries"])
        assert {canonicalize_name(package.name) for package in distributions()} - {"agentjet"} <= set(names)
        return 200, {}, {"results": [{"vulns": [{"id": "X-1"}]} if name in affected else {} for name in names]}

    def advisory(_path: str) -> Any:
        events = [{"introduced": "0"}, {"fixed": affected["httpx"]}, {"introduced": "1"}, {"fixed": "2026-09-12"}]
        ranges = [{"type": "GIT", "events": [{"fixed": "abcdef"}]}, {"type": "ECOSYSTEM", "events": events}]
        elsewhere = {
            "package": {"name": "httpx", "ecosystem": "npm"},
            "ranges": [{**ranges[1], "events": [{"fixed": "9"}]}],
        }
        here = {"package": {"name": "HTTPX", "ecosystem": "PyPI"}, "ranges": ranges}
        return {"id": "X-1", "summary": "Reads too much.", "affected": [{"ranges": ranges[:1]}, elsewhere, here]}

    server = Server(handle, get=advisory)
    try:
        done = audit(server.url.removesuffix("/v1"))
        assert done.returncode == 1, done.stderr
        assert re.search(
            r"^httpx [0-9.]+: X-1, fixed in 0\.28\.9, 2026-09-12: Reads too much\.$", done.stdout, re.MULTILINE
        )
        affected.clear()
        done = audit(server.url.removesuffix("/v1"))
        assert done.returncode == 0 and "no advisories" in done.stdout
    finally:
        server.http.shutdown()


@pytest.mark.parametrize("answer", [None, (404, {}, {}), (200, {}, {"results": []}), (200, {}, 3)])
def test_an_audit_that_reads_no_advisories_says_that_nothing_was_checked(answer: Any) -> None:
    server = Server(lambda *_: answer)
    url = server.url.removesuffix("/v1") if answer else "http://127.0.0.1:9"
    try:
        done = audit(url)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert done.stderr.startswith(f"error: the advisories at {url} can't be read (")
        assert "nothing was checked" in done.stderr
    finally:
        server.http.shutdown()


def test_an_audit_reads_every_page() -> None:
    def handle(_path: str, body: dict[str, Any], _key: str) -> Any:
        def result(query: dict[str, Any]) -> dict[str, Any]:
            if query["package"]["name"] != "httpx":
                return {}
            if "page_token" not in query:
                return {"vulns": [{"id": "X-1"}], "next_page_token": "more"}
            return {"vulns": [{"id": "X-2"}]}

        return 200, {}, {"results": [result(query) for query in body["queries"]]}

    server = Server(handle, get=lambda path: {"id": path.rpartition("/")[2], "affected": []})
    try:
        done = audit(server.url.removesuffix("/v1"))
        assert re.findall("^httpx .*(X-.), fixed in no version yet", done.stdout, re.MULTILINE) == ["X-1", "X-2"]
    finally:
        server.http.shutdown()
