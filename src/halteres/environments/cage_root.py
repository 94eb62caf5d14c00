"""The file system of a cage: a root in memory that shows Python, the system's libraries and what a
worker is given to read; one scratch folder can be written, and nothing else.

Imported by `cage_entry` alone, within the cage's namespaces and before it gives up its rights.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys

OLD = "/halteres-old"
"""The machine's root, while the cage's is made: a name that no file of it has."""

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store")
# what a linker, a locale and a clock need
ETC = ("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "locale.alias", "localtime")
# of its prefix, which may be a home folder
# besides code and words: of a model's folder no worker reads more
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
LARGEST_COPY = 64 << 20
# the folder of a hub's cache in which files lie that its snapshots link to
BLOBS = "blobs"
PARTS_OF_PYTHON = ("bin", "lib", "lib32", "lib64", "pyvenv.cfg", "ssl")
DEVICES = ("null", "zero", "full", "random", "urandom")

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_BIND, MS_REC, MS_PRIVATE, MNT_DETACH = 1 << 12, 1 << 14, 1 << 18, 2
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV = 1, 2, 4
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
PIVOT_ROOT, MOUNT_SETATTR = {"x86_64": 155, "aarch64": 41}, 442

libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: object) -> int:
    """A function of the C library. OSError where it fails."""
    values = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    result: int = getattr(libc, name)(*values)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{os.strerror(code)} ({name})")
    return result


def write(path: str, text: str) -> None:
    """Into a file, which is made if it is not there."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    os.write(descriptor, text.encode())
    os.close(descriptor)


def build_root(
    readable: list[str], scratch: str, scratch_bytes: int, user: int, hidden: list[str]
) -> list[str]:
    """Make the root, and the scratch folder in it; returns the paths that it shows.

    Args:
        user: of the worker, and of this process unless that is root.
        hidden: real paths of folders that are empty there, but for what is shown by name.
    """
    os.umask(0o022)
    links = {path: os.readlink(path) for path in SYSTEM if os.path.islink(path)}
    wanted = [*(path for path in SYSTEM if path not in links), *python_files()]
    wanted += [f"/etc/{name}" for name in ETC]
    sources, copied = named_sources(readable, is_other_user=user != os.getuid())
    for path in wanted:
        if os.path.exists(path):
            # by its real path too: a link in another folder may point there
            sources[path] = sources[os.path.realpath(path)] = os.path.realpath(path)
    call("mount", None, b"/", None, MS_REC | MS_PRIVATE, None)
    # only a place to mount on; what lies there stays visible below OLD
    base = "/usr"
    mount_memory(base, "mode=0755,size=256m,nr_inodes=65536")
    os.mkdir(base + OLD)
    call("syscall", PIVOT_ROOT[os.uname().machine], base.encode(), (base + OLD).encode())
    os.chdir("/")
    for path, target in links.items():
        os.symlink(target, path)
    shown = show_all(sources, copied, list(links))
    there = {path: sources[path] for path in shown}
    for at in outermost([place for one in hidden for place in places_of(one, there)]):
        mount_memory(at, "mode=0755,size=256m,nr_inodes=65536")
        inner = {path: one for path, one in sources.items() if is_below(path, [at]) and path != at}
        shown += show_all(inner, copied, [])
        set_attributes(at, ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV, 0)
    for name in DEVICES:
        show(f"{OLD}/dev/{name}", f"/dev/{name}", ATTR_NOSUID)
    for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        os.symlink(f"/proc/self/fd{target}", f"/dev/{name}")
    if not os.path.lexists("/dev/shm"):  # noqa: S108 - as below
        os.symlink(scratch, "/dev/shm")  # noqa: S108 - semaphores lie there
    os.makedirs("/etc", exist_ok=True)
    write("/etc/passwd", f"worker:x:{user}:{user}::{scratch}:/bin/sh\n")
    if not os.path.lexists("/tmp"):  # noqa: S108 - the cage's own
        os.symlink(scratch, "/tmp")  # noqa: S108 - as above
    os.mkdir(scratch)
    mount_memory(scratch, f"mode=0777,size={scratch_bytes},nr_inodes=4096")
    show_processes()
    call("umount2", OLD.encode(), MNT_DETACH)
    os.rmdir(OLD)
    set_attributes("/", ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV, 0)
    return shown


def named_sources(readable: list[str], is_other_user: bool) -> tuple[dict[str, str], set[str]]:
    """What is shown of paths that were named: paths of the cage with their files or folders here;
    and those that are copied, since the worker is another user, who could not read them.

    A link to a file of the same folder, or of a hub's cache, is followed. Of a folder that not
    every user may read large files are left out.
    """
    sources: dict[str, str] = {}
    copied: set[str] = set()
    for path in filter(os.path.exists, readable):
        real = os.path.realpath(path)
        is_open = not is_other_user or is_open_to_all(path)
        for at in {path, real}:
            if is_open or not os.path.isdir(real):
                sources[at] = real
                if not is_open:
                    copied.add(at)
            for file in files_below(at):
                target = os.path.realpath(file)
                if not os.path.isfile(target):
                    continue
                # a folder that was downloaded may hold a link to anything of this user's
                in_cache = os.path.basename(os.path.dirname(target)) == BLOBS
                if not (in_cache or is_below(target, [real])):
                    continue
                if is_open:
                    if os.path.islink(file):
                        there = os.path.join(os.path.dirname(file), os.readlink(file))
                        sources.setdefault(os.path.normpath(there), target)
                elif is_open_to_all(target):
                    sources[file] = target
                elif not file.endswith(WEIGHTS) and os.path.getsize(target) <= LARGEST_COPY:
                    sources[file] = target
                    copied.add(file)
    return sources, copied


def files_below(folder: str) -> list[str]:
    """Every file in it and in its folders, links among them; none of a file."""
    return [os.path.join(inner, name) for inner, _, names in os.walk(folder) for name in names]


def show_all(sources: dict[str, str], copied: set[str], links: list[str]) -> list[str]:
    """Mount or copy what lies in no folder that is shown already, also by one of the links; returns
    its paths.
    """
    shown: list[str] = []
    for path, source in sorted(sources.items()):
        if is_below(path, shown) or is_below(path, links):
            continue
        shown.append(path)
        if path in copied:
            copy(OLD + source, path)
        else:
            show(OLD + source, path, ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV)
    return shown


def places_of(hidden: str, sources: dict[str, str]) -> list[str]:
    """Where a hidden folder would be seen in the cage, in folders that are shown."""
    return [
        path + hidden[len(source) :]
        for path, source in sources.items()
        if is_below(hidden, [source]) and os.path.isdir(OLD + hidden)
    ]


def outermost(paths: list[str]) -> list[str]:
    """Those that lie in none of the others, each once."""
    found: list[str] = []
    for path in sorted(paths):
        if not is_below(path, found):
            found.append(path)
    return found


def python_files() -> list[str]:
    """Where this Python lies, and every link on the way to it."""
    prefixes = [sys.prefix, sys.base_prefix]
    # without `site` it does not know that it is in a virtual environment; a link to it may lie in
    # anybody's folder
    here = os.path.dirname(os.path.dirname(os.path.abspath(sys.executable)))
    if os.path.exists(os.path.join(here, "pyvenv.cfg")):
        prefixes.append(here)
    found = [os.path.join(prefix, part) for prefix in prefixes for part in PARTS_OF_PYTHON]
    path = os.path.abspath(sys.executable)
    while os.path.islink(path):
        found.append(path)
        path = os.path.join(os.path.dirname(path), os.readlink(path))
    return [*found, path]


def show(source: str, path: str, attributes: int) -> None:
    """Mount the file or folder `source` at `path` as well."""
    if os.path.isdir(source):
        os.makedirs(path, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        write(path, "")
    call("mount", source.encode(), path.encode(), None, MS_BIND | MS_REC, None)
    set_attributes(path, attributes, AT_RECURSIVE)


def set_attributes(path: str, attributes: int, flags: int) -> None:
    """mount_setattr(2), since Linux 5.12: unlike a remount it leaves no mount below out."""
    wanted = struct.pack("QQQQ", attributes, 0, 0, 0)
    call("syscall", MOUNT_SETATTR, AT_FDCWD, path.encode(), flags, wanted, len(wanted))


def mount_memory(path: str, options: str) -> None:
    """A file system in memory, owned by this process's user."""
    call("mount", b"tmpfs", path.encode(), b"tmpfs", MS_NOSUID | MS_NODEV, options.encode())


def show_processes() -> None:
    """Mount /proc with nothing but the cage's processes; none where that is refused, as in a
    container that hides parts of its own.
    """
    os.mkdir("/proc")
    flags = MS_NOSUID | MS_NODEV | MS_NOEXEC | MS_RDONLY
    try:
        call("mount", b"proc", b"/proc", b"proc", flags, b"subset=pid")
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EPERM):
            raise


def copy(source: str, path: str) -> None:
    """A file that root alone may read, for a worker that is another user."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(source, "rb") as given, open(path, "wb") as taken:
        while piece := given.read(1 << 20):
            taken.write(piece)


def is_open_to_all(path: str) -> bool:
    """Whether every user may read the file, or all that the folder holds; not what its links to
    other folders lead to, which no cage shows for them.
    """
    if not os.path.isdir(path):
        return not os.path.exists(path) or bool(os.stat(path).st_mode & 0o004)
    inner = [os.path.join(path, name) for name in os.listdir(path)]
    own = [one for one in inner if not (os.path.islink(one) and os.path.isdir(one))]
    return os.stat(path).st_mode & 0o005 == 0o005 and all(map(is_open_to_all, own))


def is_below(path: str, folders: list[str]) -> bool:
    """Whether the path is one of the folders, or lies in one."""
    return any(path == folder or path.startswith(folder + "/") for folder in folders)
