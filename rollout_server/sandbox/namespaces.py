"""Gives the fork server and its programs namespaces of their own, as cheaply as the kernel allows.

    the server      user, PID, network, IPC and UTS namespaces, once: programs may make no socket and no IPC (seccomp),
                    so that all can share these empty ones
    each program    a PID namespace, whose process 1 it is, and user and mount namespaces, where nothing can be changed
                    but what is in an empty /tmp

The server is process 1 of its PID namespace: when it ends, for whatever reason, the kernel ends all programs. Like
`kernel` this imports only Python's standard library.
"""

from __future__ import annotations

import os
import sys

from rollout_server.sandbox import kernel

_USER, _PID, _NETWORK, _IPC, _UTS, _MOUNT = 0x10000000, 0x20000000, 0x40000000, 0x08000000, 0x04000000, 0x00020000


def become_server() -> None:
    """Move to new namespaces, and return only in process 1 of them; this process waits for its end.

    OSError: the kernel refuses.
    """
    is_done, done = os.pipe()
    process, mapper = os.getpid(), os.fork()
    if mapper == 0:  # only a process that has stayed outside may map more than one user
        code = 1
        try:
            os.close(done)
            if os.read(is_done, 1):
                _map_users(process)
            code = 0
        except OSError as error:
            code = error.errno or 1
        finally:
            os._exit(code)
    os.close(is_done)
    try:
        kernel.unshare(_USER | _PID | _NETWORK | _IPC | _UTS)
        os.write(done, b".")
    finally:
        os.close(done)
        code = os.waitstatus_to_exitcode(os.waitpid(mapper, 0)[1])
    if code:
        raise OSError(code, f"map of users: {os.strerror(code)}")
    if server := os.fork():
        os.closerange(3, 256)  # the server alone speaks with the pool
        os._exit(os.waitstatus_to_exitcode(os.waitpid(server, 0)[1]) & 255)
    kernel.die_with_parent()


def _map_users(process: int) -> None:
    """Give a process in a new user namespace its present user; that of root keeps all users that there are here."""
    maps = {"uid_map": f"{os.getuid()} {os.getuid()} 1", "gid_map": f"{os.getgid()} {os.getgid()} 1"}
    if os.getuid() == 0:
        for name in maps:
            with open(f"/proc/self/{name}") as file:
                lines = [line.split() for line in file]
            maps[name] = "\n".join(f"{inside} {inside} {number}" for inside, _, number in lines)
    else:
        maps = {"setgroups": "deny", **maps}
    for name, text in maps.items():
        with open(f"/proc/{process}/{name}", "w") as file:
            file.write(text)


def fork() -> int:
    """Fork, so that the child is process 1 of a new PID namespace, in which it can't be left by its children."""
    own = os.open("/proc/self/ns/pid", os.O_RDONLY)
    kernel.unshare(_PID)  # it is that of children alone
    child = -1
    try:
        child = os.fork()
        return child
    finally:
        if child:
            kernel.enter_namespace(own, _PID)
        os.close(own)


def enter() -> None:
    """Give this process user and mount namespaces of its own, where it can change nothing but an empty /tmp of 32 MB.

    OSError: the kernel refuses.
    """
    uid, gid = os.getuid(), os.getgid()
    kernel.unshare(_USER | _MOUNT)
    kernel.set_dumpable(True)  # after a change of uid /proc/self/uid_map would belong to root
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    kernel.make_mounts_read_only()
    kernel.mount_empty_tmp()


def probe() -> None:
    """Try all of it, and end this process: with 0 if the kernel allows it, else with an error."""
    become_server()
    if child := fork():
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    enter()
