"""The YAMLs that ship with ajet, spoilt at random as users spoil theirs. The same seed, the same files."""

from __future__ import annotations

import contextlib
import io
import os
import random
import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ajet.cli.main import main

ROOT = Path(__file__).parents[2]
NOT_RUNS = ("replies.yaml",)
"""Ends of the names of YAMLs that are no configs."""
NEEDS_MORE = (
    *("appworld.yaml", "small_world.yaml", "feedback_tracing.yaml", "codex.yaml", "countdown.yaml", "learn.yaml"),
    *("coding_agent/tiny/cold_start.yaml", "learning_to_ask.yaml", "werewolves.yaml"),
)
"""Configs that name what is not there yet: a service, a program, an earlier run's weights or tasks."""
LINE = re.compile(r"^(?P<lead>\s*(?:- )?)(?P<key>[\w-]+):(?P<gap> *)(?P<value>.*)$")
PLACE = re.compile(r"spoilt\.yaml:\d+|ajet(\.\w+)+")
VALUES = (
    *("", "null", "~", "true", "[]", "{}", "-1", "0", "0.5", "1e400", ".nan", "-.inf", "9" * 400, "nonsense", "'  '"),
    *("'\"'", '"a\\0b"', '"\\ud800"', '"\\u202e"', "x" * 300, "/etc", "/etc/shadow", "/dev/null", "../.."),
    *("[1, 2", "{a: 1}", "[[]]", "a: b: c", "@x", "&a", "*a", "!!python/name:os.system", "${nowhere}"),
    *("'nowhere.py->X'", "'os->nothing'", "'->'", "'json->JSONDecoder'", "http://127.0.0.1:1", "2026-01-01", "1_000"),
    *("tiny:nope", "${oc.env:NO_SUCH}", "0x10"),
)  # fmt: skip


class Spoilt(NamedTuple):
    """A shipped YAML with one edit."""

    of: str
    """The file, relative to the repository."""
    edit: str
    text: str


class Verdict(NamedTuple):
    """What `ajet validate` said of a spoilt file."""

    spoilt: Spoilt
    code: int | None
    """None: it raised."""
    said: str
    names_the_place: bool
    """Whether the message names file and line, or the key."""

    @property
    def good(self) -> bool:
        return self.code == 0 or (self.code == 2 and self.names_the_place and "Traceback" not in self.said)


def shipped() -> list[Path]:
    """The configs that `ajet validate` accepts as they are, on any machine."""
    found = sorted([*ROOT.glob("configs/*.yaml"), *ROOT.glob("tutorial/**/*.yaml")])
    return [file for file in found if not str(file).endswith((*NOT_RUNS, *NEEDS_MORE))]


def spoilt_configs(seed: int, count: int) -> Iterator[Spoilt]:
    """`count` spoilt files."""
    draw = random.Random(seed)
    files = [(str(file.relative_to(ROOT)), file.read_text(encoding="utf-8").split("\n")) for file in shipped()]
    for _ in range(count):
        name, lines = draw.choice(files)
        places = [number for number, line in enumerate(lines) if LINE.match(line)]
        number = draw.choice(places)
        edit, changed = _edited(draw, lines[number], lines[draw.choice(places)])
        yield Spoilt(name, f"line {number + 1}: {edit}", "\n".join([*lines[:number], *changed, *lines[number + 1 :]]))


def _edited(draw: random.Random, line: str, other: str) -> tuple[str, list[str]]:
    parts = LINE.match(line)
    assert parts is not None
    key = parts["key"]
    match draw.randrange(8):
        case 0:
            at = draw.randrange(len(key))
            renamed = key[:at] + draw.choice(("", "x", key[at] * 2)) + key[at + 1 :]
            return f"{key} → {renamed}", [f"{parts['lead']}{renamed}:{parts['gap']}{parts['value']}"]
        case 1:
            return "removed", []
        case 2:
            return "twice", [line, line]
        case 3:
            spaces = draw.choice((1, 2, 4))
            return f"{spaces} to the right", [" " * spaces + line]
        case 4:
            return "at the margin", [line.lstrip()]
        case 5:
            return f"replaced by {other.strip()}", [parts["lead"] + other.strip()]
        case _:
            value = draw.choice(VALUES)
            return f"{key}: {value[:40]}", [f"{parts['lead']}{key}: {value}"]


def judged(seed: int, count: int, scratch: Path) -> Iterator[Verdict]:
    """What `ajet validate`, in the repository's folder, says of each of `count` spoilt files."""
    beside: dict[Path, Path] = {}
    for spoilt in spoilt_configs(seed, count):
        folder = (ROOT / spoilt.of).parent
        if folder not in beside:
            beside[folder] = scratch / str(len(beside))
            beside[folder].mkdir()
            for entry in folder.iterdir():
                (beside[folder] / entry.name).symlink_to(entry)
        file = beside[folder] / "spoilt.yaml"
        file.write_text(spoilt.text, encoding="utf-8")
        out, error, code = io.StringIO(), io.StringIO(), None
        before = os.getcwd()
        os.chdir(ROOT)
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
                code = main(["validate", str(file)])
        except BaseException:  # noqa: BLE001 - whatever it is, it is what is looked for
            error.write(traceback.format_exc())
        finally:
            os.chdir(before)
        said = error.getvalue()
        yield Verdict(spoilt, code, said, bool(PLACE.search(said)))
