"""Seccomp rules: system calls that programs under test may not make, by pyseccomp (libseccomp)."""

import errno
import importlib.util
import os
import socket
from functools import cache
from pathlib import Path
from typing import Any

from megatron_rl.rewards.code.harness import make_filter

Rule = tuple[str, int, list[tuple[int, str, Any, int]]]
"""System call, error number, and conditions (argument, operator, value, masked value)."""

CLONE_THREAD = 0x00010000
_NAMESPACES = 0x7E020080  # CLONE_NEW{NS,CGROUP,UTS,IPC,USER,PID,NET,TIME}
_CALLS = (
    "ptrace process_vm_readv process_vm_writev process_madvise mount umount2 pivot_root chroot"
    " setns unshare fsopen fsmount fsconfig move_mount open_tree mount_setattr bpf perf_event_open"
    " userfaultfd io_uring_setup io_uring_enter io_uring_register keyctl add_key request_key"
    " kexec_load kexec_file_load init_module finit_module delete_module open_by_handle_at"
    " name_to_handle_at reboot swapon swapoff acct settimeofday clock_settime adjtimex sethostname"
    " setdomainname iopl ioperm quotactl syslog vmsplice kcmp pidfd_getfd personality"
)
_WEAK_CALLS = (
    "fork vfork execve execveat kill tkill pidfd_open pidfd_send_signal rt_sigqueueinfo"
    " rt_tgsigqueueinfo creat unlink unlinkat rename renameat renameat2 mkdir mkdirat rmdir"
    " symlink symlinkat link linkat chmod fchmod fchmodat chown fchown fchownat lchown truncate"
    " mknod mknodat utime utimes utimensat futimesat setxattr lsetxattr fsetxattr removexattr"
    " lremovexattr fremovexattr openat2 shmget shmat msgget semget mq_open setpriority"
    " sched_setscheduler"
)


def library() -> str:
    """Return the folder of pyseccomp, for an isolated interpreter; empty if it is not installed."""
    spec = importlib.util.find_spec("pyseccomp")
    return str(Path(spec.origin).parent) if spec is not None and spec.origin else ""


_COMMON: list[Rule] = [
    *((name, errno.EPERM, []) for name in _CALLS.split()),
    # glibc falls back from clone3, whose flags a filter cannot see, to clone.
    ("clone3", errno.ENOSYS, []),
    ("socket", errno.EPERM, [(0, "NE", int(socket.AF_UNIX), 0)]),
]


def strong_rules() -> list[Rule]:
    """Return the rules inside namespaces: no further namespaces, kernel interfaces, network."""
    flags = [bit for bit in (1 << i for i in range(32)) if bit & _NAMESPACES]
    return _COMMON + [("clone", errno.EPERM, [(0, "MASKED_EQ", bit, bit)]) for bit in flags]


def weak_rules() -> list[Rule]:
    """Return the rules without namespaces: also no process, signal to others, write to a file."""
    calls = (*_WEAK_CALLS.split(), "socket", "socketpair")
    rules = _COMMON + [(name, errno.EPERM, []) for name in calls]
    rules.append(("clone", errno.EPERM, [(0, "MASKED_EQ", CLONE_THREAD, 0)]))
    rules.append(("tgkill", errno.EPERM, [(0, "NE", "pid", 0)]))
    for call, position in (("open", 1), ("openat", 2)):
        for flag in (os.O_WRONLY, os.O_RDWR, os.O_CREAT, os.O_TRUNC):
            rules.append((call, errno.EPERM, [(position, "MASKED_EQ", flag, flag)]))
    return rules


@cache
def strong_program() -> bytes | None:
    """Return the compiled filter for bubblewrap; None without pyseccomp."""
    if not library():
        return None
    fd = os.memfd_create("seccomp")
    with os.fdopen(fd, "w+b") as file:
        make_filter(strong_rules()).export_bpf(file)
        file.seek(0)
        return file.read()
