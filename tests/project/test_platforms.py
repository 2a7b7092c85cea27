# SPDX-License-Identifier: Apache-2.0
"""What only some systems have: each use is listed in docs/platforms.md, and training goes on without any of it."""

import ast
import os
import re
import subprocess
import sys

import pytest

from fedvitals.errors import FedvitalsError
from support.paths import ROOT

SOURCE = ROOT / "src" / "fedvitals"
MODULES = {"fcntl", "readline", "resource", "termios", "pwd", "grp", "pty", "tty", "syslog", "posix"}
CALLS = {
    "os": {
        "fork", "forkpty", "register_at_fork", "wait", "waitpid", "wait3", "wait4", "killpg", "setsid", "setpgid",
        "getpgid", "getuid", "geteuid", "getgid", "getegid", "getgroups", "pread", "pwrite", "preadv", "pwritev",
        "sched_getaffinity", "sched_setaffinity", "sched_yield", "nice", "sysconf", "statvfs", "fstatvfs", "uname",
        "getloadavg", "mkfifo", "mknod", "chown", "fchown", "lchown", "fchmod", "chroot", "ttyname", "openpty",
        "posix_fadvise", "posix_fallocate", "sendfile", "O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_DIRECTORY",
        "O_SYNC", "WNOHANG", "memfd_create", "pidfd_open", "setpriority", "getpriority", "confstr", "ctermid", "lockf",
        "pipe2",
    },
    "signal": {
        "SIGKILL", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGCHLD", "SIGPIPE", "SIGQUIT", "SIGTSTP", "SIGCONT",
        "SIGSTOP", "SIGWINCH", "SIGXCPU", "alarm", "setitimer", "getitimer", "pthread_kill", "pthread_sigmask", "pause",
        "sigwait", "siginterrupt",
    },
    "time": {"clock_gettime", "clock_settime", "pthread_getcpuclockid", "CLOCK_BOOTTIME", "CLOCK_MONOTONIC"},
    "mmap": {"PROT_READ", "PROT_WRITE", "PROT_EXEC", "MAP_ANONYMOUS"},
}  # fmt: skip
FOLDERS = ("/proc", "/sys")
PROBE = "os.kill(process, 0)"  # whether a process exists; on Windows it sends Ctrl-C instead


def uses_in(text: str) -> set[str]:
    """What a module uses that only some systems have: modules, calls and signals, and files of Linux."""
    uses = set()
    tree = ast.parse(text)
    docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                uses |= {name.name for name in names} & MODULES
            case ast.ImportFrom(module=str(module)) if module in MODULES:
                uses.add(module)
            case ast.Call(func=ast.Attribute(value=ast.Name(id="os"), attr="kill"), args=[_, ast.Constant(value=0)]):
                uses.add(PROBE)
            case ast.Attribute(value=ast.Name(id=module), attr=name) if name in CALLS.get(module, ()):
                uses.add(f"{module}.{name}")
            case ast.Call(func=ast.Name(id="hasattr"), args=[ast.Name(id=module), ast.Constant(value=str(name))]):
                uses |= {f"{module}.{name}"} if name in CALLS.get(module, ()) else set()
            case ast.Constant(value=str(value)) if node not in docstrings:
                uses |= {folder for folder in FOLDERS if value == folder or value.startswith(f"{folder}/")}
    return uses


def listed() -> set[tuple[str, str]]:
    """The rows of the table, as pairs of call and file."""
    text = (ROOT / "docs/platforms.md").read_text(encoding="utf-8").partition("## What only some systems have")[2]
    rows = [line.split("|")[1:3] for line in text.splitlines() if line.startswith("| `")]
    return {
        (call, place)
        for calls, places in rows
        for call in re.findall(r"`([^`]+)`", calls)
        for place in re.findall(r"`([^`]+)`", places)
    }


def test_every_use_is_listed_and_every_row_is_a_use():
    used = {
        (use, str(path.relative_to(SOURCE).as_posix()))
        for path in SOURCE.rglob("*.py")
        for use in uses_in(path.read_text(encoding="utf-8"))
    }
    assert used - listed() == set(), "not in docs/platforms.md"
    assert listed() - used == set(), "in docs/platforms.md, but nowhere used"


@pytest.mark.parametrize(
    ("code", "use"),
    [
        ("import fcntl", "fcntl"),
        ("import os\nos.fork()", "os.fork"),
        ("os.kill(other, 0)", PROBE),
        ("x = open('/proc/self/stat')", "/proc"),
    ],
)
def test_uses_are_found(code, use):
    assert uses_in(code) == {use}


WITHOUT = f"""
import builtins, io, os, pathlib, signal, sys, time
import torch, torch._dynamo, subprocess, multiprocessing, concurrent.futures, asyncio, tempfile, shutil
import click, rich.console, numpy, msgspec, sqlite3, ssl, socket  # what others do at import is not what is tried here
for name in {sorted(MODULES - {"posix", "pwd", "grp"})!r}:
    sys.modules[name] = None  # an import of it raises ImportError
for owner, names in ((os, {sorted(CALLS["os"] - {"waitpid"})!r}), (signal, {sorted(CALLS["signal"])!r}),
                     (time, {sorted(CALLS["time"])!r})):
    for name in names:
        if hasattr(owner, name):
            delattr(owner, name)
def hidden(opened):
    def call(path, *arguments, **settings):
        if str(path).startswith({FOLDERS!r}):
            raise FileNotFoundError(path)
        return opened(path, *arguments, **settings)
    return call
builtins.open, io.open, os.open = hidden(open), hidden(io.open), hidden(os.open)
"""
TRAINING = """
import fedvitals as fv
from torch import nn
torch.manual_seed(0)
model = nn.Linear(4, 3)
with fv.Monitor("runs.db", run="small", strict=True) as monitor:
    for r in range(3):
        with monitor.round(r, model):
            for name in ("a", "b", "c", "d"):
                local = nn.Linear(4, 3)
                local.load_state_dict(model.state_dict())
                optimizer = torch.optim.SGD(local.parameters(), 0.1)
                x, y = torch.randn(16, 4), torch.randint(0, 3, (16,))
                with monitor.client(name, local, data=[(x, y)], loss=nn.functional.cross_entropy):
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(local(x), y).backward()
                    optimizer.step()
            monitor.log(accuracy=0.5 + r / 10)
assert monitor.lost == 0
from fedvitals.cli.main import main
for words in (["runs"], ["show", "small", "--json"], ["doctor"], ["query", "SELECT COUNT(*) FROM metrics"]):
    try:
        main(words)
    except SystemExit as end:
        assert end.code in (0, 1), (words, end.code)
"""


def test_no_process_is_sent_ctrl_c_on_windows_to_see_whether_it_exists(monkeypatch):
    pytest.importorskip("torch")
    from fedvitals.probes.ranks import RankMark
    from fedvitals.replay.debugger.round_gate import is_process

    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    mark = RankMark.own(1)
    mark.process = gone.pid
    assert mark.is_gone
    assert not is_process(gone.pid)
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(os, "kill", lambda *_: pytest.fail("on Windows this is Ctrl-C"))
    assert not mark.is_gone
    assert is_process(gone.pid)


def test_what_cannot_be_started_on_windows_says_so(monkeypatch):
    from fedvitals.hosts.flower.superlink import termination_as_exit

    monkeypatch.delattr("signal.SIGHUP")
    with pytest.raises(FedvitalsError, match="needs Linux or macOS"), termination_as_exit():
        pytest.fail("it began")


@pytest.mark.thorough
def test_training_and_reading_work_without_what_windows_lacks(tmp_path):
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT + TRAINING], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-3000:]
    assert (tmp_path / "runs.db").stat().st_size > 0
    assert not (tmp_path / "runs.db.lock").exists()
    assert "small" in result.stdout


@pytest.mark.thorough
def test_lab_trains_in_one_process_without_fork(tmp_path):
    code = """
from fedvitals import lab
result = lab.run(lab.Experiment(dataset="digits", model="mlp", clients=4, rounds=2, local=lab.Local(iterations=2)))
print(result.accuracy)
"""
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT + code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
