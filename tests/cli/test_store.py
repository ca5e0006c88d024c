"""`ajet store` as a user runs it."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from argparse import ArgumentTypeError
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ajet.cli.main import main
from ajet.cli.store import seconds
from ajet.store.client import StoreClient
from ajet.store.server import KEYS_S

AJET = [sys.executable, "-m", "ajet"]


@contextmanager
def serving(*arguments: str) -> Iterator[tuple[str, dict[str, str]]]:
    """A running `ajet store`: its address, and the keys that it printed."""
    with subprocess.Popen(
        [*AJET, "store", "--port", "0", *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as program:
        assert program.stdout is not None
        keys, said = {}, ""
        for line in program.stdout:
            said += line
            if found := re.match(r"  (\w+) +(sk-ajet-\S+)", line):
                keys[found[1]] = found[2]
            if found := re.search(r" at (http\S+) \(Ctrl-C", line):
                break
        else:
            raise AssertionError(said)
        try:
            yield found[1], keys
        finally:
            program.send_signal(signal.SIGTERM)
            assert program.wait(20) == 0


def test_serve_use_and_serve_again(tmp_path: Path) -> None:
    path = str(tmp_path / "store.sqlite")

    async def enqueue(url: str, key: str) -> None:
        async with StoreClient(url, key) as store:
            await store.enqueue_one({"q": 1})

    with serving("--path", path) as (url, keys):
        assert set(keys) == {"writer", "reader", "runner"}
        asyncio.run(enqueue(url, keys["writer"]))
        listed = subprocess.run([*AJET, "store", "keys", "list", "--path", path], capture_output=True, text=True)
        assert re.search(r"^writer +writer +no end$", listed.stdout, re.MULTILINE)
        rotate = ["store", "keys", "rotate", "writer", "--valid", "30d", "--path", path]
        rotated = subprocess.run([*AJET, *rotate], capture_output=True, text=True).stdout.strip()
        assert rotated.startswith("sk-ajet-")
    with serving("--path", path) as (url, again):
        assert again == {}, "keys are shown once"
        asyncio.run(enqueue(url, rotated))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["store", "keys", "list", "--path", "none.sqlite"], "no such file"),
        (["store", "--path", "no/such/folder/s.sqlite"], "there is no folder"),
        (["store", "--path", "x.sqlite", "--port", "99999"], "port"),
        (["store", "--path", "x.sqlite", "--keep", "soon"], "write 90s, 15m, 12h or 30d"),
        (["store", "--path", "x.sqlite", "--keep", "0s"], "--keep: more than nothing"),
        (
            ["store", "--path", "x.sqlite", "--keep-gb", "-1"],
            "--keep-gb: '-1': write a number of gigabytes above 0",
        ),
        (["store", "--path", "x.sqlite", "--keep-gb", "nan"], "--keep-gb: 'nan': write a number"),
        (["store", "--path", "x.sqlite", "--tls-cert", "none", "--tls-key", "none"], "no file none"),
    ],
)
def test_what_a_user_gets_wrong(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert says in capsys.readouterr().err


def test_keys_are_made_once_it_listens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["store", "--path", "x.sqlite", "--port", "99999"]) == 2
    assert "sk-ajet-" not in capsys.readouterr().out
    with serving("--path", "x.sqlite") as (_, keys):
        assert set(keys) == {"writer", "reader", "runner"}


def test_without_a_place_it_is_a_file_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with serving() as (url, _):
        make = [*AJET, "store", "keys", "make", "all", "--role", "writer", "--role", "runner"]
        key = subprocess.run(make, capture_output=True, text=True, check=True).stdout.strip()

        async def use() -> None:
            async with StoreClient(url, key) as store:
                await store.enqueue_one(1)
                assert len(await store.claim("w")) == 1

        time.sleep(KEYS_S + 0.5)  # the server reads new keys at intervals
        asyncio.run(use())
    assert (tmp_path / "store.sqlite").is_file()


def test_a_closed_pipe_ends_the_command(tmp_path: Path) -> None:
    command = f"{' '.join(AJET)} store --port 0 --path {tmp_path / 's'} | true"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, timeout=60)
    assert "Traceback" not in done.stderr
    assert done.returncode == 141


def test_lengths_of_time() -> None:
    assert (seconds("90s"), seconds("15m"), seconds("1.5h"), seconds("30d")) == (90, 900, 5400, 2592000)
    for wrong in ("-1s", "99999999d", f"{'9' * 400}s"):
        with pytest.raises(ArgumentTypeError):
            seconds(wrong)


def test_it_needs_no_torch() -> None:
    program = "import sys, ajet.cli.store, ajet.store.server, ajet.store.client; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=dict(os.environ))
    assert done.stdout.strip() == "False", done.stderr
