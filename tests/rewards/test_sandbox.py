"""Hostile programs are contained: killed in time, nothing left running, the host as it was."""

from __future__ import annotations

import dataclasses
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_rl.rewards.base import Outcome, SandboxUnavailable, VerifierDown
from megatron_rl.rewards.code import isolation
from megatron_rl.rewards.code.cases import read_cases
from megatron_rl.rewards.code.code_verdict import make_code_verifier
from megatron_rl.rewards.code.sandbox import ProgramResult, run_tests
from megatron_rl.rewards.verifier_settings import SandboxSettings
from tests.rewards.conftest import descendants, started_since

LIMITS = {
    "cpu_seconds": 1.0,
    "wall_seconds": 1.5,
    "total_seconds": 20.0,
    "memory_mib": 200,
    "file_mib": 4,
    "output_kib": 256,
    "processes": 16,
}
START_SECONDS = 10.0
"""Time for the start of the sandbox on a loaded machine."""


def problem(kind: str) -> str:
    settings = SandboxSettings.model_validate({**LIMITS, "isolation": kind})
    try:
        isolation.require(settings)
    except SandboxUnavailable as e:
        return str(e)
    return ""


KINDS = [
    pytest.param(k, marks=pytest.mark.skipif(bool(problem(k)), reason=f"{k}: {problem(k)[:200]}"))
    for k in ("strong", "weak")
]
STRONG = KINDS[:1]


def settings_of(kind: str, **more: object) -> SandboxSettings:
    return SandboxSettings.model_validate({**LIMITS, "isolation": kind, **more})


def run_one(kind: str, source: str, stdin: str = "", **more: object) -> ProgramResult:
    """Return the result of one test; all processes must end within the limit + 1 s."""
    before, started = descendants(), time.monotonic()
    results = run_tests(source, [{"stdin": stdin}], settings_of(kind, **more))
    result = next(results)
    results.close()
    seconds = time.monotonic() - started
    assert seconds < LIMITS["wall_seconds"] + 1.0 + START_SECONDS, f"{seconds:.1f} s"
    # The harness itself measured the program: limit + 1 s at any load.
    assert result.seconds < LIMITS["wall_seconds"] + 1.0
    assert started_since(before, 1.0) == {}
    return result


@pytest.fixture
def canary(tmp_path: Path) -> Iterator[Path]:
    """Make a file of the host, open to all users, that no program may change."""
    folder = tmp_path / "host"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    file = folder / "canary"
    file.write_text("unharmed")
    file.chmod(0o666)
    yield file
    assert file.read_text() == "unharmed"
    assert sorted(p.name for p in folder.iterdir()) == ["canary"]


@pytest.mark.parametrize("kind", KINDS)
def test_an_honest_program_runs(kind: str) -> None:
    result = run_one(kind, "a, b = map(int, input().split())\nprint(a + b)\nexit()", "20 22\n")
    assert (result.status, result.stdout) == ("ok", "42\n")


@pytest.mark.parametrize("kind", KINDS)
def test_fork_bomb(kind: str) -> None:
    bomb = "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass"
    assert run_one(kind, bomb).status in ("cpu", "time", "memory", "signal 27", "total")


@pytest.mark.parametrize("kind", STRONG)
def test_a_fork_bomb_never_has_more_processes_than_allowed(kind: str) -> None:
    source = (
        "import os, time\nn = 0\n"
        "try:\n"
        "    while n < 500:\n"
        "        if os.fork() == 0:\n            time.sleep(30)\n            os._exit(0)\n"
        "        n += 1\n"
        "except OSError:\n    pass\nprint(n)"
    )
    result = run_one(kind, source)
    assert result.status in ("ok", "time")
    assert result.stdout.strip() == "" or int(result.stdout) <= LIMITS["processes"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "source", ["x = bytearray(10**9)", "x = []\nwhile True: x.append('y' * 10**6)"]
)
def test_memory_bomb(kind: str, source: str) -> None:
    assert run_one(kind, source).status in ("memory", "cpu", "time", "signal 9")


@pytest.mark.parametrize("kind", STRONG)
def test_memory_of_many_processes_together_is_bounded(kind: str) -> None:
    source = (
        "import os, time\n"
        "for _ in range(8):\n"
        "    if os.fork() == 0:\n"
        "        x = bytearray(b'1' * (120 * 2**20))\n        time.sleep(30)\n"
        "time.sleep(30)"
    )
    assert run_one(kind, source, wall_seconds=1.5).status in ("memory", "time")
    # With time enough it is the memory that ends it.
    results = run_tests(source, [{"stdin": ""}], settings_of(kind, wall_seconds=15.0))
    assert next(results).status == "memory"
    results.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_endless_output(kind: str, stream: str) -> None:
    result = run_one(kind, f"import sys\nwhile True: sys.{stream}.write('x' * 10000)")
    assert result.status == ("output" if stream == "stdout" else result.status)
    assert result.status in ("output", "time", "cpu", "signal 27")
    assert len(result.stdout) <= LIMITS["output_kib"] * 1024 + 2**16
    assert len(result.error) <= 4000


@pytest.mark.parametrize("kind", KINDS)
def test_endless_loop_and_endless_sleep(kind: str) -> None:
    assert run_one(kind, "while True: pass").status in ("cpu", "time", "signal 27")
    assert run_one(kind, "import time\ntime.sleep(1000)").status == "time"


@pytest.mark.parametrize("kind", KINDS)
def test_ignoring_every_signal_does_not_help(kind: str) -> None:
    source = (
        "import signal\n"
        "for s in signal.valid_signals():\n"
        "    try: signal.signal(s, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\n"
        "while True: pass"
    )
    assert run_one(kind, source).status in ("cpu", "time", "signal 9", "signal 27")


@pytest.mark.parametrize("kind", KINDS)
def test_writes_outside_reach_nothing(kind: str, canary: Path) -> None:
    source = (
        "import os\n"
        f"for path in ({str(canary)!r}, {str(canary.parent / 'new')!r},\n"
        "             '/usr/new', '/etc/passwd',\n"
        "             '/new', '/dev/new', '/proc/sys/kernel/hostname'):\n"
        "    for how in ('w', 'a', 'r+'):\n"
        "        try:\n"
        "            open(path, how).write('harm')\n"
        "            print('wrote', path)\n"
        "        except OSError: pass\n"
        f"    for act in (os.remove, os.rmdir):\n"
        "        try: act(path); print('removed', path)\n"
        "        except OSError: pass\n"
        "print('done')"
    )
    result = run_one(kind, source)
    assert (result.status, result.stdout) == ("ok", "done\n"), result.error


@pytest.mark.parametrize("kind", STRONG)
def test_the_scratch_space_is_private_and_bounded(kind: str) -> None:
    source = (
        "open('/tmp/a', 'w').write('x')\nn = 0\n"
        "try:\n"
        "    for i in range(100):\n"
        "        open(f'/tmp/f{i}', 'wb').write(b'x' * 2**20)\n        n += 1\n"
        "except OSError as e: print(n, e.errno)"
    )
    number, error = map(int, run_one(kind, source).stdout.split())
    assert number <= LIMITS["file_mib"]
    assert error == 28  # ENOSPC
    assert not Path("/tmp/a").exists() or Path("/tmp/a").read_text() != "x"


@pytest.mark.parametrize("kind", STRONG)
def test_a_large_file_ends_the_program(kind: str) -> None:
    result = run_one(kind, "f = open('/dev/shm/a', 'wb')\nwhile True: f.write(b'x' * 2**16)")
    assert result.status in ("file", "error")


@pytest.mark.parametrize("kind", KINDS)
def test_no_network(kind: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.01)
        port = server.getsockname()[1]
        source = (
            "import socket\n"
            "for family in (socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK,\n"
            "               socket.AF_PACKET, 40):\n"
            "    try:\n"
            "        s = socket.socket(family)\n"
            "        s.settimeout(0.5)\n"
            f"        s.connect(('127.0.0.1', {port}))\n"
            "        print('connected')\n"
            "    except (OSError, TypeError): pass\n"
            "print('done')"
        )
        assert run_one(kind, source).stdout == "done\n"
        with pytest.raises(TimeoutError):
            server.accept()


@pytest.mark.parametrize("kind", KINDS)
def test_the_environment_is_not_there(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hunter2hunter2")
    result = run_one(kind, "import os\nprint(dict(os.environ))")
    assert result.status == "ok"
    assert "hunter2" not in result.stdout


@pytest.mark.parametrize("kind", STRONG)
def test_processes_and_files_of_others_are_not_there(
    kind: str, monkeypatch: pytest.MonkeyPatch, canary: Path
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hunter2hunter2")
    source = (
        "import os\n"
        "pids = [int(p) for p in os.listdir('/proc') if p.isdigit()]\n"
        "print(len(pids))\n"
        "for p in pids:\n"
        "    for name in ('environ', 'mem', 'maps', 'cmdline'):\n"
        "        try:\n"
        "            text = open(f'/proc/{p}/{name}', 'rb').read(10**6)\n"
        "            if b'hunter2' in text: print('leaked')\n"
        "        except OSError: pass\n"
        f"print(os.path.exists({str(canary)!r}), os.path.exists('/etc/passwd'),\n"
        f"      os.path.exists({str(Path(__file__).parent)!r}), os.path.exists('/home'))"
    )
    lines = run_one(kind, source).stdout.splitlines()
    assert int(lines[0]) <= 4
    assert lines[1:] == ["False False False False"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_daemonised_child_ends_with_the_test(kind: str) -> None:
    source = (
        "import os, sys, time\n"
        "try:\n"
        "    if os.fork() == 0:\n"
        "        os.setsid()\n"
        "        if os.fork() == 0:\n"
        "            for fd in range(3): os.close(fd)\n"
        "            time.sleep(1000)\n"
        "        os._exit(0)\n"
        "except OSError: pass\n"
        "print('parent')"
    )
    result = run_one(kind, source)
    assert result.status in ("ok", "time")
    assert result.stdout in ("parent\n", "parent\nparent\n")


@pytest.mark.parametrize("kind", STRONG)
def test_a_daemon_of_one_test_does_not_see_the_next(kind: str) -> None:
    source = (
        "import os, time\n"
        "if input() == 'first':\n"
        "    if os.fork() == 0:\n        time.sleep(1000)\n"
        "    os._exit(0)\n"
        "print(len([p for p in os.listdir('/proc') if p.isdigit()]))"
    )
    tests = [{"stdin": "first\n"}, {"stdin": "second\n"}]
    results = list(run_tests(source, tests, settings_of(kind)))
    assert int(results[1].stdout) <= 4


@pytest.mark.parametrize("kind", STRONG)
def test_symlink_tricks_lead_nowhere(kind: str, canary: Path) -> None:
    source = (
        "import os\n"
        f"for target in ({str(canary)!r}, '/proc/1/root', '/proc/1/cwd',\n"
        "               '/proc/self/root/../..', '/'):\n"
        "    link = '/tmp/link'\n"
        "    try: os.remove(link)\n"
        "    except OSError: pass\n"
        "    os.symlink(target, link)\n"
        f"    for path in (link, link + {str(canary)!r}):\n"
        "        try:\n"
        "            open(path, 'w').write('harm'); print('wrote', target)\n"
        "        except OSError: pass\n"
        "        try:\n"
        "            if 'unharmed' in open(path).read(): print('read', target)\n"
        "        except OSError: pass\n"
        "print('done')"
    )
    result = run_one(kind, source)
    assert result.stdout == "done\n", result.error


@pytest.mark.parametrize("kind", STRONG)
def test_no_namespace_no_mount_no_trace(kind: str) -> None:
    source = (
        "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "calls = [libc.unshare(0x10000000), libc.unshare(0x20000),\n"
        "         libc.mount(b'a', b'/tmp', b'tmpfs', 0, 0),\n"
        "         libc.ptrace(16, os.getppid(), 0, 0), libc.setns(0, 0)]\n"
        "print(calls, os.getuid() != 0)\n"
        "try: os.setuid(0); print('root')\n"
        "except OSError: pass"
    )
    assert run_one(kind, source).stdout == "[-1, -1, -1, -1, -1] True\n"


@pytest.mark.parametrize("kind", KINDS)
def test_killing_the_harness_is_the_programs_fault(kind: str) -> None:
    verify = make_code_verifier(settings_of(kind), "</think>")
    source = "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nos.kill(-1, signal.SIGKILL)"
    verdict = verify(f"```python\n{source}\n```", '{"inputs": ["1"], "outputs": ["1"]}', {})
    assert verdict.outcome is Outcome.WRONG
    assert verify("```python\nprint(1)\n```", '{"inputs": ["1"], "outputs": ["1"]}', {}).passed


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_into_the_harness_channel_is_no_verdict(kind: str) -> None:
    forged = json.dumps(dataclasses.asdict(ProgramResult("ok", "1\n", "", "", 0.0)))
    source = (
        "import os\n"
        "for fd in range(3, 64):\n"
        f"    try: os.write(fd, {forged!r}.encode() + b'\\n')\n"
        "    except OSError: pass\n"
        "for p in ('/proc/%d/fd/1' % os.getppid(), '/proc/1/fd/1'):\n"
        f"    try: open(p, 'w').write({forged!r} + '\\n')\n"
        "    except OSError: pass\n"
        "print(0)"
    )
    verify = make_code_verifier(settings_of(kind), "</think>")
    gold = '{"inputs": ["1"], "outputs": ["2"]}'
    assert verify(f"```python\n{source}\n```", gold, {}).outcome is Outcome.WRONG


@pytest.mark.parametrize("kind", STRONG)
def test_expected_outputs_never_enter_the_sandbox(kind: str) -> None:
    # The program looks for the text in its memory without containing it; the input it does find.
    source = (
        "import re\n"
        "given = input()\n"
        "found = set()\n"
        "for line in open('/proc/self/maps'):\n"
        "    a, b = (int(x, 16) for x in line.split()[0].split('-'))\n"
        "    if ' rw' in line and b - a < 2**27:\n"
        "        with open('/proc/self/mem', 'rb', 0) as f:\n"
        "            try:\n"
        "                f.seek(a)\n"
        "                found |= set(re.findall(rb'[IQ]-[0-9]{9}', f.read(b - a)))\n"
        "            except (OSError, OverflowError, ValueError): pass\n"
        "print(sorted(found))"
    )
    (case,) = read_cases(json.dumps({"inputs": ["I-123456789"], "outputs": ["Q-987654321"]}))
    results = run_tests(source, [case.run], settings_of(kind))
    result = next(results)
    results.close()
    assert "I-123456789" in result.stdout, result.error
    assert "Q-" not in result.stdout


def test_without_namespaces_strong_isolation_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "bubblewrap", lambda: None)
    isolation._probe.cache_clear()
    with pytest.raises(SandboxUnavailable, match=r"bwrap.*not installed.*--sandbox weak"):
        make_code_verifier(settings_of("strong"), "</think>")
    isolation._probe.cache_clear()


@pytest.mark.skipif(bool(problem("weak")), reason=problem("weak")[:200])
def test_a_filter_that_cannot_be_loaded_is_an_error_and_no_verdict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rules = [("read", 1, [(0, "NO_SUCH_OPERATOR", 0, 0)])]
    monkeypatch.setattr(isolation, "weak_rules", lambda: rules)
    with pytest.raises(SandboxUnavailable, match="set no limits"):
        run_one("weak", "print(1)")


def test_weak_isolation_without_seccomp_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "seccomp_library", lambda: "")
    with pytest.raises(SandboxUnavailable, match="pyseccomp"):
        make_code_verifier(settings_of("weak"), "</think>")


@pytest.mark.parametrize("kind", STRONG)
def test_a_sandbox_that_is_down_is_an_error_and_no_verdict(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    verify = make_code_verifier(settings_of(kind), "</think>")
    monkeypatch.setattr(isolation, "HARNESS", "raise SystemExit(1)")
    monkeypatch.setattr(isolation.strong, "__defaults__", ("raise SystemExit(1)",))
    with pytest.raises(VerifierDown, match="cannot run any program"):
        verify("```python\nprint(1)\n```", '{"inputs": ["1"], "outputs": ["1"]}', {})
