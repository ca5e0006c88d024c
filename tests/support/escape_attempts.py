"""A short version of `benchmarks/sandbox.py`: attempts to get out. As a program, prints those that succeeded."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
import tempfile
from pathlib import Path

from ajet.environment.sandboxes import SandboxSettings, open_sandbox

ROOT = Path(__file__).parents[2]
CANARY = "sk-canary-4711"
SYSCALLS = "import ctypes, os; libc = ctypes.CDLL(None, use_errno=True); "

SHELL = {
    "shadow": "[ -s /etc/shadow ] && echo ESCAPED",
    "secret": "cat {secret} && echo ESCAPED",
    "answers": f"cat {ROOT}/tutorial/example_math_agent/data/train.jsonl && echo ESCAPED",
    "environment": f"cat /proc/*/environ 2>/dev/null | grep -a [s]k-canary && echo ESCAPED; env | grep {CANARY[:9]}",
    "owner": "kill -9 {pid} && echo ESCAPED",
    "process 1": "kill -9 1; kill -9 -1; echo",
    "kernel setting": "echo 5 > /proc/sys/vm/swappiness && echo ESCAPED",
    "programs": "touch /usr/bin/x /etc/x /dev/x && echo ESCAPED",
    "victim": "echo x > {victim}; ln -s {secret} link",
    "device": "head -c 1 /dev/vda /dev/sda /dev/mem 2>/dev/null && echo ESCAPED",
    "cgroup": "mkdir /sys/fs/cgroup/x 2>/dev/null && echo ESCAPED",
}
PYTHON = {
    "network": "import socket; socket.create_connection(('127.0.0.1', {port}), 2); print('ESCAPED')",
    "abstract socket": "import socket; s = socket.socket(socket.AF_UNIX); s.connect('\\0{abstract}'); print('ESCAPED')",
    "vsock": "import socket; socket.socket(40, socket.SOCK_STREAM); print('ESCAPED')",
    "trace": SYSCALLS + "print('ESCAPED' if libc.ptrace(16, 1, 0, 0) == 0 else '')",
    "namespace": SYSCALLS + "print('ESCAPED' if libc.unshare(0x10000000) == 0 else '')",
    "look into process 1": "open('/proc/1/mem', 'rb'); print('ESCAPED')",
    "root": "import os; os.setuid(0); print('ESCAPED' if os.getuid() == 0 else '')",
}


async def succeeded(folder: Path) -> list[str]:
    """The attempts that got out of a bubblewrap sandbox of this process."""
    os.environ["MY_API_KEY"] = CANARY
    secret, victim = folder / "secret", folder / "victim"
    secret.write_text(CANARY)
    victim.write_text("untouched")
    abstract = f"ajet-test-{os.getpid()}"
    found: list[str] = []
    server = await asyncio.start_server(lambda *_: found.append("the network"), "127.0.0.1", 0)
    hidden = socket.socket(socket.AF_UNIX)
    hidden.bind(f"\0{abstract}")
    hidden.listen()
    facts = {
        "secret": secret,
        "victim": victim,
        "pid": os.getpid(),
        "port": server.sockets[0].getsockname()[1],
        "abstract": abstract,
    }
    async with open_sandbox(SandboxSettings(memory_mb=128, disk_mb=8, processes=24)) as sandbox:
        for name, code in {**SHELL, **PYTHON}.items():
            for fact, value in facts.items():
                code = code.replace("{" + fact + "}", str(value))
            result = await sandbox.exec(["python3", "-c", code] if name in PYTHON else code)
            if name in PYTHON and b"not found" in result.stderr:
                found.append(f"{name}: not tried, there is no Python inside")
            if b"ESCAPED" in result.stdout or CANARY.encode() in result.stdout + result.stderr:
                found.append(name)
            with contextlib.suppress(OSError):
                if CANARY.encode() in await sandbox.read("link"):
                    found.append(f"{name}: the owner followed a link out")
        if (await sandbox.exec("echo alive")).stdout != b"alive\n":
            found.append("the sandbox no longer answers")
    server.close()
    hidden.close()
    if victim.read_text() != "untouched":
        found.append("a file of the owner was changed")
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        json.dump(asyncio.run(succeeded(Path(place))), sys.stdout)
