"""Does anything get out of a sandbox, or stay behind? 60 escape attempts, then 1,000 sandboxes started and destroyed.

Every kind and mode that this machine can make is attacked: bubblewrap with and without cgroups, and without privileges;
Docker and Podman with an image made from this machine's own busybox and Python. The attempts know where the secrets
are: a file, the owner's environment, its process id, a port and Unix sockets, another episode's sandbox.

    python benchmarks/sandbox.py [--kinds bubblewrap docker podman] [--sandboxes 1000]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from _escapes import ATTEMPTS, Attempt
from common import ROOT, known_figures, write_result

from ajet.environment.sandboxes import Sandbox, SandboxError, SandboxSettings, check_sandbox, open_sandbox
from ajet.environment.sandboxes.bubblewrap_arguments import FIRST
from ajet.environment.sandboxes.cgroups import Cgroup, _parents

IMAGE = "ajet-benchmark:local"
LIMITS = {"memory_mb": 256, "disk_mb": 32, "processes": 64, "exec_seconds": 20.0}
NOT_ROOT = "bubblewrap, not root"
CANARY = "sk-canary-8841"
START_BAR_MS = 50.0


# ------------------------------------------------------------ kinds


@contextmanager
def mode(name: str) -> Iterator[dict[str, Any]]:
    """The settings of a kind, with this process prepared for it."""
    kind, _, how = name.partition(", ")
    create = Cgroup.create
    if how == "no cgroup":
        Cgroup.create = lambda **_: None  # type: ignore[method-assign, assignment]
    options: dict[str, Any] = {}
    if kind != "bubblewrap":
        options = {"image": image_of(kind), "options": {"runtime": "runc"} if kind == "podman" else {}}
    try:
        yield {"kind": kind, **LIMITS, **options}
    finally:
        Cgroup.create = create  # type: ignore[method-assign]


def as_another_user(sandboxes: int) -> dict[str, Any]:
    """The same attempts and starts with bubblewrap, by a user without any privilege."""
    line = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all"]
    line += ["/bin/sh", "-c", 'exec "$@"', "sh"]  # the first program that setpriv starts is still found by root
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
    for python in (os.path.realpath(sys.executable), "/usr/bin/python3"):
        tried = [*line, python, "-c", "import ajet.environment.sandboxes"]
        if subprocess.run(tried, env=environment, capture_output=True, check=False, cwd="/").returncode:
            continue  # that user may not read it
        run = [*line, python, os.path.abspath(__file__), "--one", "bubblewrap", "--sandboxes", str(sandboxes)]
        done = subprocess.run(run, env=environment, stdout=subprocess.PIPE, check=True, cwd="/")
        return dict(json.loads(done.stdout))
    raise SandboxError("no Python that another user may run, with ajet's packages")


def image_of(kind: str) -> str:
    """Make an image of this machine's busybox and Python, once."""
    name = IMAGE if kind == "docker" else f"localhost/{IMAGE}"
    if subprocess.run([kind, "image", "inspect", name], capture_output=True, check=False).returncode == 0:
        return name
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        root.chmod(0o755)  # it becomes the image's /
        (root / "bin").mkdir()
        for applet in subprocess.run(["busybox", "--list"], capture_output=True, text=True, check=True).stdout.split():
            os.symlink("busybox", root / "bin" / applet)
        (root / "bin" / "busybox").unlink(missing_ok=True)
        shutil.copy(shutil.which("busybox") or "/bin/busybox", root / "bin" / "busybox")
        python = Path("/usr/bin/python3").resolve()
        library = Path(f"/usr/lib/{python.name}")
        needed = {python}
        for binary in [python, *library.glob("lib-dynload/*.so")]:
            listed = subprocess.run(["ldd", str(binary)], capture_output=True, text=True, check=False).stdout
            needed |= {Path(word) for word in listed.split() if word.startswith("/")}
        for file in needed:
            target = root / str(file.resolve() if file == python else file).lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file.resolve(), target)
        shutil.copytree(
            library,
            root / str(library).lstrip("/"),
            symlinks=False,
            ignore_dangling_symlinks=True,
            ignore=shutil.ignore_patterns("__pycache__", "test", "sitecustomize.py"),
        )
        os.symlink(python.name, root / "usr/bin/python3")
        packed = subprocess.Popen(["tar", "-C", folder, "-cf", "-", "."], stdout=subprocess.PIPE)
        subprocess.run([kind, "import", "-", name], stdin=packed.stdout, check=True, capture_output=True)
        packed.wait()
    return name


# ------------------------------------------------------------ escapes


async def attack(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Every attempt in a sandbox of its own, with another episode's beside it."""
    secret, victim, unix = folder / "secret", folder / "victim", folder / "socket"
    secret.write_text(CANARY)
    victim.write_text("untouched")
    os.environ["MY_API_KEY"] = CANARY
    reached: list[str] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reached.append("a connection from inside")
        writer.close()

    listener = await asyncio.start_server(accept, "0.0.0.0", 0)
    port = listener.sockets[0].getsockname()[1]
    abstract = f"ajet-{os.getpid()}"
    hidden = socket.socket(socket.AF_UNIX)
    hidden.bind(f"\0{abstract}")
    hidden.listen()
    named = await asyncio.start_unix_server(accept, str(unix))
    facts = {
        "port": port,
        "address": _address(),
        "abstract": abstract,
        "unix": unix,
        "secret": secret,
        "victim": victim,
        "answers": ROOT / "tutorial/example_math_agent/data/train.jsonl",
        "project": ROOT,
        "canary": CANARY,
        "mark": "[b]enchmarks/sandbox.py",
        "pid": os.getpid(),
        "other": "/workspace",
        "othermark": "other-episode-sleep",
    }
    succeeded: list[str] = []
    async with open_sandbox(SandboxSettings(**settings)) as other:
        await other.write("other-secret", CANARY.encode())
        await other.exec("exec -a other-episode-sleep sleep 3000 >/dev/null 2>&1 & true")
        for attempt in ATTEMPTS:
            async with open_sandbox(SandboxSettings(**settings)) as sandbox:
                failed = await _failed(attempt, sandbox, facts)
            if failed or reached or victim.read_text() != "untouched":
                succeeded.append(f"{attempt.area}: {attempt.name}{': ' + failed if failed else ''}")
                reached.clear()
        if (await other.read("other-secret")).decode() != CANARY:
            succeeded.append("others: another episode's files were changed")
    listener.close()
    named.close()
    hidden.close()
    return {"attempts": len(ATTEMPTS), "succeeded": succeeded}


async def _failed(attempt: Attempt, sandbox: Sandbox, facts: dict[str, Any]) -> str:
    """What shows that the attempt got through; empty if nothing does."""
    code = attempt.code
    for name, value in facts.items():
        code = code.replace("{" + name + "}", str(value))
    code = code.replace("{{", "{").replace("}}", "}").replace("\\\\0", "\\0")
    before = len(list(Path("/proc").glob("[0-9]*")))
    command = ["python3", "-c", code] if attempt.python else code
    watching = asyncio.create_task(_most_processes())
    result = await sandbox.exec(command, timeout=15)
    watching.cancel()
    most = max(await asyncio.gather(watching, return_exceptions=True), key=lambda n: n if isinstance(n, int) else 0)
    if b"ESCAPED" in result.stdout:
        return "it said so"
    if b"not found" in result.stderr and attempt.python:
        return "there is no Python inside: nothing was tried"
    if CANARY.encode() in result.stdout + result.stderr:
        return "a secret was printed"
    if result.stdout.count(b"HELD") * 100 > LIMITS["memory_mb"] + LIMITS["disk_mb"]:
        return "too much memory was held"
    if isinstance(most, int) and most - before > LIMITS["processes"] + 40:
        return f"{most - before} processes ran"
    if attempt.area == "links":
        try:
            if CANARY.encode() in await sandbox.read("link"):
                return "the owner read the secret for it"
        except OSError:
            pass
    if attempt.area == "bombs":
        await sandbox.end_processes()
    if (await sandbox.exec("echo alive")).stdout != b"alive\n":
        return "the sandbox itself no longer answers"
    return ""


async def _most_processes() -> int:
    most = 0
    try:
        while True:
            most = max(most, len(list(Path("/proc").glob("[0-9]*"))))
            await asyncio.sleep(0.2)
    except asyncio.CancelledError:
        return most


def _address() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


# ------------------------------------------------------------ starts


async def churn(settings: dict[str, Any], count: int) -> dict[str, Any]:
    """Start and destroy `count` sandboxes, a command in each; then look for what is left."""
    starts: list[float] = []
    mark = f"{os.getpid()}.0"
    before = _descriptors()
    for number in range(count):
        started = time.perf_counter()
        sandbox = await open_sandbox(SandboxSettings(**settings))
        starts.append((time.perf_counter() - started) * 1000)
        await sandbox.exec(f"echo {number} > file; setsid sleep 9{mark} >/dev/null 2>&1 &")
        await sandbox.close()
    await asyncio.sleep(1)
    starts.sort()
    left = {
        "processes": _processes(f"9{mark}") + _processes(FIRST),
        "cgroups": len(
            [f for parent in set(_parents().values()) for f in parent.glob(f"ajet-sandbox-{os.getpid()}-*")]
        ),
        "containers": _containers(settings["kind"]),
        "descriptors": max(0, _descriptors() - before - 8),
    }
    return {
        "sandboxes": count,
        "start_p50_ms": round(median(starts), 1),
        "start_p95_ms": round(starts[int(0.95 * (len(starts) - 1))], 1),
        "left": left,
    }


def _processes(mark: str) -> int:
    found = 0
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found += mark.encode() in place.read_bytes() and int(place.parent.name) != os.getpid()
    return found


def _containers(kind: str) -> int:
    if kind == "bubblewrap":
        return 0
    listed = subprocess.run([kind, "ps", "-aq", "--filter", "label=ajet.sandbox=1"], capture_output=True, check=False)
    return len(listed.stdout.split())


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def undisturbed_starts(count: int) -> dict[str, Any]:
    """`starts` with real-time priority, as on a machine with nothing else to do. Such a process may join no cgroup."""
    line = ["chrt", "-r", "1", sys.executable, os.path.abspath(__file__), "--one", "starts", "--starts", str(count)]
    return dict(json.loads(subprocess.run(line, stdout=subprocess.PIPE, check=True).stdout))


async def starts(settings: dict[str, Any], count: int) -> dict[str, Any]:
    """Ours, bubblewrap alone, and bubblewrap with an empty Python, in turn: what a start takes, and of it is ours."""
    bare = [
        "bwrap",
        "--as-pid-1",
        "--unshare-pid",
        "--unshare-net",
        "--ro-bind",
        "/",
        "/",
        "--dev",
        "/dev",
        "--proc",
        "/proc",
    ]
    took: dict[str, list[float]] = {}
    computed: dict[str, float] = {}

    async def ours() -> None:
        sandbox = await open_sandbox(SandboxSettings(**settings))
        took.setdefault("ajet", []).append((time.perf_counter() - started) * 1000)
        await sandbox.close()

    for _ in range(count):
        for name, program in (("bwrap true", ["/bin/true"]), ("bwrap python", [sys.executable, "-I", "-S", "-c", ""])):
            started, before = time.perf_counter(), _cpu_ms()
            subprocess.run([*bare, *program], check=True)
            took.setdefault(name, []).append((time.perf_counter() - started) * 1000)
            computed[name] = computed.get(name, 0.0) + _cpu_ms() - before
        started, before = time.perf_counter(), _cpu_ms()
        await ours()
        computed["ajet"] = computed.get("ajet", 0.0) + _cpu_ms() - before
    return {
        name: {
            "p50_ms": round(median(times), 1),
            "p95_ms": round(sorted(times)[int(0.95 * (count - 1))], 1),
            "cpu_ms": round(computed[name] / count, 1),
        }
        for name, times in took.items()
    }


def _cpu_ms() -> float:
    """What the programs that have ended, and this one, computed. Unlike a time, it hardly depends on the load."""
    used = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used) * 1000


def attack_and_churn(name: str, count: int) -> dict[str, Any]:
    """All figures of one kind and mode."""
    with mode(name) as settings:
        check_sandbox(SandboxSettings(**settings))
        with tempfile.TemporaryDirectory(prefix="ajet-escapes-") as folder:
            figures = asyncio.run(attack(settings, Path(folder)))
        return figures | asyncio.run(churn(settings, count))


def earlier() -> dict[str, Any]:
    """The figures of kinds that are not measured now stay, with the date and the load of their own run."""
    return known_figures("sandbox")


def with_conditions(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `measure` returns, with when it was measured and how busy the machine was."""
    before = os.getloadavg()[0]
    figures = measure()
    load = f"{before:.0f} to {os.getloadavg()[0]:.0f}"
    return {"date": datetime.now(UTC).isoformat(timespec="minutes"), "load": load, **figures}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="*", default=["bubblewrap", "docker", "podman"])
    parser.add_argument("--sandboxes", type=int, default=1000)
    parser.add_argument("--containers", type=int, default=10, help="the same for docker and podman, which take longer")
    parser.add_argument("--starts", type=int, default=50, help="compared with bubblewrap alone")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.one:
        if arguments.one == "starts":
            with mode("bubblewrap, no cgroup"):
                print(json.dumps(asyncio.run(starts(LIMITS, arguments.starts))))
        else:
            print(json.dumps(attack_and_churn(arguments.one, arguments.sandboxes)))
        return 0
    names = [kind for kind in arguments.kinds if kind != "bubblewrap"]
    if "bubblewrap" in arguments.kinds:
        names = ["bubblewrap", "bubblewrap, no cgroup", NOT_ROOT, *names]
    figures: dict[str, Any] = earlier()
    failed = False
    if "bubblewrap" in arguments.kinds:
        figures["starts"] = with_conditions(lambda: asyncio.run(starts(LIMITS, arguments.starts)))
        print("starts", figures["starts"])
        try:
            figures["starts, real-time priority"] = with_conditions(partial(undisturbed_starts, arguments.starts))
            print("starts, real-time priority", figures["starts, real-time priority"])
            failed = figures["starts, real-time priority"]["ajet"]["p50_ms"] > START_BAR_MS
        except (OSError, subprocess.CalledProcessError) as error:  # it takes root
            print(f"starts, real-time priority: not run: {error}")
            failed = figures["starts"]["ajet"]["p50_ms"] > START_BAR_MS
    for name in names:
        count = arguments.sandboxes if name == "bubblewrap" else arguments.containers
        work = partial(as_another_user, count) if name == NOT_ROOT else partial(attack_and_churn, name, count)
        try:
            figures[name] = with_conditions(work)
        except (SandboxError, OSError, subprocess.CalledProcessError) as error:
            print(f"{name}: not run: {error}")
            continue
        print(name, figures[name])
        failed = failed or bool(figures[name]["succeeded"]) or any(figures[name]["left"].values())
        write_result("sandbox", figures)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
