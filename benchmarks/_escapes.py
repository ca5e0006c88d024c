"""60 attempts to get out of a sandbox. Each prints ESCAPED if it succeeded, or leaves a trace that the host looks for."""  # noqa: E501

from __future__ import annotations

from typing import NamedTuple


class Attempt(NamedTuple):
    """`python`: the code is Python, else a shell line. `{…}`: facts about the host that an attacker might guess."""

    area: str
    name: str
    code: str
    python: bool = False


def shell(area: str, name: str, code: str) -> Attempt:
    return Attempt(area, name, code)


def python(area: str, name: str, code: str) -> Attempt:
    return Attempt(area, name, code, True)


CONNECT = """
import socket
s = socket.socket({family}, socket.SOCK_STREAM)
s.settimeout(2)
s.connect({address})
print("ESCAPED")
"""
SYSCALL = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
"""

ATTEMPTS: list[Attempt] = [
    # ---------------------------------------------------------- network
    python("network", "the host's loopback", CONNECT.format(family="socket.AF_INET", address='("127.0.0.1", {port})')),
    python("network", "the host's address", CONNECT.format(family="socket.AF_INET", address='("{address}", {port})')),
    python("network", "the internet", CONNECT.format(family="socket.AF_INET", address='("1.1.1.1", 53)')),
    python(
        "network", "the cloud's metadata", CONNECT.format(family="socket.AF_INET", address='("169.254.169.254", 80)')
    ),
    python("network", "IPv6", CONNECT.format(family="socket.AF_INET6", address='("::1", {port})')),
    python("network", "an abstract Unix socket", CONNECT.format(family="socket.AF_UNIX", address='"\\\\0{abstract}"')),
    python("network", "a Unix socket in /tmp", CONNECT.format(family="socket.AF_UNIX", address='"{unix}"')),
    python("network", "Docker's socket", CONNECT.format(family="socket.AF_UNIX", address='"/var/run/docker.sock"')),
    python("network", "vsock", "import socket; socket.socket(40, socket.SOCK_STREAM); print('ESCAPED')"),
    python(
        "network", "a raw socket", "import socket; socket.socket(socket.AF_INET, socket.SOCK_RAW, 1); print('ESCAPED')"
    ),
    python("network", "a packet socket", "import socket; socket.socket(17, socket.SOCK_RAW, 768); print('ESCAPED')"),
    python("network", "names", "import socket; socket.getaddrinfo('example.com', 80); print('ESCAPED')"),
    python(
        "network",
        "UDP out",
        "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.sendto(b'x', ('{address}', 9)); print('ESCAPED')",  # noqa: E501
    ),
    shell("network", "bring an interface up", "ip link set eth0 up 2>/dev/null && echo ESCAPED"),
    # ---------------------------------------------------------- files
    shell("files", "/etc/shadow", "[ -s /etc/shadow ] && cat /etc/shadow >/dev/null && echo ESCAPED"),
    shell("files", "a secret in the home", "cat {secret} && echo ESCAPED"),
    shell("files", "a secret, by way of ..", "cat ../../../../../../..{secret} && echo ESCAPED"),
    shell("files", "the tasks' answers", "cat {answers} && echo ESCAPED"),
    shell("files", "the project", "ls {project}/pyproject.toml && echo ESCAPED"),
    shell("files", "change a program", "echo x >> /usr/bin/env && echo ESCAPED"),
    shell("files", "a new file in /usr", "touch /usr/x /bin/x /lib/x 2>/dev/null && echo ESCAPED"),
    shell("files", "a new file in /etc", "touch /etc/ld.so.preload && echo ESCAPED"),
    shell("files", "a user file of the host", "echo pwned >> {victim}; true"),
    shell("files", "remount writable", "mount -o remount,rw / 2>/dev/null && echo ESCAPED"),
    shell(
        "files",
        "a block device",
        "for d in /dev/vda /dev/sda /dev/nvme0n1; do head -c 1 $d 2>/dev/null && echo ESCAPED; done",
    ),
    shell("files", "make a device", "mknod d b 254 0 2>/dev/null && head -c 1 d && echo ESCAPED"),
    shell(
        "files",
        "kernel memory",
        "head -c 1 /dev/mem 2>/dev/null && echo ESCAPED; head -c 1 /proc/kcore 2>/dev/null && echo ESCAPED",
    ),
    shell("files", "a full disk", "dd if=/dev/zero of=big bs=1M count=4096 2>/dev/null && echo ESCAPED"),
    shell("files", "a full /tmp", "dd if=/dev/zero of=/tmp/big bs=1M count=4096 2>/dev/null && echo ESCAPED"),
    shell("files", "a full /dev/shm", "dd if=/dev/zero of=/dev/shm/big bs=1M count=4096 2>/dev/null && echo ESCAPED"),
    # ---------------------------------------------------------- /proc and other processes
    shell("proc", "another's environment", "cat /proc/*/environ 2>/dev/null | grep -a {canary} && echo ESCAPED"),
    shell("proc", "another's command line", "cat /proc/*/cmdline 2>/dev/null | grep -a '{mark}' && echo ESCAPED"),
    shell("proc", "another's root", "ls /proc/1/root{secret} 2>/dev/null && echo ESCAPED"),
    shell("proc", "another's working folder", "ls /proc/*/cwd/pyproject.toml 2>/dev/null && echo ESCAPED"),
    shell("proc", "another's descriptors", "cat /proc/{pid}/fd/* 2>/dev/null | head -c 1 | grep -q . && echo ESCAPED"),
    shell("proc", "sysrq", "echo h > /proc/sysrq-trigger && echo ESCAPED"),
    shell("proc", "core_pattern", "echo '|/bin/sh' > /proc/sys/kernel/core_pattern && echo ESCAPED"),
    shell("proc", "a kernel setting", "echo 1 > /proc/sys/kernel/panic && echo ESCAPED"),
    shell("proc", "more memory for oneself", "echo -1000 > /proc/self/oom_score_adj && echo ESCAPED"),
    shell("proc", "leave the cgroup", "echo 0 > /sys/fs/cgroup/cgroup.procs 2>/dev/null && echo ESCAPED"),
    shell(
        "proc",
        "the cgroup's release agent",
        "mkdir /tmp/c && mount -t cgroup -o memory x /tmp/c 2>/dev/null && echo ESCAPED",
    ),
    # ---------------------------------------------------------- signals and system calls
    shell("signals", "end the owner", "kill -9 {pid} && echo ESCAPED"),
    shell("signals", "end process 1", "kill -9 1 2>/dev/null; kill -TERM 1 2>/dev/null; true"),
    python("signals", "trace process 1", SYSCALL + "print('ESCAPED' if libc.ptrace(16, 1, 0, 0) == 0 else 'no')"),
    python(
        "signals",
        "read process 1",
        SYSCALL
        + "data = open('/proc/1/maps').readline().split('-')[0]\n"
        + "file = open('/proc/1/mem', 'rb', 0); file.seek(int(data, 16)); print('ESCAPED' if file.read(1) else 'no')",
    ),
    python("signals", "another user", "import os; os.setuid(0); print('ESCAPED')"),
    python("signals", "a user namespace", SYSCALL + "print('ESCAPED' if libc.unshare(0x10000000) == 0 else 'no')"),
    python(
        "signals",
        "a user namespace by clone",
        SYSCALL
        + "p = libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0)\nif p == 0: os._exit(0)\nprint('ESCAPED' if p > 0 else 'no')",  # noqa: E501
    ),
    python(
        "signals",
        "join a namespace",
        SYSCALL + "f = os.open('/proc/1/ns/net', 0); print('ESCAPED' if libc.setns(f, 0) == 0 else 'no')",
    ),
    python("signals", "chroot", SYSCALL + "print('ESCAPED' if libc.chroot(b'/tmp') == 0 else 'no')"),
    python("signals", "the kernel's keys", SYSCALL + "print('ESCAPED' if libc.syscall(250, 0, -3, 0) > 0 else 'no')"),
    python(
        "signals",
        "BPF",
        SYSCALL + "print('ESCAPED' if libc.syscall(321, 0, ctypes.create_string_buffer(128), 128) >= 0 else 'no')",
    ),
    shell(
        "signals",
        "a setuid program",
        "su -c id 2>/dev/null | grep uid=0 && echo ESCAPED; sudo -n id 2>/dev/null | grep uid=0 && echo ESCAPED; true",
    ),
    # ---------------------------------------------------------- bombs
    shell("bombs", "a fork bomb", "b() {{ b | b & }}; b; sleep 2; true"),
    python(
        "bombs", "a memory bomb", "b = []\nwhile len(b) < 4096: b.append(bytearray(b'x') * (1 << 20))\nprint('ESCAPED')"
    ),
    python(
        "bombs",
        "memory in many processes",
        "import os, time\nfor _ in range(40):\n    if os.fork() == 0:\n        b = bytearray(b'x') * (100 << 20)\n        time.sleep(20); print('HELD'); os._exit(0)\n"  # noqa: E501
        "try:\n    while True: os.wait()\nexcept ChildProcessError: pass",
    ),
    # ---------------------------------------------------------- links, environment, other episodes
    shell("links", "a link to a secret, read by the owner", "ln -s {secret} link; true"),
    shell("environment", "a secret of the owner", "env | grep {canary} && echo ESCAPED"),
    shell(
        "others",
        "another episode's files",
        "ls {other} 2>/dev/null | grep secret && echo ESCAPED; cat /workspace/other-secret 2>/dev/null && echo ESCAPED; true",  # noqa: E501
    ),
    shell(
        "others",
        "another episode's processes",
        "ps aux 2>/dev/null | grep -v grep | grep {othermark} && echo ESCAPED; pkill -f {othermark}; true",
    ),
]
assert len(ATTEMPTS) == 60, len(ATTEMPTS)
