"""Programs that try what a contained program must not do. Each prints a line `held ...` or `OPEN ...` for each attempt.

Every misdeed is bounded by itself as well, and signals to others are tried as signal 0, in case one is not held.
DIR, SOCKET, PORT, LEFT and PARENT stand for the values of `exposed_host`.
"""

from __future__ import annotations

import os
import select
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

TRY = """
import os, sys, time, errno, ctypes
libc = ctypes.CDLL(None, use_errno=True)
def t(name, attempt, is_bad=lambda result: True):
    try: result = attempt()
    except BaseException as e: print(f"held {name}: {type(e).__name__} {getattr(e, 'errno', '')}")
    else: print(f"{'OPEN' if is_bad(result) else 'held'} {name}: {str(result)[:90]!r}")
def call(number, *arguments):
    result = libc.syscall(number, *arguments)
    if result < 0: raise OSError(ctypes.get_errno(), "refused")
    return result
"""

MISDEEDS = {
"fork bomb": """
number = 0
try:
    for _ in range(300):
        if os.fork() == 0: time.sleep(1.0); os._exit(0)
        number += 1
except OSError: pass
print(f"{'held' if number < 64 else 'OPEN'} fork: {number} children")
""",
"much memory": """
import mmap
t("bytearray", lambda: len(bytearray(10 << 30)))
t("mmap", lambda: len(mmap.mmap(-1, 10 << 30)))
def grow():
    parts = []
    while len(parts) < 400: parts.append(b"x" * (25 << 20))
t("grow", grow)
def files():
    found = [os.memfd_create(str(i)) for i in range(50)]
    return sum(os.write(file, b"x" * (1 << 20)) for file in found)
t("files in memory", files)
import fcntl
t("size of a pipe", lambda: fcntl.fcntl(os.pipe()[0], 1031, 1 << 20))
""",
"much memory in several processes": """
def several():
    children = []
    for _ in range(4):
        if (child := os.fork()) == 0:
            try: part = bytearray(b"x") * (150 << 20); time.sleep(0.5)
            except BaseException: os._exit(1)
            os._exit(0)
        children.append(child)
    return [os.waitpid(child, 0)[1] for child in children]
t("600 MB of 512 MB", several, lambda codes: codes == [0] * 4)
""",
"network": """
import socket
t("tcp", lambda: socket.create_connection(("127.0.0.1", PORT), 1).send(b"x"))
t("udp", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", PORT)))
t("bind", lambda: socket.socket().bind(("127.0.0.1", 0)))
t("abstract unix", lambda: socket.socket(socket.AF_UNIX).connect("\\0misdeed-PORT"))
t("path unix", lambda: socket.socket(socket.AF_UNIX).connect("SOCKET"))
t("netlink", lambda: socket.socket(16, 3, 0))
pair = lambda kind: socket.socketpair(socket.AF_UNIX, kind)[0]
for kind in (socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_STREAM):
    for address in ("DIR/datagrams", "\\0misdeed-datagrams-PORT"):
        t(f"{kind.name} sendto {address!r}", lambda: pair(kind).sendto(b"x", address))
        t(f"{kind.name} sendmsg {address!r}", lambda: pair(kind).sendmsg([b"x"], [], 0, address))
t("tipc", lambda: socket.socketpair(30, socket.SOCK_STREAM))
""",
"writes outside": """
t("create", lambda: open("DIR/new", "w").write("x"))
t("overwrite", lambda: open("DIR/secret", "a").write("x"))
t("mkdir", lambda: os.mkdir("DIR/d"))
t("unlink", lambda: os.unlink("DIR/victim"))
t("rename", lambda: os.rename("DIR/victim", "DIR/v2"))
t("link", lambda: os.link("DIR/secret", "DIR/l"))
t("truncate", lambda: os.truncate("DIR/secret", 0))
t("truncating reader", lambda: os.open("DIR/secret", os.O_RDONLY | os.O_TRUNC))
t("truncating", lambda: os.open("DIR/secret", 3 | os.O_TRUNC))
t("open for ioctl", lambda: os.open("DIR/secret", 3))
t("chmod", lambda: os.chmod("DIR/secret", 0o777))
t("chmod in a folder", lambda: os.chmod("secret", 0o777, dir_fd=os.open("DIR", os.O_PATH)))
t("utime", lambda: os.utime("DIR/secret", (0, 0)))
t("chown", lambda: os.chown("DIR/secret", os.getuid(), os.getgid()))
t("setxattr", lambda: os.setxattr("DIR/secret", "user.x", b"1"))
t("/dev/shm", lambda: open("/dev/shm/misdeed", "w").write("x"))
t("/var/tmp", lambda: open("/var/tmp/misdeed", "w").write("x"))
""",
"reads of others": """
for path in ("/etc/shadow", "/etc/passwd", "/root/.bashrc", "DIR/secret", "/proc/1/environ", "/proc/self/environ",
             "/proc/self/maps", f"/proc/{os.getppid()}/environ", f"/proc/{os.getppid()}/maps", "/sys/class/net",
             "/dev/mem", "/", "DIR", "/proc"):
    t("read " + path, lambda: os.listdir(path) if os.path.isdir(path) else open(path, "rb").read(100))
t("secret of the environment", lambda: os.environ["SECRET_KEY"])
t("the project", lambda: __import__("rollout_server"))
""",
"stat of others": """
t("stat of a file of the run", lambda: os.stat("DIR/secret").st_size)
t("stat of a file of the host", lambda: os.stat("/etc/passwd").st_size)
t("stat of a file in /tmp", lambda: os.stat("LEFT").st_size)
t("where a link points", lambda: os.readlink("DIR/link"))
""",
"looks at other processes": """
t("group", lambda: os.getpgid(PARENT))
t("session", lambda: os.getsid(PARENT))
t("priority", lambda: os.getpriority(os.PRIO_PROCESS, PARENT))
t("processors", lambda: os.sched_getaffinity(PARENT))
t("processor time", lambda: time.clock_gettime(~PARENT << 3 | 2))
t("program", lambda: os.readlink("/proc/PARENT/exe"))
t("folder", lambda: os.readlink("/proc/PARENT/cwd"))
t("get_robust_list", lambda: call(274, PARENT, ctypes.byref(ctypes.c_long()), ctypes.byref(ctypes.c_long())))
""",
"locks": """
import fcntl
file = os.open(os.__file__, os.O_RDONLY)
t("flock", lambda: fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB))
t("record lock", lambda: fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB))
t("lease", lambda: fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK))
""",
"symlinks": """
t("symlink and read", lambda: (os.symlink("/etc/shadow", "x1"), open("x1").read(10)))
t("symlink in tmp", lambda: (os.symlink("DIR/secret", "/tmp/x2"), open("/tmp/x2").read(10)))
t("/proc/self/root", lambda: open("/proc/self/root/etc/shadow").read(10))
t("/proc/self/cwd/..", lambda: open("/proc/self/cwd/etc/shadow").read(10))
t("/usr/../etc/shadow", lambda: open("/usr/../etc/shadow").read(10))
t("/usr/..DIR", lambda: open("/usr/..DIR/secret").read(10))
t("chroot", lambda: os.chroot("/tmp"))
""",
"signals to others": """
t("signal 0 to the parent", lambda: os.kill(os.getppid(), 0), lambda result: os.getppid() > 0)
t("SIGTERM to the worker", lambda: os.kill(PARENT, 15))
t("signal 0 to all", lambda: os.kill(-1, 0))
t("killpg", lambda: os.killpg(PARENT, 0))
t("pidfd", lambda: call(424, call(434, PARENT, 0), 0, 0, 0))
t("prlimit of the parent", lambda: call(302, PARENT, 0, 0, 0))
t("sched_setaffinity", lambda: call(203, PARENT, 8, b"\\x01" + b"\\0" * 7))
t("setpriority", lambda: os.setpriority(os.PRIO_PROCESS, PARENT, 19))
t("ioprio_set", lambda: call(251, 1, PARENT, 0))
t("rt_sigqueueinfo", lambda: call(129, PARENT, 0, b"\\0" * 128))
t("tkill", lambda: call(200, PARENT, 0))
import fcntl, socket, struct
number, ends = struct.pack("i", PARENT), socket.socketpair()
t("F_SETOWN", lambda: fcntl.fcntl(ends[0], fcntl.F_SETOWN, PARENT))
t("F_SETOWN_EX", lambda: fcntl.fcntl(ends[0], 15, struct.pack("ii", 1, PARENT)))
t("FIOSETOWN", lambda: fcntl.ioctl(ends[0], 0x8901, number))
t("SIOCSPGRP", lambda: fcntl.ioctl(ends[0], 0x8902, number))
""",
"ptrace": """
t("attach to the worker", lambda: call(101, 16, PARENT, 0, 0))
buffer = ctypes.create_string_buffer(8)
vector = (ctypes.c_size_t * 2)(ctypes.addressof(buffer), 8)
t("process_vm_readv", lambda: call(310, PARENT, vector, ctypes.c_long(1), vector, ctypes.c_long(1), ctypes.c_long(0)))
t("/proc/N/mem", lambda: open("/proc/PARENT/mem", "rb"))
t("traceme", lambda: call(101, 0, 0, 0, 0))
""",
"daemon": """
def daemon():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0: time.sleep(4)
        os._exit(0)
t("daemon", daemon, lambda result: False)
""",
"thread bomb": """
import threading
threading.stack_size(32768); threads = []; event = threading.Event()
try:
    for i in range(1000): thread = threading.Thread(target=event.wait, daemon=True); thread.start(); threads.append(1)
except BaseException: pass
print(f"{'held' if len(threads) < 200 else 'OPEN'} threads: {len(threads)}"); sys.stdout.flush(); os._exit(0)
""",
"system calls": """
calls = {
    "unshare": (272, 0x10000000), "mount": (165, 0, 0, 0, 0, 0), "bpf": (321, 0, 0, 0), "perf": (298, 0, 0, 0, 0, 0),
    "io_uring": (425, 1, 0), "userfaultfd": (323, 0), "keyctl": (250, 0, 0, 0),
    "add_key": (248, b"user", b"x", b"y", 1, -3),
    "memfd_create": (319, b"x", 0), "shmget": (29, 0, 1 << 20, 0o1600), "msgget": (68, 0, 0o1600),
    "semget": (64, 0, 1, 0o1600), "mq_open": (240, b"m", 0x42, 0o600, 0), "setns": (308, 0, 0),
    "personality": (135, 0xffffffff), "swapoff": (168, b"/x"), "reboot": (169, 0), "inotify": (294, 0),
    "fanotify": (300, 0, 0), "quotactl": (179, 0, 0, 0, 0), "open_by_handle": (304, 0, 0, 0),
    "landlock": (444, 0, 0, 1),
    "syslog": (103, 10, 0, 0), "kcmp": (312, os.getpid(), os.getpid(), 0, 1, 1), "pidfd_getfd": (438, 0, 0, 0),
    "migrate_pages": (256, 0, 8, b"\\1" * 8, b"\\1" * 8), "mount_setattr": (442, -100, b"/", 0, b"\\0" * 32, 32),
    "clone with a namespace": (56, 0x40010f00, 0, 0, 0, 0), "clone3": (435, 0, 0), "x32 getpid": (0x40000000 + 39,),
}
for name, arguments in calls.items(): t(name, lambda: call(*arguments))
t("setuid 0", lambda: os.setuid(0))
import resource
t("raise a limit", lambda: resource.setrlimit(resource.RLIMIT_AS, (-1, -1)))
def is_open(file):
    try: os.fstat(file)
    except OSError: return False
    return True
t("descriptors", lambda: [file for file in range(1024) if is_open(file)], lambda result: result != [0, 1, 2])
""",
"1 GB of output": """
try:
    for i in range(1024): os.write(1, b"x" * (1 << 20))
    os.write(2, b"OPEN output")
except OSError: os.write(2, b"held output")
""",
"output without writing": """
t("ftruncate", lambda: os.ftruncate(1, 10 << 30))
t("fallocate", lambda: os.posix_fallocate(1, 0, 10 << 30))
t("pwrite", lambda: os.pwrite(1, b"x", 10 << 30))
""",
"full /tmp": """
def fill():
    for i in range(100): open(f"/tmp/fill{i}", "wb").write(b"x" * (900 << 10))
t("fill", fill)
def inodes():
    for i in range(20000): open(f"/tmp/i{i}", "w").close()
t("inodes", inodes)
""",
"endless loop": "while True: pass",
"endless sleep that ignores signals": """
import signal
for number in range(1, 32):
    try: signal.signal(number, signal.SIG_IGN)
    except BaseException: pass
while True: time.sleep(10)
""",
"endless thread that nobody joins": """
import threading
def run():
    while True: time.sleep(10)
threading.Thread(target=run).start()
""",
"endless function at the end": """
import atexit
@atexit.register
def run():
    while True: time.sleep(10)
""",
}  # fmt: skip

SOUND = {
    "exit": ("print(int(input()) + 1)\nif __name__ == '__main__': exit()\nprint('more')", "8"),
    "quit in a function": ("def main():\n  print(int(input()) + 1)\n  quit(0)\nmain()", "8"),
    "a thread that nobody joins": (
        "import threading, time\ndef main():\n  time.sleep(.2)\n  print(int(input()) + 1)\n"
        "threading.Thread(target=main).start()", "8",
    ),
    "another output": (
        "import io, sys\nsys.stdout = io.StringIO()\nsys.__stdout__.write(str(int(sys.__stdin__.readline()) + 1))", "8"
    ),
    "output at the end": (
        "import atexit, io, os, sys\nsys.stdout = io.StringIO()\n"
        "atexit.register(lambda: os.write(1, sys.stdout.getvalue().encode()))\nprint(int(input()) + 1)", "8",
    ),
    "detached output": (
        "import io, sys\nsys.stdout = io.TextIOWrapper(sys.stdout.detach(), encoding='utf-8')\n"
        "print(int(input()) + 1)", "8",
    ),
    "closed output": ("import sys\nprint(int(input()) + 1)\nsys.stdout.close()\nsys.stderr.close()", "8"),
    "no output any more": ("import sys\nprint(int(input()) + 1, flush=True)\nsys.stdout = sys.stderr = None", "8"),
    "asyncio": ("import asyncio\nasync def f(): await asyncio.sleep(.01); return 5\nprint(asyncio.run(f()))", "5"),
    "deep recursion in a thread": (
        "import threading, sys\nsys.setrecursionlimit(1 << 20)\nthreading.stack_size(1 << 28)\n"
        "def f(n): return 0 if n == 0 else 1 + f(n - 1)\nt = threading.Thread(target=lambda: print(f(50000)))\n"
        "t.start(); t.join()", "50000",
    ),
    "dataclass and main guard": (
        "from dataclasses import dataclass\n@dataclass\nclass A:\n  x: int\n"
        "if __name__ == '__main__': print(A(int(input())))", "A(x=7)",
    ),
    "threads": (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "print(sum(ThreadPoolExecutor(4).map(lambda x: x * x, range(10))))", "285",
    ),
    "random, time, decimal": (
        "import random, time, decimal, datetime, re, uuid\nrandom.random(); uuid.uuid4(); datetime.datetime.now()\n"
        "print(decimal.Decimal(1) / 4)", "0.25",
    ),
    "modes of its own files": (
        "import os, shutil\nopen('a', 'w').write('#!/bin/sh\\necho done')\nos.chmod('a', 0o700)\n"
        "shutil.copy('a', 'b')\nprint(os.popen('./b').read())", "done",
    ),
    "sqlite": (
        "import sqlite3\nwith sqlite3.connect('/tmp/x.db') as db: db.execute('create table t (n)')\n"
        "with sqlite3.connect('/tmp/x.db') as db: db.execute('insert into t values (5)')\n"
        "print(sqlite3.connect('/tmp/x.db').execute('select n from t').fetchone()[0])", "5",
    ),
    "tempfile": ("import tempfile\nwith tempfile.NamedTemporaryFile() as f: f.write(b'x'); print('ok')", "ok"),
    "subprocess": (
        "import subprocess\nprint(subprocess.run(['echo', 'hi'], capture_output=True, text=True).stdout)", "hi"
    ),
}  # fmt: skip
"""Programs that must work, with their last line of output if the input is 7."""


@contextmanager
def exposed_host() -> Iterator[dict[str, str]]:
    """A folder with a secret and a file to lose, and sockets that listen: the values of the names in the misdeeds."""
    with ExitStack() as stack:
        folder, other = (
            Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="misdeeds-", dir=parent)))
            for parent in ("/var/tmp", "/tmp")
        )
        left = other / "left"
        for place in (folder, other):
            place.chmod(0o755)
        left.touch()
        (folder / "victim").touch()
        (folder / "secret").write_text("sesame")
        (folder / "link").symlink_to("/nowhere")
        (folder / "secret").chmod(0o600)
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        port = tcp.getsockname()[1]
        udp = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        udp.bind(("127.0.0.1", port))
        sockets = [tcp, udp]
        for kind, name in ((socket.SOCK_STREAM, "socket"), (socket.SOCK_DGRAM, "datagrams")):
            abstract = f"\0misdeed-{port}" if name == "socket" else f"\0misdeed-{name}-{port}"
            for address in (abstract, f"{folder}/{name}"):
                sockets.append(stack.enter_context(socket.socket(socket.AF_UNIX, kind)))
                sockets[-1].bind(address)
                if kind == socket.SOCK_STREAM:
                    sockets[-1].listen()
            (folder / name).chmod(0o777)
        yield {
            "DIR": str(folder), "SOCKET": f"{folder}/socket", "PORT": str(port), "LEFT": str(left),
            "PARENT": str(os.getpid()),
        }  # fmt: skip
        assert select.select(sockets, [], [], 0)[0] == [], "a program has reached the host"
        found = os.stat(folder / "secret")
        assert (found.st_mode & 0o777, found.st_size, found.st_uid) == (0o600, 6, os.stat(folder).st_uid)
