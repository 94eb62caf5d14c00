"""What a worker's code can do to this machine from within a cage: nothing; and what becomes of the
question that let it try.

Every hostile text runs on this kernel, in a cage of this user's; and, where this user is root, in
one of an ordinary user's as well.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from deadlines import until

from halteres.environments import cage, cage_root
from halteres.environments.cage import WorkerLimits, WorkerPool, cage_missing
from halteres.environments.worker_process import (
    WorkerExited,
    WorkerLost,
    WorkerOutOfMemory,
    WorkerRefused,
    WorkerSaidTooMuch,
    WorkerTimedOut,
)
from halteres.errors import EnvironmentFailed, InvalidConfig
from halteres.process import Ended

from . import question_worker

WITHIN_S = 20.0

LIMITS = WorkerLimits()

GONE_WITHIN_S = 5.0

ORDINARY = (
    '#!/bin/sh\nexec setpriv --reuid=65534 --regid=65534 --clear-groups /usr/bin/python3 "$@"\n'
)

only_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has namespaces")


@functools.cache
def ordinary_user_has_a_python() -> bool:
    """Root can ask as somebody else, who finds a Python and our files."""
    if os.getuid() != 0 or shutil.which("setpriv") is None:
        return False
    command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "/usr/bin/python3"]
    reads = subprocess.run([*command, "-c", f"open({str(cage.ENTRY)!r})"], check=False)
    return reads.returncode == 0


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder that every user can enter: pytest's own are this user's alone."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        path.chmod(0o755)
        yield path


@pytest.fixture(params=["this user", "an ordinary user"])
def python(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A Python that a cage's worker runs."""
    if cage_missing():
        pytest.skip(str(cage_missing()))
    if request.param == "this user":
        return sys.executable
    if not ordinary_user_has_a_python():
        pytest.skip("this user is an ordinary one, or there is no other Python")
    script = tmp_path / "python"
    script.write_text(ORDINARY)
    script.chmod(0o755)
    return str(script)


Caged = Callable[..., Any]


@pytest.fixture
def caged(python: str, tmp_path: Path) -> Caged:
    """A pool of caged workers that run a question's code and answer with its `value`."""
    script = tmp_path / "worker.py"
    script.write_text(question_worker.TEXT)

    @asynccontextmanager
    async def pool(
        *readable: Path, limits: WorkerLimits = LIMITS, size: int = 1
    ) -> AsyncIterator[WorkerPool]:
        workers = WorkerPool(
            (python, str(script)),
            size=size,
            limits=limits,
            caged=True,
            readable=(script, cage.WORKER_LOOP, *readable),
            start_within_s=WITHIN_S,
        )
        try:
            yield workers
        finally:
            workers.close()

    return pool


async def value_of(workers: WorkerPool, code: str) -> Any:
    return (await workers.ask({"code": code}, WITHIN_S))["value"]


FORKS = """
import os, time
for number in range(1000):
    if os.fork() == 0:
        time.sleep(600)
"""

LOOPS = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
while True:
    pass
"""

FILLS = """
for number in range(1000):
    with open(f"file-{number}", "wb") as file:
        file.write(bytes(1 << 20))
"""

ANSWERS_AHEAD = """
import os
for number in range(3, 10):
    try:
        os.write(number, b'{"value": 99, "id": null}\\n')
    except OSError:
        pass
"""


@pytest.mark.parametrize(
    ("code", "failure", "why"),
    [
        ("import os; os._exit(3)", WorkerExited, "exit code is 3"),
        ("import sys; sys.exit(3)", WorkerExited, "SystemExit: 3"),
        ("import os; os.kill(os.getpid(), 9)", WorkerExited, "SIGKILL"),
        (LOOPS, WorkerTimedOut, "limit is 1 s"),
        ("10 ** 10 ** 10", WorkerTimedOut, "limit is 1 s"),
        ("bytearray(3 << 30)", WorkerOutOfMemory, "MemoryError"),
        (
            "for number in range(1 << 10): print('x' * (1 << 20))",
            WorkerSaidTooMuch,
            "printed too much",
        ),
        ("import os\nwhile True: os.write(2, bytes(1 << 16))", WorkerSaidTooMuch, "16777216 bytes"),
        ("value = 'x' * (2 << 20)", WorkerSaidTooMuch, "answer is too long"),
        ("value = float('nan')", WorkerSaidTooMuch, "not JSON"),
        ("value = object()", WorkerSaidTooMuch, "not JSON serializable"),
        ("value = []\nvalue.append(value)", WorkerSaidTooMuch, "Circular"),
        (ANSWERS_AHEAD, WorkerSaidTooMuch, "no answer to its question"),
        (FILLS, WorkerSaidTooMuch, "No space left"),
        ("open('large', 'wb').truncate(1 << 30)", WorkerSaidTooMuch, "File too large"),
        (FORKS, WorkerRefused, "BlockingIOError"),
        ("import os\nwhile True: os.dup(0)", WorkerRefused, "Too many open files"),
        ("raise RuntimeError('no such answer')", WorkerRefused, "RuntimeError: no such answer"),
    ],
)
async def test_what_a_worker_does_instead_of_answering_has_a_name_and_the_next_is_answered(
    caged: Caged, code: str, failure: type[EnvironmentFailed], why: str
) -> None:
    async with caged() as workers:
        # it runs already: the limit is the question's alone
        assert await value_of(workers, "value = 1") == 1
        limit_s = 1.0 if failure is WorkerTimedOut else WITHIN_S
        with pytest.raises(failure, match=why):
            await workers.ask({"code": code}, limit_s)
        assert await value_of(workers, "value = 2") == 2


async def test_computing_for_longer_than_its_cpu_seconds_is_a_time_out(caged: Caged) -> None:
    async with caged(limits=WorkerLimits(cpu_s=1)) as workers:
        with pytest.raises(WorkerTimedOut, match="1 CPU s"):
            await value_of(workers, "while True: pass")


READS = """
import os
def reads(path):
    try:
        return os.listdir(path) if os.path.isdir(path) else open(path).read()
    except OSError as error:
        return type(error).__name__
value = [reads(path) for path in {paths}]
"""


async def test_files_of_the_user_and_the_system_are_not_there(
    caged: Caged, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor the run's folder, with the worker's own file in it."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    keys = tmp_path / "home" / ".ssh"
    keys.mkdir(parents=True)
    (keys / "id").write_text("secret")
    (tmp_path / "wiring.json").write_text("secret")
    paths = [
        keys / "id",
        tmp_path / "wiring.json",
        "/etc/shadow",
        "/root/.ssh",
        "/var",
        "/sys",
        "/run",
    ]
    async with caged() as workers:
        assert set(await value_of(workers, READS.format(paths=list(map(str, paths))))) == {
            "FileNotFoundError"
        }
        beside = await value_of(workers, f"import os\nvalue = os.listdir({str(tmp_path)!r})")
    assert beside == ["worker.py"]


async def test_a_link_to_python_shows_nothing_of_the_folders_next_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Installers put such links into ~/.local/bin; programs keep keys in ~/.local/share."""
    if cage_missing():
        pytest.skip(str(cage_missing()))
    home = tmp_path / "home"
    monkeypatch.setenv("HOME", str(home))
    local = home / ".local"
    secrets = [local / name / "secret" for name in ("bin", "lib", "share")]
    for secret in secrets:
        secret.parent.mkdir(parents=True, exist_ok=True)
        secret.write_text("secret")
    python, script = local / "bin" / "python3", tmp_path / "worker.py"
    python.symlink_to(os.path.realpath(sys.executable))
    script.write_text(question_worker.TEXT)
    workers = WorkerPool(
        (str(python), str(script)),
        size=1,
        limits=LIMITS,
        caged=True,
        readable=(script, cage.WORKER_LOOP),
        start_within_s=WITHIN_S,
    )
    try:
        found = await value_of(workers, READS.format(paths=list(map(str, secrets))))
        assert found == ["FileNotFoundError"] * 3
        assert await value_of(workers, "import sys\nvalue = sys.executable") == str(python)
    finally:
        workers.close()


WRITES = """
import os
value = []
for path in {paths}:
    for flags in (os.O_WRONLY | os.O_APPEND, os.O_WRONLY | os.O_CREAT, os.O_WRONLY | os.O_TRUNC):
        try:
            os.write(os.open(path, flags), b"forged")
            value.append(path)
        except OSError:
            pass
    for change in (os.remove, lambda path: os.chmod(path, 0o777), lambda path: os.rename(path, path + "2")):
        try:
            change(path)
            value.append(path)
        except OSError:
            pass
"""


async def test_nothing_outside_is_written_not_even_what_can_be_read(
    caged: Caged, tmp_path: Path
) -> None:
    shown, hidden = tmp_path / "metrics.jsonl", tmp_path / "settings.json"
    for file in (shown, hidden):
        file.write_text("true")
        file.chmod(0o666)
    tmp_path.chmod(0o777)
    marker = Path("/tmp/halteres-marker")
    paths = [
        shown,
        hidden,
        tmp_path / "marker",
        "/usr/bin/env",
        "/usr/marker",
        "/marker",
        "/etc/passwd",
    ]
    async with caged(shown) as workers:
        assert await value_of(workers, f"value = open({str(shown)!r}).read()") == "true"
        assert await value_of(workers, WRITES.format(paths=list(map(str, paths)))) == []
        # the cage may have such a folder: its own
        await value_of(workers, WRITES.format(paths=[str(marker)]))
    assert shown.read_text() == hidden.read_text() == "true"
    assert not (tmp_path / "marker").exists() and not marker.exists()


CONNECTS = """
import socket
value = []
for family, address in {addresses}:
    address = tuple(address) if isinstance(address, list) else address
    try:
        with socket.socket(family, socket.SOCK_STREAM) as connection:
            connection.settimeout(5)
            connection.connect(address)
        value.append("connected")
    except OSError as error:
        value.append(error.strerror)
"""


async def test_no_socket_reaches_anything(caged: Caged, tmp_path: Path) -> None:
    """The loopback, the network, a socket with a path, one without, the virtual machine's host."""
    path, name = str(tmp_path / "socket"), f"\0halteres-{os.getpid()}"
    listening = [socket.create_server(("127.0.0.1", 0))]
    for address in (path, name):
        listening.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        listening[-1].bind(address)
        listening[-1].listen()
    addresses = [
        (int(socket.AF_INET), ["127.0.0.1", listening[0].getsockname()[1]]),
        (int(socket.AF_INET), ["192.0.2.1", 80]),
        (int(socket.AF_INET6), ["::1", 80]),
        (int(socket.AF_UNIX), path),
        (int(socket.AF_UNIX), name),
        (40, [2, 1024]),
    ]
    async with caged() as workers:
        reached = await value_of(workers, CONNECTS.format(addresses=addresses))
    assert reached == [
        "Network is unreachable",
        "Network is unreachable",
        "Cannot assign requested address",
        "No such file or directory",
        "Connection refused",
        "Operation not permitted",
    ]
    for server in listening:
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()
        server.close()


UNDOES = """
import ctypes, os, signal
libc = ctypes.CDLL(None, use_errno=True)
NUMBERS = {"x86_64": (155, 56, 425, 250), "aarch64": (41, 220, 425, 219)}
pivot_root, clone, io_uring_setup, keyctl = NUMBERS[os.uname().machine]
tries = {
    "remount": lambda: libc.mount(b"none", b"/", None, ctypes.c_ulong(32), None),
    "remount what is shown": lambda: libc.mount(b"none", b"/usr", None, ctypes.c_ulong(32 | 4096), None),
    "mount": lambda: libc.mount(b"tmpfs", b"/halteres-scratch", b"tmpfs", ctypes.c_ulong(0), None),
    "mount proc": lambda: libc.mount(b"proc", b"/halteres-scratch", b"proc", ctypes.c_ulong(0), None),
    "unmount": lambda: libc.umount2(b"/usr", 2),
    "pivot": lambda: libc.syscall(pivot_root, b"/halteres-scratch", b"/halteres-scratch"),
    "chroot": lambda: libc.chroot(b"/halteres-scratch"),
    "user namespace": lambda: libc.unshare(0x10000000),
    "clone": lambda: libc.syscall(clone, ctypes.c_long(0x10000000 | 17), 0, 0, 0, 0),
    "setns": lambda: libc.setns(os.open("/proc/self/ns/mnt", os.O_RDONLY), 0),
    "io_uring": lambda: libc.syscall(io_uring_setup, 8, ctypes.create_string_buffer(120)),
    "memory without a limit": lambda: os.memfd_create("x"),
    "keys": lambda: libc.syscall(keyctl, 0, -3, 1),
    "trace pid 1": lambda: libc.ptrace(16, 1, 0, 0),
    "trace the parent": lambda: libc.ptrace(16, {parent}, 0, 0),
    "be root": lambda: libc.setresuid(0, 0, 0) if os.getuid() else -1,
    "device": lambda: libc.mknod(b"/halteres-scratch/disk", 0o60666, ctypes.c_ulong(0xFE00)),
}
def goes(attempt):
    try:
        return attempt() >= 0
    except OSError:
        return False
value = [name for name, attempt in tries.items() if goes(attempt)]
for path in ("/proc/1/root/etc/shadow", "/proc/1/cwd", "/proc/1/fd", "/proc/1/mem", "/proc/{parent}/root",
             "/proc/sys/kernel/hostname", "/proc/sysrq-trigger"):
    try:
        os.listdir(path) if os.path.isdir(path) else open(path, "rb")
        value.append(path)
    except OSError:
        pass
for descriptor in range(3, 256):
    try:
        os.fchdir(descriptor)
        value.append(os.getcwd())
    except OSError:
        pass
os.chdir("/halteres-scratch")
os.chdir("../../../../..")
value += [name for name in ("root/.ssh", "home", "var", "sys", "old") if os.path.exists(name)]
for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGINT, signal.SIGTERM):
    for process in (1, {parent}, -{parent}):
        try:
            os.kill(process, number)
            value += [process] * (process != 1)  # a user's own pid 1 takes signals, and heeds none
        except OSError:
            pass
"""


async def test_a_cage_is_not_undone_from_within(caged: Caged) -> None:
    code = UNDOES.replace("{parent}", str(os.getpid()))
    async with caged() as workers:
        assert await value_of(workers, code) == []
        assert await value_of(workers, "import os\nvalue = os.getppid()") == 1


STATE = """
import os
value = {
    "descriptors": sorted(os.readlink(f"/proc/self/fd/{fd}").split(":")[0] for fd in os.listdir("/proc/self/fd")
                          if os.path.exists(f"/proc/self/fd/{fd}") or fd in "012"),
    "variables": sorted(os.environ),
    "folder": os.getcwd(), "home": os.path.expanduser("~"),
    "capabilities": [line.split()[1] for line in open("/proc/self/status") if line.startswith("Cap")],
    "processes": [name for name in os.listdir("/proc") if name.isdecimal()],
}
open("note", "w").write("scratch")
"""


async def test_a_worker_has_its_two_connections_and_an_empty_folder(
    caged: Caged, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HALTERES_TRAJECTORY_TOKEN", "secret")
    monkeypatch.setenv("HALTERES_HOME", "/somewhere")
    held = os.open(__file__, os.O_RDONLY)
    os.set_inheritable(held, True)
    async with caged() as workers:
        state = await value_of(workers, STATE)
        again = await value_of(workers, STATE)
    os.close(held)
    assert set(state["descriptors"]) <= {
        "/dev/null",
        "socket",
        f"/proc/{state['processes'][-1]}/fd",
    }
    assert not any(name.startswith("HALTERES") for name in state["variables"])
    assert state["folder"] == state["home"] == cage.SCRATCH
    assert set(state["capabilities"]) == {"0" * 16}
    assert state["processes"] == again["processes"] == ["1", "2"]


DAEMON = """
import os, signal, time
for number in range(5):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
            os.closerange(0, 256)
            time.sleep(600)
        os._exit(0)
    os.wait()
"""


def processes_with(argument: str) -> list[int]:
    """Those whose command line has it; so have their forks."""
    found = list[int]()
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if argument.encode() in file.read_bytes():
                found.append(int(file.parent.name))
        except OSError:  # it has ended
            continue
    return found


async def test_what_a_worker_started_ends_with_the_pool(caged: Caged, tmp_path: Path) -> None:
    script = str(tmp_path / "worker.py")
    async with caged(size=2) as workers:
        asked = asyncio.create_task(value_of(workers, DAEMON + "time.sleep(600)"))
        # the outer process, pid 1, the worker, and what it left
        await until(lambda: len(processes_with(script)) >= 8, within_s=WITHIN_S)
    await until(lambda: not processes_with(script), within_s=GONE_WITHIN_S)
    with pytest.raises(WorkerLost):
        await asked


PROCESSES = "import os\nvalue = [name for name in os.listdir('/proc') if name.isdecimal()]"

HELPER = "import subprocess\nimport builtins\nbuiltins.helper = subprocess.Popen(['sleep', '600'])"


async def test_what_an_answer_leaves_running_is_gone_at_the_next(caged: Caged) -> None:
    """It could overwrite the next answer's files, or take its time; a program that the scorer
    itself keeps is its own.
    """
    async with caged() as workers:
        await value_of(workers, DAEMON)
        assert await value_of(workers, PROCESSES) == ["1", "2"]
        await value_of(workers, HELPER)
        assert len(await value_of(workers, PROCESSES)) == 3


async def test_what_a_worker_started_ends_after_its_error(caged: Caged, tmp_path: Path) -> None:
    script = str(tmp_path / "worker.py")
    async with caged() as workers:
        with pytest.raises(WorkerExited):
            await value_of(workers, DAEMON + "os._exit(0)")
        workers.close()
        await until(lambda: not processes_with(script), within_s=GONE_WITHIN_S)


LEFT = "print('left', flush=True)\ntime.sleep(600)"


async def test_what_a_worker_started_ends_when_its_parent_is_killed(
    python: str, tmp_path: Path
) -> None:
    script = tmp_path / "worker.py"
    script.write_text(question_worker.TEXT)
    parent = (
        "import asyncio\n"
        "from pathlib import Path\n"
        "from halteres.environments import cage\n"
        "async def main():\n"
        f"    script = Path({str(script)!r})\n"
        f"    pool = cage.WorkerPool(({python!r}, str(script)), size=1, caged=True,\n"
        "        limits=cage.WorkerLimits(), readable=(script, cage.WORKER_LOOP), start_within_s=20)\n"
        f"    await pool.ask({{'code': {DAEMON + LEFT!r}}}, 600)\n"
        "asyncio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", parent, stderr=asyncio.subprocess.PIPE
    )
    assert process.stderr is not None
    async with asyncio.timeout(60):
        # warnings come before it
        while await process.stderr.readline() != b"left\n":
            assert process.returncode is None
    assert len(processes_with(f"readable={script}")) >= 2
    process.send_signal(signal.SIGKILL)
    await process.wait()
    await until(lambda: not processes_with(str(script)), within_s=GONE_WITHIN_S)


@only_linux
async def test_a_file_that_its_user_alone_may_read_is_shown_all_the_same(tmp_path: Path) -> None:
    """Root's worker is another user."""
    if cage_missing():
        pytest.skip(str(cage_missing()))
    script, folder = tmp_path / "worker.py", tmp_path / "tokenizer"
    script.write_text(question_worker.TEXT)
    folder.mkdir()
    (folder / "vocabulary").write_text("words")
    (folder / "link").symlink_to("vocabulary")
    (folder / "gone").symlink_to("nowhere")
    for name in ("model.safetensors", "unnamed"):
        # of no bytes on the disk, and too many for a cage's own memory
        with (folder / name).open("wb") as file:
            file.truncate(300 << 20)
    for path in (script, *folder.glob("[!g]*"), folder):
        path.chmod(0o700)
    workers = WorkerPool(
        (sys.executable, str(script)),
        size=1,
        limits=LIMITS,
        caged=True,
        readable=(script, cage.WORKER_LOOP, folder),
        start_within_s=WITHIN_S,
    )
    try:
        code = READS.format(paths=[str(folder / name) for name in ("vocabulary", "link")])
        assert await value_of(workers, code) == ["words", "words"]
    finally:
        workers.close()


@pytest.mark.parametrize("part", ["home", "home/inner", "link"])
async def test_a_home_within_a_folder_that_is_shown_is_hidden_all_the_same(
    caged: Caged, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """But for what is shown of it by name."""
    lib = Path(sys.prefix) / "lib"
    if not os.access(lib, os.W_OK):
        pytest.skip("this Python's folder is not ours to write to")
    with tempfile.TemporaryDirectory(dir=lib) as folder:
        Path(folder).chmod(0o755)
        (Path(folder) / "home" / "inner").mkdir(parents=True)
        (Path(folder) / "link").symlink_to("home")
        home = Path(folder) / part
        monkeypatch.setenv("HOME", str(home))
        for name in ("secret", "shown"):
            (home / name).write_text(name)
        code = READS.format(paths=[str(home.resolve()), str(home.resolve() / "shown")])
        async with caged(home.resolve() / "shown") as workers:
            assert await value_of(workers, code) == [["shown"], "shown"]


@pytest.mark.parametrize("folder", ["/usr/src", "/usr/local/src", "HALTERES_HOME"])
async def test_a_project_within_the_system_s_folders_is_hidden(
    caged: Caged, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    """As in a container whose image says `WORKDIR /usr/src/app`; or where runs lie there."""
    if not os.access("/usr/local", os.W_OK):
        pytest.skip("the system's folders are not ours to write to")
    Path("/usr/local/src").mkdir(exist_ok=True)
    place = folder
    if folder == "HALTERES_HOME":
        place = "/usr/local"
    with tempfile.TemporaryDirectory(dir=place) as name:
        project = Path(name)
        project.chmod(0o755)
        if folder == "HALTERES_HOME":
            monkeypatch.setenv("HALTERES_HOME", name)
        for file in ("secret", "shown"):
            (project / file).write_text(file)
        code = READS.format(paths=[str(project / "secret"), str(project / "shown")])
        async with caged(project / "shown") as workers:
            assert await value_of(workers, code) == ["FileNotFoundError", "shown"]


async def test_a_home_that_holds_the_system_is_said_in_one_sentence(
    caged: Caged, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/")
    async with caged() as workers:
        with pytest.raises(WorkerLost, match=r"home of this user is /, .* set HOME"):
            await value_of(workers, "value = 1")


@pytest.mark.parametrize("folder", ["/scratch", "/dev/shm", "/old"])
async def test_a_file_is_shown_wherever_it_lies(caged: Caged, folder: str) -> None:
    if os.getuid() != 0 and not os.access(folder, os.W_OK):
        pytest.skip("this folder is not ours to make")
    is_new = not os.path.exists(folder)
    try:
        Path(folder).mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as inner:
            Path(inner).chmod(0o755)
            file = Path(inner) / "env.py"
            file.write_text("shown")
            async with caged(file) as workers:
                code = READS.format(paths=[str(file), inner])
                assert await value_of(workers, code) == ["shown", ["env.py"]]
    finally:
        if is_new:
            Path(folder).rmdir()


def test_a_link_out_of_a_folder_is_not_followed_to_see_whether_all_may_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One to / would have every file of the machine looked at, as the cage starts."""
    folder, elsewhere = tmp_path / "workspace", tmp_path / "elsewhere"
    for one in (folder, elsewhere):
        one.mkdir(mode=0o755)
    (elsewhere / "private").write_text("x", encoding="utf-8")
    (elsewhere / "private").chmod(0o600)
    (folder / "all").symlink_to("/")
    (folder / "other").symlink_to(elsewhere)
    assert cage_root.is_open_to_all(str(folder))
    (folder / "private").symlink_to(elsewhere / "private")
    assert not cage_root.is_open_to_all(str(folder))


async def test_links_of_a_folder_lead_to_their_files(caged: Caged, tmp_path: Path) -> None:
    """As in the cache of Hugging Face; one that leads nowhere hinders nothing, and one to anything
    else shows nothing.
    """
    snapshot, blobs = tmp_path / "snapshots" / "main", tmp_path / "blobs"
    for folder in (snapshot, blobs):
        folder.mkdir(parents=True)
    for name in ("words", "other"):
        (blobs / name).write_text(name)
    (snapshot / "tokenizer.json").symlink_to("../../blobs/words")
    (snapshot / "absolute.json").symlink_to(blobs / "words")
    (snapshot / "gone.json").symlink_to("../../blobs/gone")
    (tmp_path / "key").write_text("secret")
    (snapshot / "key.json").symlink_to("../../key")
    paths = [snapshot / "tokenizer.json", snapshot / "absolute.json", blobs / "other"]
    paths.append(snapshot / "key.json")
    async with caged(snapshot) as workers:
        read = await value_of(workers, READS.format(paths=list(map(str, paths))))
    assert read == ["words", "words", "FileNotFoundError", "FileNotFoundError"]


@pytest.mark.parametrize("path", ["/", "~", "~/.."])
def test_a_home_folder_is_never_shown(path: str) -> None:
    with pytest.raises(InvalidConfig, match="holds this user's home"):
        WorkerPool(
            (sys.executable,),
            size=1,
            limits=LIMITS,
            caged=True,
            readable=[Path(path)],
            start_within_s=1,
        )


async def test_processes_and_threads_of_its_own_and_their_semaphores_work(caged: Caged) -> None:
    """Within the limit: a scorer may run programs."""
    code = (
        "import multiprocessing, subprocess, tempfile, threading\n"
        "thread = threading.Thread(target=int)\nthread.start()\nthread.join()\n"
        "lock = multiprocessing.Lock()\n"
        "with tempfile.NamedTemporaryFile() as file:\n"
        "    value = subprocess.run(['echo', 'yes'], capture_output=True).stdout.decode()\n"
    )
    async with caged() as workers:
        assert await value_of(workers, code) == "yes\n"


REACHES = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
parent = os.getppid()
numbers = {"x86_64": (310, 311, 312), "aarch64": (270, 271, 272)}
readv, writev, kcmp = numbers[os.uname().machine]
memory = ctypes.create_string_buffer(8)
piece = (ctypes.c_size_t * 2)(ctypes.addressof(memory), 8)
there = (ctypes.c_size_t * 2)(id(None), 8)
tries = {
    "memory": lambda: os.open(f"/proc/{parent}/mem", os.O_RDWR),
    "descriptors": lambda: len(os.listdir(f"/proc/{parent}/fd")),
    "working folder": lambda: len(os.listdir(f"/proc/{parent}/cwd")),
    "attach": lambda: libc.ptrace(16, parent, None, None),
    "seize": lambda: libc.ptrace(0x4206, parent, None, None),
    "readv": lambda: libc.syscall(readv, parent, piece, 1, there, 1, 0),
    "writev": lambda: libc.syscall(writev, parent, piece, 1, there, 1, 0),
    "readv of itself": lambda: libc.syscall(readv, os.getpid(), piece, 1, there, 1, 0),
    "kcmp": lambda: libc.syscall(kcmp, parent, os.getpid(), 1, 0, 0),
    "pidfd_getfd": lambda: libc.syscall(438, os.pidfd_open(parent), 0, 0),
}
for name, attempt in tries.items():
    try:
        if attempt() >= 0:
            print(name)
    except OSError:
        pass
print("tried", len(tries))
"""


async def test_a_program_that_a_worker_starts_reaches_nothing_of_the_worker(caged: Caged) -> None:
    """Or a model's program would forge its own score."""
    code = (
        "import subprocess, sys\n"
        f"program = [sys.executable, '-c', {REACHES!r}]\n"
        "ended = subprocess.run(program, capture_output=True, text=True)\n"
        "value = ended.stdout + ended.stderr\n"
    )
    async with caged() as workers:
        assert await value_of(workers, code) == "tried 10\n"


SPREADS = """
import multiprocessing
context = multiprocessing.get_context("fork")
with context.Pool(2) as pool:
    value = pool.map(abs, [-1, -2, -3])
"""


async def test_pools_of_processes_work(caged: Caged) -> None:
    async with caged() as workers:
        assert await value_of(workers, SPREADS) == [1, 2, 3]


SAYS = "from halteres.environments.cage import cage_missing; print(cage_missing())"

FORBIDS_UNSHARE = f"""
import os, sys
from halteres.environments import cage_entry
machine = os.uname().machine
cage_entry.call("prctl", cage_entry.SET_NO_NEW_PRIVS, 1, 0, 0, 0)
cage_entry.filter_calls(*cage_entry.MACHINES[machine])
os.execv(sys.executable, [sys.executable, "-c", {SAYS!r}])
"""


@only_linux
@pytest.mark.parametrize(
    ("command", "says"),
    [
        (
            (
                "unshare",
                "-Ur",
                "sh",
                "-c",
                f"echo 0 > /proc/sys/user/max_user_namespaces; exec {sys.executable} -c '{SAYS}'",
            ),
            "This machine allows no cage (sysctl user.max_user_namespaces is 0): It could not make namespaces",
        ),
        (
            (sys.executable, "-c", FORBIDS_UNSHARE),
            "This machine allows no cage: It could not make namespaces: [Errno 1] Operation not permitted (unshare).",
        ),
    ],
    ids=["a setting of the kernel", "a filter of system calls, as containers have"],
)
def test_a_machine_without_namespaces_is_said_in_one_sentence(
    command: tuple[str, ...], says: str
) -> None:
    ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert ended.stdout.startswith(says)
    assert ended.stdout.count("\n") == 1


def test_a_system_without_namespaces_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cage.find_missing.__wrapped__() == "Cages need Linux: there are no namespaces on darwin."


FAILS_ONCE = [
    TimeoutError("not within 30 s"),
    BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"),
    Ended(code=1, out='{"error": "It could not make namespaces", "errno": 12}', err=""),
    Ended(code=1, out='{"error": "It could not make namespaces", "errno": 11}', err=""),
    Ended(code=-9, out="", err=""),
]


@only_linux
@pytest.mark.parametrize("failure", FAILS_ONCE, ids=repr)
def test_a_cage_that_did_not_start_this_once_leaves_nobody_without_one(
    failure: Exception | Ended, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No cage here is what the machine says, not a start that ran out of time or memory."""
    outcomes: list[Exception | Ended] = [
        failure,
        Ended(code=1, out='{"error": "no", "errno": 1}', err=""),
    ]

    def run(*_: object) -> Ended:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(cage.process, "run_caught", run)
    # a setting that forbids nothing to root
    monkeypatch.setattr(cage, "_setting", lambda: " (sysctl kernel.apparmor is 1)")
    no = "This machine allows no cage (sysctl kernel.apparmor is 1): no"
    cage.find_missing.cache_clear()
    try:
        assert cage_missing() is None
        # it was not kept: the next call asks again, and keeps what it is told
        assert cage_missing() == cage_missing() == no
        assert outcomes == []
    finally:
        cage.find_missing.cache_clear()


@only_linux
async def test_a_cage_that_cannot_be_entered_is_no_fault_of_a_scorer(
    tmp_path: Path,
) -> None:
    """The scorer was not asked."""
    script = tmp_path / "python"
    script.write_text(
        f'#!/bin/sh\nexec unshare -Ur sh -c \'echo 0 > /proc/sys/user/max_user_namespaces; exec {sys.executable} "$@"\' sh "$@"\n'
    )
    script.chmod(0o755)
    workers = WorkerPool(
        (str(script), "-c", "print('{}')"),
        size=1,
        limits=LIMITS,
        caged=True,
        start_within_s=WITHIN_S,
    )
    try:
        with pytest.raises(WorkerLost, match="could not make namespaces"):
            await workers.ask({}, WITHIN_S)
    finally:
        workers.close()
