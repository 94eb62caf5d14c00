"""Enter a cage and become a worker: what stands between a scorer's code and this machine.

    PYTHON -E -s -S cage_entry.py NAME=VALUE... -- ARGUMENT...    becomes PYTHON ARGUMENT...

Run by the worker's own Python, which may have none of Halteres and be older than ours; it starts
twice, so nothing slow is imported. Names and values: those of `cage.WorkerLimits`, and

    caged=1         namespaces and a root of its own; without it, limits alone
    readable=PATH   a file or folder that the cage shows, besides Python and the system's libraries
    hidden=PATH     the user's home, or another folder of the user's: nothing else of it may be seen
    scratch=PATH    the working folder in a cage, a small file system in memory
    stays=1         without a cage: in the parent's folder, else in that of temporary files

Three processes: the outer one, which the parent started and ends; pid 1 of the cage, with whose
death the kernel ends all that is in it; and the worker. If a cage cannot be entered, a line of JSON
on standard output says why, with the `errno` of a call that failed.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import struct
import sys

if __package__:
    from halteres.environments.cage_root import SYSTEM, build_root, call, is_below, libc, write
else:
    # as a program, whose Python may have no such package
    from cage_root import (  # pyright: ignore[reportMissingImports]
        SYSTEM,
        build_root,
        call,
        is_below,
        libc,
        write,
    )

NOBODY = 65534
"""Root's worker is this user: the kernel does not limit the number of root's processes."""

# of the user, of mounts, processes, network, IPC, host name, control groups
NEWUSER, NEWNS, NEWPID, NEWNET = 0x10000000, 0x20000, 0x20000000, 0x40000000
NEWIPC, NEWUTS, NEWCGROUP = 0x8000000, 0x4000000, 0x2000000
NAMESPACES = NEWUSER | NEWNS | NEWPID | NEWNET | NEWIPC | NEWUTS | NEWCGROUP

SET_PDEATHSIG, SET_DUMPABLE, SET_SECCOMP, CAPBSET_DROP = 1, 4, 22, 24
SET_NO_NEW_PRIVS, CAP_AMBIENT, CAP_AMBIENT_CLEAR_ALL, SECCOMP_FILTER = 38, 47, 4, 2
SIGINT, SIGKILL, AF_INET, AF_VSOCK = 2, 9, 2, 40

MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""The kernel's number of a processor's kind, and the column of the system calls' numbers."""

REFUSED = {
    "unshare": (272, 97),
    "setns": (308, 268),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "io_uring_setup": (425, 425),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "syslog": (103, 116),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
}
"""System calls that a worker may not make. In a user namespace of its own it would have every right
again; key rings are in no namespace; io_uring makes sockets past a filter; some memory counts for
no limit; some look deep into the kernel. The last five reach into other processes: a program that
a scorer starts would forge its own score.
"""
CLONE, SOCKET, CLONE3, CLOSE_RANGE = (56, 220), (41, 198), 435, 436
# Sockets that a worker may make. One to a virtual machine's host (AF_VSOCK) is in no namespace.
FAMILIES = (1, 2, 10)

LIMITS = {
    "memory_bytes": resource.RLIMIT_AS,
    "cpu_s": resource.RLIMIT_CPU,
    "file_bytes": resource.RLIMIT_FSIZE,
    "open_files": resource.RLIMIT_NOFILE,
    "processes": resource.RLIMIT_NPROC,
    "core_bytes": resource.RLIMIT_CORE,
}


class NoCage(Exception):
    """The cage would not be whole."""


def main() -> None:
    """Enter, limit, test, and become the worker."""
    end = sys.argv.index("--")
    given = [option.partition("=") for option in sys.argv[1:end]]
    readable = [value for name, _, value in given if name == "readable"]
    hidden = [value for name, _, value in given if name == "hidden"]
    options = {name: value for name, _, value in given}
    doing = "begin"
    try:
        if "caged" in options:
            machine = os.uname().machine
            if sys.platform != "linux" or machine not in MACHINES:
                raise NoCage(f"cages are made for Linux on {' and '.join(MACHINES)}")
            # where memory runs out all the same, the kernel ends this process before others
            write("/proc/self/oom_score_adj", "1000")
            doing = "make namespaces"
            user = enter_namespaces()
            doing = "make a root of its own"
            real = [os.path.realpath(path) for path in hidden]
            for path in real:
                if path == "/" or any(is_below(one, [path]) for one in SYSTEM):
                    raise NoCage(
                        f"the home of this user is {path}, which holds the system's own files, and "
                        "a cage hides the home; set HOME and HALTERES_HOME to folders of this "
                        "user's"
                    )
            size = int(options["file_bytes"])
            shown = build_root(readable, options["scratch"], size, user, real)
            doing = "give up its rights"
            stay_as_first_process()
            work_in(options["scratch"])
            if user == os.getuid():
                # the cage's own processes are this user's, too
                options["processes"] = str(int(options["processes"]) + 2)
            limit(options)
            drop_rights(user, machine)
            doing = "pass its own test"
            test([*hidden, *real], shown)
        else:
            if "stays" not in options:
                os.chdir(os.environ["TMPDIR"])
            limit(options)
        os.execv(sys.executable, [sys.executable, *sys.argv[end + 1 :]])  # noqa: S606 - no shell
    except (OSError, NoCage) as error:
        why = f"It could not {doing}: {error}."
        for quote in '"\\\n':
            why = why.replace(quote, " ")
        number = ""
        if isinstance(error, OSError) and error.errno is not None:
            number = f', "errno": {error.errno}'
        os.write(1, f'{{"error": "{why}", "code": "worker_lost"{number}}}\n'.encode())
        os._exit(1)


def enter_namespaces() -> int:
    """Go on as pid 1 of namespaces of its own; returns the user that the worker will be.

    The outer process waits, and ends as pid 1 does.
    """
    user = worker = os.getuid()
    maps = {"uid": f"{user} {user} 1", "gid": f"{os.getgid()} {os.getgid()} 1"}
    if user == 0 and any(first <= NOBODY < first + num for first, num in ids("uid")):
        worker = NOBODY
        # root reads what any of its users own, until the worker becomes NOBODY
        maps = {kind: "\n".join(f"{at} {at} {num}" for at, num in ids(kind)) for kind in maps}
    unshare(maps, is_root=worker != user)
    lifeline = os.environ.pop("HALTERES_LIFELINE_FD", None)
    if lifeline is not None:
        end_with(int(lifeline))
    ours, its = os.pipe()
    first = os.fork()
    if first:
        let_go()
        os._exit(exit_code(os.waitpid(first, 0)[1]))
    os.close(its)
    end_with(ours)
    return worker


def ids(kind: str) -> list[tuple[int, int]]:
    """The users or groups that there are here: the first of a row, and how many."""
    with open(f"/proc/self/{kind}_map", encoding="ascii") as rows:
        return [(int(row.split()[0]), int(row.split()[2])) for row in rows]


def unshare(maps: dict[str, str], is_root: bool) -> None:
    """Enter the namespaces, with the users and groups that `maps` gives them.

    A process that stays outside writes those down: root's right to name other users is there.
    """
    outer = os.getpid()
    wait, go = os.pipe()
    helper = os.fork()
    if helper == 0:
        os.read(wait, 1)
        try:
            if not is_root:
                write(f"/proc/{outer}/setgroups", "deny")
            for kind, rows in maps.items():
                write(f"/proc/{outer}/{kind}_map", rows)
        except OSError as error:
            os._exit(error.errno or 1)
        os._exit(0)
    try:
        call("unshare", NAMESPACES)
    finally:
        os.write(go, b".")
        os.close(go)
        os.close(wait)
        code = os.waitstatus_to_exitcode(os.waitpid(helper, 0)[1])
    if code:
        raise OSError(code, f"{os.strerror(code)} (uid_map)")


def end_with(pipe: int) -> None:
    """Have the kernel kill this process with its parent, which holds the other end of the pipe."""
    call("prctl", SET_PDEATHSIG, SIGKILL, 0, 0, 0)
    os.set_blocking(pipe, False)
    try:
        os.read(pipe, 1)
    except BlockingIOError:
        return
    # an end of file: the parent was gone before that
    os._exit(1)


def let_go() -> None:
    """Leave the parent's connections to the worker: they end when it does."""
    for descriptor in (0, 1, 2):
        os.close(descriptor)


def exit_code(status: int) -> int:
    """As shells give it: 128 and the number of the signal that ended a process."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        return 128 - code
    return code


def stay_as_first_process() -> None:
    """Fork the worker, which returns. Pid 1 stays, and takes note of processes that end."""
    worker = os.fork()
    if worker == 0:
        return
    # no process of the cage reads or ends it
    call("prctl", SET_DUMPABLE, 0, 0, 0, 0)
    libc.signal(SIGINT, None)
    let_go()
    while True:
        ended, status = os.wait()
        if ended == worker:
            os._exit(exit_code(status))


def work_in(scratch: str) -> None:
    """Make it the working folder, the home, and the place of temporary files."""
    os.environ.update(HOME=scratch, TMPDIR=scratch)
    os.chdir(scratch)
    os.umask(0o077)


def limit(options: dict[str, str]) -> None:
    """Limit each process from here on; no more is given than this one has."""
    for name, value in {**options, "core_bytes": "0"}.items():
        if name in LIMITS:
            allowed = resource.getrlimit(LIMITS[name])[1]
            most = int(value)
            hard = most
            if name == "cpu_s":
                # SIGXCPU comes at the first limit, SIGKILL, which says nothing, at the second
                hard += 1
            if allowed != resource.RLIM_INFINITY:
                most, hard = min(most, allowed), min(hard, allowed)
            resource.setrlimit(LIMITS[name], (most, hard))


def drop_rights(user: int, machine: str) -> None:
    """No capability and no way to one, no descriptor but three, and none of the calls `REFUSED`."""
    call("syscall", CLOSE_RANGE, 3, 0xFFFFFFFF, 0)
    capability = 0
    while libc.prctl(CAPBSET_DROP, capability, 0, 0, 0) == 0:
        capability += 1
    if user != os.getuid():
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    call("prctl", CAP_AMBIENT, CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    # version 3 of the header, this process; nothing effective, permitted, inheritable
    call("capset", struct.pack("Ii", 0x20080522, 0), bytes(24))
    call("prctl", SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    filter_calls(*MACHINES[machine])


def filter_calls(architecture: int, column: int) -> None:
    """Refuse `REFUSED`, and sockets of other families: a program that the kernel runs before every
    system call (seccomp).
    """
    load, equal, at_least, has, answer = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, refuse = (answer, 0, 0, 0x7FFF0000), (answer, 0, 0, 0x00050000 | errno.EPERM)
    # fields of a call: 4 its architecture, 0 its number, 16 its first argument
    program = [(load, 0, 0, 4), (equal, 1, 0, architecture), refuse, (load, 0, 0, 0)]
    # another way to number x86-64's calls (x32)
    program += [(at_least, 0, 1, 0x40000000), refuse]
    # its flags lie in memory, where no filter looks; the C library then asks in the older way
    program += [(equal, 0, 1, CLONE3), (answer, 0, 0, 0x00050000 | errno.ENOSYS)]
    for numbers in REFUSED.values():
        program += [(equal, 0, 1, numbers[column]), refuse]
    program += [(equal, 0, 4, CLONE[column]), (load, 0, 0, 16), (has, 0, 1, NAMESPACES)]
    program += [refuse, allow]
    program += [(equal, 0, 2 + len(FAMILIES), SOCKET[column]), (load, 0, 0, 16)]
    program += [(equal, len(FAMILIES) - at, 0, one) for at, one in enumerate(FAMILIES)]
    program += [refuse, allow]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *row) for row in program))
    header = struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    call("prctl", SET_SECCOMP, SECCOMP_FILTER, header, 0, 0)


def test(hidden: list[str], shown: list[str]) -> None:
    """What a worker could do all the same. NoCage names it."""
    local = struct.pack("=HH4s8x", AF_INET, 0x0900, b"\x7f\0\0\1")
    connection = call("socket", AF_INET, 1, 0)
    if libc.connect(connection, local, len(local)) == 0 or ctypes.get_errno() != errno.ENETUNREACH:
        raise NoCage("the loopback can be reached")
    os.close(connection)
    if libc.socket(AF_VSOCK, 1, 0) >= 0:
        raise NoCage("the virtual machine's host can be reached")
    if libc.unshare(NEWUSER) == 0:
        raise NoCage("it can make a namespace in which it has every right")
    for folder in ("/", "/usr", os.path.dirname(sys.executable)):
        if os.access(folder, os.W_OK):
            raise NoCage(f"it can write to {folder}")
    for folder in {os.path.realpath(one) for one in hidden if os.path.isdir(one)}:
        # what is shown by name: a folder around it shows none of it
        named = [path for path in shown if is_below(path, [folder])]
        for name in os.listdir(folder):
            inner = os.path.join(folder, name)
            if not is_below(inner, named) and not any(is_below(one, [inner]) for one in named):
                raise NoCage(f"it can see {inner}")


if __name__ == "__main__":
    main()
