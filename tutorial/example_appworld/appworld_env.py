"""The real AppWorld as an environment: each episode drives a process of AppWorld's own Python, confined by bubblewrap.

    ajet env serve 'tutorial/example_appworld/appworld_env.py->AppWorldEnv' --port 8080 --workers 64

`APPWORLD_PYTHON` is the interpreter that has the package (it needs pydantic 1, so it can't be ajet's), `APPWORLD_ROOT`
the folder with its data. The agent's code runs inside AppWorld's process, which has no network, sees only AppWorld's
files, and writes to memory.
"""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ajet import Task
from ajet.environment import Environment, StepResult
from ajet.environment.environment import action_text
from ajet.schema.errors import EnvironmentFault

WORKER = Path(__file__).with_name("appworld_worker.py")
BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
SYSTEM = """You do everyday tasks for a supervisor by using apps. Write Python in a block:
```python
print(apis.api_docs.show_app_descriptions())
```
You are shown its output, and may go on with another block; names stay. \
`apis.api_docs.show_api_descriptions(app_name=…)` and \
`apis.api_docs.show_api_doc(app_name=…, api_name=…)` tell how an app is used; passwords are in \
`apis.supervisor.show_account_passwords()`. When the task is done, call `apis.supervisor.complete_task()`, or \
`apis.supervisor.complete_task(answer=…)` if you were asked for something."""


class AppWorldEnv(Environment):
    """One task."""

    def __init__(self, timeout: float = 300.0) -> None:
        """`timeout`: seconds for one request to AppWorld."""
        self._timeout = timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._rest = b""

    @staticmethod
    def task_ids(split: str) -> Iterable[str]:
        """AppWorld's splits: train, dev, test_normal, test_challenge."""
        python, root = places()
        done = subprocess.run(
            [python, "-I", str(WORKER), "--task-ids", split],
            env=environment(root),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise EnvironmentFault(f"AppWorld can't list {split!r}: {last_line(done.stderr)}")
        found: list[str] = json.loads(done.stdout)
        return found

    def reset(self, task: Task) -> list[dict[str, str]]:
        python, root = places()
        self._process = subprocess.Popen(
            confined(python, root),
            env=environment(root),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        opened = self._ask({"do": "open", "task_id": task.task_id})
        about = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in opened["supervisor"].items())
        return [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"Your supervisor: {about}.\nThe task: {opened['instruction']}"},
        ]

    def step(self, action: Any) -> StepResult:
        block = BLOCK.search(action_text(action))
        if block is None:
            return StepResult("Output:\n```\nWrite a Python block: ```python … ```\n```")
        result = self._ask({"do": "execute", "code": block[1]})
        return StepResult(f"Output:\n```\n{result['output']}\n```", done=result["completed"])

    def evaluate(self) -> float:
        """The share of the task's tests that pass."""
        result = self._ask({"do": "evaluate"})
        return float(result["passed"] / max(result["passed"] + result["failed"], 1))

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for stream in (self._process.stdin, self._process.stdout):
                if stream is not None:
                    stream.close()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        process = self._process
        assert process is not None and process.stdin is not None
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            reply = json.loads(self._line(process))
        except (OSError, ValueError) as error:
            raise EnvironmentFault(f"AppWorld's process ended or wrote nonsense ({error})") from None
        if "error" in reply:
            raise EnvironmentFault(f"AppWorld: {reply['error']}")
        answer: dict[str, Any] = reply["ok"]
        return answer

    def _line(self, process: subprocess.Popen[bytes]) -> bytes:
        assert process.stdout is not None
        ends = time.monotonic() + self._timeout
        while b"\n" not in self._rest:
            ready, _, _ = select.select([process.stdout], [], [], max(0.0, ends - time.monotonic()))
            if not ready:
                raise EnvironmentFault(f"AppWorld did not answer within {self._timeout:g} s")
            piece = os.read(process.stdout.fileno(), 65536)
            if not piece:
                raise OSError("it closed its output")
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        return line


def places() -> tuple[str, str]:
    """AppWorld's interpreter and its data. Raises EnvironmentFault that says what to set."""
    python, root = os.environ.get("APPWORLD_PYTHON", ""), os.environ.get("APPWORLD_ROOT", "")
    if not shutil.which(python):
        raise EnvironmentFault("APPWORLD_PYTHON must name the Python that has the package appworld, with its path")
    if not Path(root).is_dir():
        raise EnvironmentFault("APPWORLD_ROOT must name the folder in which `appworld download data` was run")
    return python, str(Path(root).resolve())


def environment(root: str) -> dict[str, str]:
    """No keys of ours are among AppWorld's variables."""
    return {
        "APPWORLD_ROOT": root,
        "HOME": "/tmp",
        "PATH": "/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "IPYTHONDIR": "/tmp/ipython",
    }


def confined(python: str, root: str) -> list[str]:
    """The worker's command line. Raises EnvironmentFault where bubblewrap is missing."""
    if shutil.which("bwrap") is None:
        raise EnvironmentFault(
            "AppWorld runs the agent's code, which is confined by bubblewrap: apt install bubblewrap"
        )
    asked = [python, "-c", "import sys; print(sys.prefix); print(sys.base_prefix)"]
    prefixes = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()
    shown = {path for path in (*prefixes, root, str(WORKER)) if not path.startswith("/usr/")}
    system = [
        part
        for name in ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime")
        for part in _shown(name)
    ]
    return [
        "bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL",
        *system, "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp",
        *(part for path in sorted(shown) for part in ("--ro-bind", path, path)),
        "--tmpfs", f"{root}/experiments", "--chdir", "/tmp",
        python, "-I", "-B", str(WORKER),
    ]  # fmt: skip


def _shown(path: str) -> list[str]:
    if os.path.islink(path):
        return ["--symlink", os.readlink(path), path]
    return ["--ro-bind-try", path, path]


def last_line(text: str) -> str:
    """What a traceback ends with."""
    return (text.strip().splitlines() or ["it said nothing"])[-1]


if __name__ == "__main__":
    sys.exit("serve it: ajet env serve 'tutorial/example_appworld/appworld_env.py->AppWorldEnv' --port 8080")
