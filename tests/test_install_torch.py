"""`constraints/install_torch.py`: the build for CPUs where an index has it, and what pip's own index gives where not.

PyTorch itself is stood in for by a wheel of one module: what is tested is which build is chosen, and how fast.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import os
import socket
import subprocess
import sys
import threading
import venv
import zipfile
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "constraints/install_torch.py"
VERSION = SCRIPT.with_name("torch.txt").read_text().strip().partition("==")[2]


def wheel(folder: Path, version: str) -> None:
    """A wheel named torch with one module."""
    folder.mkdir(parents=True)
    info = f"torch-{version}.dist-info"
    files = {
        "torch.py": b"x = 1\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}\n"
        for name, data in files.items()
    )
    with zipfile.ZipFile(folder / f"torch-{version}-py3-none-any.whl", "w") as archive:
        for name, data in {**files, f"{info}/RECORD": record.encode()}.items():
            archive.writestr(name, data)


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def index(tmp_path: Path) -> Iterator[str]:
    """An index that has PyTorch's build for CPUs alone."""
    wheel(tmp_path / "index/torch", f"{VERSION}+cpu")
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(tmp_path / "index")))
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()


def install(tmp_path: Path, index: str, *, gpu: bool = False) -> tuple[str, str]:
    """Run the script in an environment of its own, whose pip finds the plain build. What it said, and what is there."""
    wheel(tmp_path / "plain", VERSION)
    venv.create(tmp_path / "venv", with_pip=True)
    tools = tmp_path / "tools"
    tools.mkdir()
    if gpu:
        (tools / "nvidia-smi").write_text("#!/bin/sh\n")
        (tools / "nvidia-smi").chmod(0o755)
    python = str(tmp_path / "venv/bin/python")
    plain = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path / "plain")}
    if index.startswith("http") and not gpu:
        plain.pop("PIP_NO_INDEX")
        plain["PIP_INDEX_URL"] = (tmp_path / "none").as_uri()
    done = subprocess.run(
        [python, str(SCRIPT), index],
        env={"PATH": f"{tools}:/usr/bin:/bin", "HOME": str(tmp_path), "NO_PROXY": "*", **plain},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    code = "from importlib.metadata import version; print(version('torch'))"
    there = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout, there.stdout.strip()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "darwin" or Path("/dev/nvidiactl").exists(), reason="it has no build to choose")
def test_a_machine_without_a_gpu_gets_the_build_for_cpus(tmp_path: Path, index: str) -> None:
    said, installed = install(tmp_path, index)
    assert installed == f"{VERSION}+cpu"
    assert f"PyTorch {VERSION}+cpu, 0.0 GB" in said


@pytest.mark.slow
def test_a_machine_with_a_gpu_asks_its_own_index(tmp_path: Path, index: str) -> None:
    assert install(tmp_path, index, gpu=True)[1] == VERSION


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "darwin" or Path("/dev/nvidiactl").exists(), reason="it asks no other index")
@pytest.mark.parametrize("kind", ["closed", "silent", "babbling", "empty", "not one"])
def test_without_such_an_index_pips_own_is_taken(tmp_path: Path, kind: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        if kind == "closed":
            listening.close()
        if kind == "babbling":
            threading.Thread(target=lambda: listening.accept()[0].sendall(b"no HTTP\r\n\r\n"), daemon=True).start()
        said, installed = install(tmp_path, {"empty": "", "not one": "nowhere"}.get(kind, f"http://127.0.0.1:{port}"))
    assert installed == VERSION
    assert ("taking what pip's own index gives" in said) == (kind != "empty")
