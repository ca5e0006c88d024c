"""How bubblewrap is started (`command_line`), what this machine lets it do (`probe`), and its control channel.

As root, the first process inside stays root, without any other privilege, and runs commands as a user that exists
nowhere else. Otherwise, commands run in a user namespace, as the user that runs ajet.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import functools
import importlib.util
import itertools
import marshal
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from ajet.environment.sandboxes.sandbox import FIRST_UID, SHARED_MEMORY_MB, UIDS, SandboxError, SandboxSettings

INSIDE = Path(__file__).with_name("inside.py")
FIRST = "/run/inside.pyc"
"""`inside.py` as the sandbox sees it: compiled here, once, and not anew by each first process."""
PROBE_S = 20.0

_TOP = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_ETC = (
    "alternatives",
    "ld.so.cache",
    "localtime",
    "ssl/certs",
    "ssl/openssl.cnf",
    "mime.types",
    "protocols",
    "services",
)
"""What programs look up in /etc. Nothing here is private."""
_KERNEL = ("/proc/sys", "/proc/sysrq-trigger", "/proc/irq", "/proc/bus", "/proc/fs")
"""What changes the machine when it is written to."""

_numbers = itertools.count()


def next_uid() -> int:
    """A user for one sandbox. Its processes are counted apart from all others."""
    return FIRST_UID + (os.getpid() * 4099 + next(_numbers)) % UIDS


@functools.cache
def probe() -> str:
    """`root` or `user`: how namespaces can be made here. Raises `SandboxError` that says what to do."""
    program = shutil.which("bwrap")
    if program is None:
        raise SandboxError(
            "sandbox kind bubblewrap: there is no `bwrap` here. Install it (apt-get install bubblewrap), "
            "or choose docker or podman, or `none` if commands may do whatever you may"
        )
    # As root in a user namespace, commands would own what root owns, /proc/sys for one: there is no such mode.
    mode = "root" if os.geteuid() == 0 else "user"
    try:
        tried = subprocess.run(
            [program, *_namespaces(mode, network=False), "--ro-bind", "/", "/", "--proc", "/proc", "/bin/true"],
            capture_output=True,
            timeout=PROBE_S,
            check=False,
            env={},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxError(
            f"sandbox kind bubblewrap: {program} can't be used: {error}. Try `{program} --ro-bind / / true`, or choose "
            "docker or podman"
        ) from None
    if tried.returncode == 0:
        return mode
    said = tried.stderr.decode(errors="replace").strip()
    raise SandboxError(
        f"sandbox kind bubblewrap: this machine refuses it: {said}. In a container, allow user namespaces "
        "(docker run --security-opt seccomp=unconfined, or --privileged); on Ubuntu, set "
        "kernel.apparmor_restrict_unprivileged_userns=0. Or choose docker, podman, or `none` if commands may do "
        "whatever you may"
    )


def _namespaces(mode: str, *, network: bool) -> list[str]:
    return [
        *(["--unshare-user", "--uid", "1000", "--gid", "1000"] if mode == "user" else []),
        *("--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"),
        *([] if network else ["--unshare-net"]),
    ]


def interpreter() -> tuple[str, Path | None]:
    """The Python that runs `inside.py`, and the folder to show for it, if it isn't below /usr."""
    program = os.path.realpath(sys.executable)
    home = Path(sys.base_prefix).resolve()
    return program, None if home.is_relative_to("/usr") else home


def path_inside() -> str:
    """PATH of commands."""
    places = ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"]
    _, home = interpreter()
    return ":".join([*places, *([str(home / "bin")] if home is not None else [])])


def command_line(
    settings: SandboxSettings, *, mode: str, uid: int, files: dict[str, int], filter_: int | None, watch: bool
) -> list[str]:
    """The arguments, program first. `files`: descriptors of what to put at these paths. They are copied: a mount for
    each would take longer, and the root is made read-only at the end."""
    size = str(settings.disk_mb << 20)
    program, home = interpreter()
    line = [
        "bwrap",
        *_namespaces(mode, network=settings.network == "host"),
        *("--die-with-parent", "--new-session", "--as-pid-1", "--hostname", "sandbox"),
        *_capabilities(mode),
        *_folders_to(["/etc/ssl/x", "/run/x", *([str(home)] if home is not None else [])]),
        *("--ro-bind", "/usr", "/usr"),
        *_top_folders(),
        *_etc(),
        *(
            argument
            for path, descriptor in files.items()
            for argument in ("--perms", "0644", "--file", str(descriptor), path)
        ),
        *(["--ro-bind", str(home), str(home)] if home is not None else []),
        *("--proc", "/proc", "--dev", "/dev"),
        *(part for place in _KERNEL if os.path.exists(place) for part in ("--ro-bind", place, place)),
        *("--perms", "1777", "--size", str(SHARED_MEMORY_MB << 20), "--tmpfs", "/dev/shm"),
        *("--perms", "1777", "--size", size, "--tmpfs", "/tmp"),
        *_folders_to(settings.writable),
        *(part for folder in settings.writable for part in ("--perms", "0777", "--size", size, "--tmpfs", folder)),
        *_folders_to(settings.read_only),
        *shown(settings.read_only),
        *("--remount-ro", "/dev", "--remount-ro", "/"),
        *("--chdir", settings.workspace),
        *(["--seccomp", str(filter_)] if filter_ is not None else []),
        *("--", program, "-I", "-S", "-B", FIRST),
        f"uid={uid}",
        f"memory={settings.memory_mb}",
        f"processes={settings.processes}",
        f"disk={settings.disk_mb}",
        f"lifetime={settings.lifetime_seconds}",
        f"watch={int(watch)}",
        f"folders={':'.join(settings.writable)}",
    ]
    return line


def _capabilities(mode: str) -> list[str]:
    """What the first process needs to become another user, and to end that user's processes."""
    if mode == "user":
        return ["--cap-drop", "ALL"]
    kept = ("CAP_SETUID", "CAP_SETGID", "CAP_KILL")
    return ["--cap-drop", "ALL", *(argument for name in kept for argument in ("--cap-add", name))]


def _top_folders() -> list[str]:
    """/bin and its like: links into /usr on most systems, folders on others."""
    arguments: list[str] = []
    for name in _TOP:
        place = Path("/") / name
        if place.is_symlink():
            arguments += ["--symlink", os.readlink(place), str(place)]
        elif place.is_dir():
            arguments += ["--ro-bind", str(place), str(place)]
    return arguments


def _folders_to(places: Sequence[str]) -> list[str]:
    """The folders above what is shown, which everyone may enter: bubblewrap's own choice is root alone."""
    above = {str(parent) for place in places for parent in Path(place).parents if parent != Path("/")}
    return [argument for folder in sorted(above) for argument in ("--perms", "0755", "--dir", folder)]


def _etc() -> list[str]:
    return [argument for name in _ETC for argument in ("--ro-bind-try", f"/etc/{name}", f"/etc/{name}")]


def check_writable(settings: SandboxSettings) -> None:
    """Raises `SandboxError` for a folder among this machine's, which can't be written to."""
    for folder in settings.writable:
        if folder.split("/")[1] in (*_TOP, "usr", "etc", "run"):
            raise SandboxError(f"sandbox workspace: bubblewrap can't make {folder}, as it shows this machine's folder")


def shown(folders: Sequence[str]) -> list[str]:
    for folder in folders:
        if not os.path.exists(folder):
            raise SandboxError(f"sandbox read_only: there is no {folder!r} here")
    return [argument for folder in folders for argument in ("--ro-bind", folder, folder)]


@functools.cache
def first_program() -> bytes:
    """`inside.py`, compiled for the interpreter that is shown in the sandbox: the one that runs here."""
    code = compile(INSIDE.read_text(), str(INSIDE), "exec", dont_inherit=True)
    return importlib.util.MAGIC_NUMBER + bytes(12) + marshal.dumps(code)


def texts(mode: str, uid: int, network: str) -> dict[str, str]:
    """Files that are made up for the sandbox: who there is, and which names lead where."""
    user, group = (uid, uid) if mode == "root" else (1000, 1000)
    found = {
        "/etc/passwd": f"root:x:0:0:root:/root:/bin/sh\nagent:x:{user}:{group}:agent:/tmp:/bin/sh\n"
        "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
        "/etc/group": f"root:x:0:\nagent:x:{group}:\nnogroup:x:65534:\n",
        "/etc/hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
        "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
    }
    if network == "host":
        try:
            found["/etc/resolv.conf"] = Path("/etc/resolv.conf").read_text()
        except OSError:  # a machine without one resolves no names
            found["/etc/resolv.conf"] = ""
    return found


PACKET = 64
RETRY_S = 0.005


class InitAnswer:
    """`exit 0`, `error 13`, or `socket` with a descriptor."""

    def __init__(self, text: str, descriptor: int | None = None) -> None:
        self.kind, _, value = text.partition(" ")
        self.value = int(value) if value else 0
        self.descriptor = descriptor


class Control:
    """The owner's end of the channel."""

    def __init__(self, ours: socket.socket, on_end: Callable[[], str]) -> None:
        """`on_end` says why the sandbox ended, once it has."""
        self._socket = ours
        self._socket.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(ours, self._receive)
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[InitAnswer]] = {0: self._loop.create_future()}
        self._on_end = on_end
        self._ended: str | None = None

    async def ready(self) -> None:
        """Wait until the first process is there."""
        await self._waiting[0]

    async def begin(
        self, action: str, fields: Sequence[str], descriptors: Sequence[int]
    ) -> tuple[int, asyncio.Future[InitAnswer]]:
        """Send a request. The future is its answer; `SandboxError` if the sandbox ends before."""
        payload = os.memfd_create("ajet-request")
        try:
            with open(payload, "wb", closefd=False) as file:
                file.write(b"\0".join(os.fsencode(field) for field in fields))
            os.lseek(payload, 0, os.SEEK_SET)
            number = next(self._numbers)
            answer: asyncio.Future[InitAnswer] = self._loop.create_future()
            self._waiting[number] = answer
            await self._send(f"{number} {action}", [payload, *descriptors])
        finally:
            os.close(payload)
        return number, answer

    async def kill(self, number: int) -> None:
        """End what this request started."""
        await self._send(f"{number} kill", [])

    async def _send(self, text: str, descriptors: Sequence[int]) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        while True:
            if self._ended is not None:
                raise SandboxError(self._ended)
            try:
                self._socket.sendmsg([text.encode()], rights)
            except BlockingIOError:
                await asyncio.sleep(RETRY_S)
            except OSError:
                self._end()
            else:
                return

    def hang_up(self) -> None:
        """Have the first process exit. Can be called from any thread."""
        with contextlib.suppress(OSError):  # closed already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Free the socket. On the event loop."""
        self._end("the sandbox is closed")
        self._socket.close()

    def _receive(self) -> None:
        try:
            packet, descriptors, _, _ = socket.recv_fds(self._socket, PACKET, 1)
        except BlockingIOError:
            return
        except OSError:
            packet, descriptors = b"", []
        number, _, text = packet.decode("ascii", "replace").partition(" ")
        try:
            answer = InitAnswer(text, descriptors[0] if descriptors else None)
            waiting = self._waiting.pop(int(number)) if number != "0" else self._waiting[0]
        except (ValueError, KeyError):
            for descriptor in descriptors:
                os.close(descriptor)
            self._end()
            return
        if number == "0" and text == "lifetime":
            self._end("the sandbox reached its lifetime_seconds and was closed")
        elif not waiting.done():
            waiting.set_result(answer)

    def _end(self, why: str | None = None) -> None:
        if self._ended is not None:
            return
        self._loop.remove_reader(self._socket)
        self._ended = why or self._on_end()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(SandboxError(self._ended))
                waiting.exception()  # a request may have been given up
