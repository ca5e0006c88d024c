"""Where the viewer listens, what it refuses there, and how it ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from ajet.observe.viewer.serve import Viewer
from ajet.system.http_server import AddressError, listen
from support.pages_of_viewer import start


def test_an_outward_address_needs_a_password(tmp_path: Path) -> None:
    for password in (None, "short"):
        with pytest.raises(AddressError, match="needs a password"):
            Viewer(root=tmp_path, host="0.0.0.0", port=0, password=password)
    viewer = Viewer(root=tmp_path, host="0.0.0.0", port=0, password="long enough")
    assert "token" not in viewer.url
    viewer.socket.close()


def test_a_taken_port_is_an_error_unless_it_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with listen("127.0.0.1", 0, "--port") as taken:
        port = taken.getsockname()[1]
        with pytest.raises(AddressError, match="in use"):
            Viewer(root=tmp_path, port=port)
        monkeypatch.setattr("ajet.observe.viewer.serve.DEFAULT_PORT", port)
        viewer = Viewer(root=tmp_path)
        assert viewer.port != port
        viewer.socket.close()


def test_pages_are_compressed_and_large_requests_refused(tmp_path: Path) -> None:
    viewer = start(tmp_path)
    request = urllib.request.Request(viewer.url, headers={"accept-encoding": "gzip"})
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
    with opener.open(request) as answer:
        page = answer.read().decode()
        static = re.search(r"/static/\w+/", page)
        assert static is not None and answer.headers["cache-control"] == "no-store"
    request.full_url = f"http://127.0.0.1:{viewer.port}{static[0]}uplot.js"
    with opener.open(request) as answer:
        assert answer.headers["content-encoding"] == "gzip" and answer.read()[:2] == b"\x1f\x8b"
        assert "immutable" in answer.headers["cache-control"]
    with pytest.raises(urllib.error.HTTPError, match="413"):
        opener.open(f"http://127.0.0.1:{viewer.port}/login", data=b"x" * 100_000)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)])
def test_a_signal_ends_it(tmp_path: Path, number: signal.Signals, code: int) -> None:
    command = [sys.executable, "-m", "ajet", "view", str(tmp_path), "--port", "0", "--no-browser"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        url = process.stdout.readline().strip()
        assert urllib.request.build_opener(urllib.request.HTTPCookieProcessor()).open(url).status == 200
        process.send_signal(number)
        assert process.wait(timeout=30) == code
        assert "Traceback" not in process.stderr.read()
