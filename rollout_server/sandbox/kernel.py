"""Contains a process by what the kernel offers: seccomp, Landlock, limits on resources, and namespaces.

It imports only Python's standard library, because the fork server, which contains programs with it, may run under
another Python than this project. The numbers of the system calls are those of x86_64.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import struct
from collections.abc import Sequence

IS_KNOWN_MACHINE = platform.system() == "Linux" and platform.machine() == "x86_64"

_libc = ctypes.CDLL(None, use_errno=True)
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT, _SECCOMP, _MOUNT_SETATTR = 444, 445, 446, 317, 442
_CAPABILITIES_3, _CAN_IGNORE_MODES, _CAN_READ_ALL = 0x20080522, 1 << 1, 1 << 2
_AT_FDCWD, _AT_RECURSIVE, _MS_PRIVATE = -100, 0x8000, 0x40000
_ALLOWED = {
    "read": 0, "write": 1, "close": 3, "stat": 4, "fstat": 5, "lstat": 6, "poll": 7, "lseek": 8,
    "mmap": 9, "mprotect": 10, "munmap": 11, "brk": 12, "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15,
    "pread64": 17, "pwrite64": 18, "readv": 19, "writev": 20, "access": 21, "pipe": 22, "select": 23,
    "sched_yield": 24, "mremap": 25, "msync": 26, "mincore": 27, "madvise": 28, "dup": 32, "dup2": 33, "pause": 34,
    "nanosleep": 35, "getitimer": 36, "alarm": 37, "setitimer": 38, "getpid": 39, "sendfile": 40, "sendto": 44,
    "recvfrom": 45, "sendmsg": 46, "recvmsg": 47, "shutdown": 48, "getsockname": 51, "getpeername": 52,
    "setsockopt": 54, "getsockopt": 55, "exit": 60, "wait4": 61, "uname": 63, "flock": 73, "fsync": 74,
    "fdatasync": 75, "ftruncate": 77, "getdents": 78, "getcwd": 79, "chdir": 80, "fchdir": 81,
    "rename": 82, "mkdir": 83, "rmdir": 84, "creat": 85, "unlink": 87, "readlink": 89, "umask": 95,
    "gettimeofday": 96, "getrlimit": 97, "getrusage": 98, "sysinfo": 99, "times": 100, "getuid": 102, "getgid": 104,
    "geteuid": 107, "getegid": 108, "getppid": 110, "getpgrp": 111, "getgroups": 115, "getresuid": 118,
    "getresgid": 120, "getpgid": 121, "getsid": 124, "rt_sigpending": 127, "rt_sigtimedwait": 128,
    "rt_sigsuspend": 130, "sigaltstack": 131, "statfs": 137, "fstatfs": 138, "getpriority": 140,
    "sched_getparam": 143, "sched_getscheduler": 145, "sched_get_priority_max": 146, "sched_get_priority_min": 147,
    "arch_prctl": 158, "gettid": 186, "time": 201, "futex": 202, "sched_getaffinity": 204, "getdents64": 217,
    "set_tid_address": 218, "restart_syscall": 219, "fadvise64": 221, "clock_gettime": 228, "clock_getres": 229,
    "clock_nanosleep": 230, "exit_group": 231, "epoll_wait": 232, "epoll_ctl": 233, "waitid": 247,
    "mkdirat": 258, "newfstatat": 262, "unlinkat": 263, "renameat": 264, "readlinkat": 267, "faccessat": 269,
    "pselect6": 270, "ppoll": 271, "set_robust_list": 273, "epoll_pwait": 281,
    "timerfd_create": 283, "eventfd": 284, "fallocate": 285, "timerfd_settime": 286, "timerfd_gettime": 287,
    "eventfd2": 290, "epoll_create1": 291, "dup3": 292, "pipe2": 293, "preadv": 295, "pwritev": 296, "getcpu": 309,
    "renameat2": 316, "getrandom": 318, "membarrier": 324, "statx": 332, "rseq": 334, "faccessat2": 439,
    "epoll_pwait2": 441,
}
"""The system calls that every program may make, with their numbers."""
_ALLOWED_WITH_PROCESSES = {
    "kill": 62, "tgkill": 234, "fork": 57, "vfork": 58, "execve": 59, "execveat": 322, "setpgid": 109, "setsid": 112,
    "symlink": 88, "chmod": 90, "fchmod": 91, "fchmodat": 268,
}
"""The calls that a program in namespaces of its own may make as well."""
_REFUSED = {
    "shmget": 29, "semget": 64, "msgget": 68, "ptrace": 101, "syslog": 103, "personality": 135, "pivot_root": 155,
    "chroot": 161, "acct": 163, "mount": 165, "umount2": 166, "swapon": 167, "swapoff": 168, "reboot": 169,
    "init_module": 175, "quotactl": 179, "mq_open": 240, "kexec_load": 246, "add_key": 248, "request_key": 249,
    "keyctl": 250, "inotify_init": 253, "migrate_pages": 256, "unshare": 272, "move_pages": 279, "inotify_init1": 294,
    "perf_event_open": 298, "fanotify_init": 300, "name_to_handle_at": 303, "open_by_handle_at": 304, "setns": 308,
    "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "finit_module": 313, "memfd_create": 319,
    "kexec_file_load": 320, "bpf": 321, "userfaultfd": 323, "io_uring_setup": 425, "io_uring_enter": 426,
    "io_uring_register": 427, "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432,
    "fspick": 433, "pidfd_open": 434, "pidfd_getfd": 438, "process_madvise": 440, "mount_setattr": 442,
    "landlock_create_ruleset": 444, "memfd_secret": 447, "open_tree_attr": 467,
}
"""The calls that no program may make where all others are allowed, because namespaces contain it: they use memory that
no limit counts, reach other processes, or open parts of the kernel that hardly any program needs."""
_CLONE, _CLONE3, _KILL, _TGKILL, _SOCKET, _SOCKETPAIR, _PRLIMIT, _PRCTL = 56, 435, 62, 234, 41, 53, 302, 157
_OPEN, _OPENAT, _FCNTL, _IOCTL = 2, 257, 72, 16
_CLONE_THREAD, _CLONE_NEW_NAMESPACES = 0x00010000, 0x7E020080
_AF_UNIX, _AF_INET, _AF_INET6, _SOCK_STREAM, _SOCK_KINDS, _PR_SET_NAME = 1, 2, 10, 1, 0xF, 15
_O_ACCMODE, _O_TRUNC = 3, 0x200
_WAYS_TO_OPEN = (os.O_RDONLY, os.O_WRONLY, os.O_RDWR, os.O_WRONLY | _O_TRUNC, os.O_RDWR | _O_TRUNC)
"""Landlock asks nothing of access mode 3, with which the owner of a file can change its flags, and before ABI 3 nothing
of O_TRUNC, which empties a file that is opened for reading too."""
_FILE_COMMANDS = {
    "F_DUPFD": 0, "F_GETFD": 1, "F_SETFD": 2, "F_GETFL": 3, "F_SETFL": 4, "F_GETLK": 5, "F_SETLK": 6, "F_SETLKW": 7,
    "F_OFD_GETLK": 36, "F_OFD_SETLK": 37, "F_OFD_SETLKW": 38, "F_DUPFD_CLOEXEC": 1030, "F_GETPIPE_SZ": 1032,
}
"""The commands of fcntl that every program may give. Others send signals to any process (F_SETOWN), hold up who opens a
file (F_SETLEASE), or take memory that no limit counts (F_SETPIPE_SZ)."""
_DEVICE_COMMANDS = {
    "TCGETS": 0x5401, "TCGETS2": 0x802C542A, "TIOCGPGRP": 0x540F, "TIOCGWINSZ": 0x5413, "FIONREAD": 0x541B,
    "FIONBIO": 0x5421, "FIONCLEX": 0x5450, "FIOCLEX": 0x5451,
}
"""The commands of ioctl that every program may give. Others send signals to any process (FIOSETOWN), or change flags of
files (FS_IOC_SETFLAGS)."""

_ALLOW, _KILL_PROCESS, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_DENY, _NO_SUCH_CALL, _NO_SUCH_COMMAND = _ERROR | errno.EPERM, _ERROR | errno.ENOSYS, _ERROR | errno.ENOTTY
_LOAD, _EQUALS, _AT_LEAST, _AND, _RETURN = 0x20, 0x15, 0x35, 0x54, 0x06
_AUDIT_ARCH_X86_64, _FIRST_X32_CALL = 0xC000003E, 0x40000000
_NUMBER_AT, _ARCH_AT, _ARGUMENTS_AT, _ALL_BITS = 0, 4, 16, 0xFFFFFFFF
_RULE = struct.Struct("HBBI")


def _rule(code: int, value: int, skip_if: int = 0, skip_if_not: int = 0) -> bytes:
    return _RULE.pack(code, skip_if, skip_if_not, value)


def _answer(number: int, answer: int) -> bytes:
    return _rule(_EQUALS, number, 0, 1) + _rule(_RETURN, answer)


def _allow_if(number: int, *conditions: tuple[int, int, Sequence[int]], otherwise: int = _DENY) -> bytes:
    """Return rules that allow a call if each condition (number of the argument, its bits that count, values) holds."""
    rules = []
    for argument, bits, values in conditions:
        rules += [_rule(_LOAD, _ARGUMENTS_AT + 8 * argument), _rule(_AND, bits)]  # all are of 32 bits
        rules += [_rule(_EQUALS, value, len(values) - place) for place, value in enumerate(values)]
        rules.append(_rule(_RETURN, otherwise))
    return b"".join((_rule(_EQUALS, number, 0, len(rules) + 1), *rules, _rule(_RETURN, _ALLOW)))


_HEAD = b"".join((
    _rule(_LOAD, _ARCH_AT), _rule(_EQUALS, _AUDIT_ARCH_X86_64, 1, 0), _rule(_RETURN, _KILL_PROCESS),
    _rule(_LOAD, _NUMBER_AT), _rule(_AT_LEAST, _FIRST_X32_CALL, 0, 1), _rule(_RETURN, _NO_SUCH_CALL),
))  # fmt: skip
"""The beginning of a BPF program: calls of other machines are none. After it the number of the call is loaded."""
_NO_CLONE3 = _answer(_CLONE3, _NO_SUCH_CALL)
"""Libraries then take clone, whose flags a filter can read."""
_CLONE_WITHOUT_NAMESPACES = _allow_if(_CLONE, (0, _CLONE_NEW_NAMESPACES, [0]))
_CLONE_OF_THREADS = _allow_if(_CLONE, (0, _CLONE_NEW_NAMESPACES | _CLONE_THREAD, [_CLONE_THREAD]))


def refusing_filter() -> bytes:
    """Return a BPF program that makes the calls in _REFUSED, new namespaces and sockets but those of Unix and IP fail
    with EPERM, and allows all other calls.
    """
    sockets = _allow_if(_SOCKET, (0, _ALL_BITS, [_AF_UNIX, _AF_INET, _AF_INET6]))
    pairs = _allow_if(_SOCKETPAIR, (0, _ALL_BITS, [_AF_UNIX]))
    refused = b"".join(_answer(number, _DENY) for number in _REFUSED.values())
    return _HEAD + _CLONE_WITHOUT_NAMESPACES + _NO_CLONE3 + sockets + pairs + refused + _rule(_RETURN, _ALLOW)


def seccomp_filter(pid: int, has_processes: bool) -> bytes:
    """Return a BPF program that allows the calls above, and makes all others fail with EPERM.

    Args:
        pid: the process that is contained, to which alone it may send signals.
        has_processes: whether it may fork and execute programs, because it has namespaces of its own.
    """
    if has_processes:
        rules = [_CLONE_WITHOUT_NAMESPACES]
    else:
        rules = [_CLONE_OF_THREADS, *(_allow_if(number, (0, _ALL_BITS, [pid])) for number in (_KILL, _TGKILL))]
    numbers = (*_ALLOWED.values(), *(_ALLOWED_WITH_PROCESSES.values() if has_processes else ()))
    return b"".join((
        _HEAD, *rules, _NO_CLONE3,
        # asyncio has a pair of streams; a datagram can be sent to any socket
        _allow_if(_SOCKETPAIR, (0, _ALL_BITS, [_AF_UNIX]), (1, _SOCK_KINDS, [_SOCK_STREAM])),
        _allow_if(_PRLIMIT, (0, _ALL_BITS, [0])),  # of the process itself
        _allow_if(_PRCTL, (0, _ALL_BITS, [_PR_SET_NAME])),
        _allow_if(_OPEN, (1, _O_ACCMODE | _O_TRUNC, _WAYS_TO_OPEN)),
        _allow_if(_OPENAT, (2, _O_ACCMODE | _O_TRUNC, _WAYS_TO_OPEN)),
        _allow_if(_FCNTL, (1, _ALL_BITS, [*_FILE_COMMANDS.values()])),
        _allow_if(_IOCTL, (1, _ALL_BITS, [*_DEVICE_COMMANDS.values()]), otherwise=_NO_SUCH_COMMAND),
        *(_answer(number, _ALLOW) for number in numbers), _rule(_RETURN, _DENY),
    ))  # fmt: skip


class _FilterProgram(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("rules", ctypes.c_char_p)]


def apply_filter(rules: bytes) -> None:
    """Apply a seccomp filter to this process and all that it starts, for good. OSError: the kernel refuses."""
    program = _FilterProgram(len(rules) // _RULE.size, rules)
    _no_new_privileges()
    _check(_libc.syscall(_SECCOMP, 1, 0, ctypes.byref(program)), "seccomp")


def landlock_abi() -> int:
    """Return the version of Landlock that the kernel has, from 1; 0: it has none."""
    return max(0, _libc.syscall(_LANDLOCK_CREATE, None, 0, 1)) if IS_KNOWN_MACHINE else 0


def landlock_ruleset(readable: list[str], writable: list[str]) -> int:
    """Return the descriptor of a ruleset: all that the kernel can forbid is, but reading and writing below paths.

    It forbids files, from ABI 4 on TCP too, and from 6 on abstract Unix sockets and signals to others.
    """
    abi = landlock_abi()
    rights = {1: 0x1FFF, 2: 0x3FFF, 3: 0x7FFF, 4: 0x7FFF}.get(abi, 0xFFFF)
    attributes = struct.pack("QQQ", rights, 3 if abi >= 4 else 0, 3 if abi >= 6 else 0)
    size = 8 if abi < 4 else 16 if abi < 6 else 24
    ruleset: int = _check(_libc.syscall(_LANDLOCK_CREATE, attributes, size, 0), "landlock_create_ruleset")
    read = 0x1 | 0x4 | 0x8  # execute, read a file, list a folder
    write = read | 0x2 | 0x10 | 0x20 | 0x80 | 0x100 | (rights & 0x4000)  # make and remove files and folders, truncate
    on_files = 0x1 | 0x2 | 0x4 | 0x4000 | 0x8000
    for paths, access in ((readable, read), (writable, write)):
        for path in filter(os.path.exists, paths):
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
            allowed = access & rights & (0xFFFF if os.path.isdir(path) else on_files)
            rule = struct.pack("=Qi", allowed, place)
            _check(_libc.syscall(_LANDLOCK_ADD, ruleset, 1, rule, 0), f"landlock_add_rule {path}")
            os.close(place)
    return ruleset


def restrict_by_landlock(ruleset: int) -> None:
    """Apply a ruleset to this process and all that it starts, for good. OSError: the kernel refuses."""
    _no_new_privileges()
    _check(_libc.syscall(_LANDLOCK_RESTRICT, ruleset, 0), "landlock_restrict_self")


def limit_resources(memory_bytes: int, output_bytes: int, cpu_s: float, processes: int) -> None:
    """Set the limits of this process and of those that it starts; `processes` counts threads too."""
    limits = {
        resource.RLIMIT_AS: memory_bytes, resource.RLIMIT_FSIZE: output_bytes, resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0, resource.RLIMIT_STACK: 64 << 20, resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_MEMLOCK: 0, resource.RLIMIT_NPROC: processes,
    }  # fmt: skip
    for name, value in limits.items():
        resource.setrlimit(name, (value, value))
    resource.setrlimit(resource.RLIMIT_CPU, (int(cpu_s + 1), int(cpu_s + 2)))


def unshare(flags: int) -> None:
    """Give this process namespaces of its own, and its children to come a PID namespace. OSError: the kernel refuses.
    """
    _check(_libc.unshare(flags), "unshare")


def enter_namespace(file: int, flag: int) -> None:
    """Enter the namespace that a descriptor names. OSError: the kernel refuses."""
    _check(_libc.setns(file, flag), "setns")


def make_mounts_read_only() -> None:
    """Let nobody, not even their owner, change files or their modes in this mount namespace; other namespaces do not
    notice. OSError: the kernel refuses.
    """
    attributes = struct.pack("QQQQ", 1, 0, _MS_PRIVATE, 0)
    _check(_libc.syscall(_MOUNT_SETATTR, _AT_FDCWD, b"/", _AT_RECURSIVE, attributes, len(attributes)), "mount_setattr")


def mount_empty_tmp() -> None:
    """Mount an empty /tmp of 32 MB and 2,000 files, which only this mount namespace has. OSError: the kernel refuses.
    """
    options = b"size=32m,nr_inodes=2k,mode=1777"
    _check(_libc.mount(b"tmpfs", b"/tmp", b"tmpfs", 2 | 4, options), "mount of a tmpfs")


def become_user(uid: int, *, reads_as_root: bool) -> None:
    """Turn this process of root into one of a user without rights, for good. OSError: the kernel refuses.

    Args:
        reads_as_root: keep the one right to read what is closed to others, of all that Landlock lets it read.
    """
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    if reads_as_root:
        _check(_libc.prctl(8, 1, 0, 0, 0), "prctl")  # a change of the user leaves the capabilities that are permitted
    os.setresuid(uid, uid, uid)
    if reads_as_root:
        header, held = struct.pack("Ii", _CAPABILITIES_3, 0), ctypes.create_string_buffer(24)
        _check(_libc.capget(header, held), "capget")
        permitted = struct.unpack("6I", held.raw)[1]
        # Docker gives root only the wider one. Landlock and seccomp forbid all else that it allows.
        kept = next((each for each in (_CAN_READ_ALL, _CAN_IGNORE_MODES) if permitted & each), 0)
        _check(_libc.capset(header, struct.pack("6I", kept, kept, 0, 0, 0, 0)), "capset")


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends. A change of uid undoes this."""
    _check(_libc.prctl(1, 9, 0, 0, 0), "prctl")


def set_dumpable(is_dumpable: bool) -> None:
    """Allow or forbid that processes of the same user read the memory of this one."""
    _check(_libc.prctl(4, int(is_dumpable), 0, 0, 0), "prctl")


def _no_new_privileges() -> None:
    _check(_libc.prctl(38, 1, 0, 0, 0), "prctl")


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result
