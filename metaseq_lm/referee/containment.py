"""Processes that reach neither the network nor other processes nor files that they do not need.

A contained process and all its children have

* no sockets, and so no network: a filter of system calls refuses them (seccomp(2));
* only some files: Landlock, a security module of Linux, refuses all others, and signals to
  processes outside, for good (landlock(7));
* a clean environment, without the secrets in the user's, and no look into that of other processes,
  which belong to another user namespace;
* limits on their memory and on the size of files.

What they leave running is killed when they end: see `run`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import resource
import signal
import site
import struct
import subprocess
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import chain
from pathlib import Path

from metaseq_lm.core.errors import MetaseqError

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # system calls, on all architectures
_VERSION, _PATH_BENEATH = 1, 1  # flag of the first, kind of rule of the second
_NO_NEW_PRIVILEGES, _CHILD_SUBREAPER, _PARENT_DEATH, _SECCOMP = 38, 36, 1, 22  # of prctl(2)
_NEW_USER = 0x10000000  # of unshare(2)
# The number of an architecture in filters of system calls, and there that of socket(2).
_MACHINES = {"x86_64": (0xC000003E, 41), "aarch64": (0xC00000B7, 198)}
_IO_URING, _OTHER_INTERFACE = 425, 0x40000000  # a way around socket(2); calls of x32
# Instructions of filters: load a word, jump if equal, jump if not less, return.
_LOAD, _IS, _NOT_LESS, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOWED, _REFUSED, _KILLED = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER, _ARCHITECTURE = 0, 4  # offsets in what a filter sees
# Rights: all that each version of the interface knows, those to read, those that a file can have.
_ALL = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
_READ, _LIST, _OF_FILES = 0b1101, 0b1000, 0b111 | 1 << 14 | 1 << 15
_TCP, _SOCKETS_AND_SIGNALS = 0b11, 0b11  # of versions 4 and 6
_SYSTEM = (
    *("/usr", "/lib", "/lib64", "/bin", "/proc", "/sys/devices/system", "/sys/fs/cgroup"),
    *("/etc/ld.so.cache", "/etc/localtime", "/etc/passwd", "/etc/nsswitch.conf"),
    *("/dev/urandom", "/dev/random", "/dev/zero"),
)
# Variables of the environment that are kept.
_KEPT = ("LANG", "LC_ALL", "TZ", "OMP_NUM_THREADS", "ATEN_CPU_CAPABILITY", "MKL_CBWR")
_MEMORY, _LARGEST_FILE = 16 << 30, 2 << 30  # bytes
_PACKAGE = Path(__file__).parents[1]

_libc = ctypes.CDLL(None, use_errno=True)


def _interface() -> int:
    """Return the version of Landlock's interface in this kernel, 0 without it."""
    if platform.system() != "Linux" or platform.machine() not in _MACHINES:
        return 0
    return max(0, int(_libc.syscall(_CREATE_RULESET, None, 0, _VERSION)))


@cache
def is_possible() -> bool:
    """Return whether a process can be contained here."""
    code = "from metaseq_lm.referee import containment; containment.contain('.', [])"
    environment = os.environ | {"PYTHONPATH": str(_PACKAGE.parent)}
    command = [sys.executable, "-c", code]
    return (
        bool(_interface())
        and not subprocess.run(command, env=environment, stderr=subprocess.DEVNULL).returncode
    )


def run(
    code: str,
    words: Sequence[str],
    folder: Path,
    readable: Iterable[Path],
    log: Path,
    is_foreign: bool = True,
) -> int:
    """Run Python code in a contained process; return its exit code, negative for a signal.

    When it ends, all processes that it started and left are killed.

    Args:
        code: The code, which finds `words` in `sys.argv[1:]`.
        words: Its arguments.
        folder: The only folder that it can write.
        readable: Files and folders that it can read, in addition to the installed packages.
        log: The file for what it prints.
        is_foreign: Whether it runs code of others. Other code runs as it is where no process can be
            contained.

    Raises:
        MetaseqError: It is foreign, and no process can be contained here.
    """
    if is_foreign and not is_possible():
        raise MetaseqError(
            "other people's code runs only where it can be contained, which needs Linux 5.13 or "
            "later with Landlock and user namespaces, on x86-64 or ARM"
        )
    folder = folder.resolve()
    (folder / "tmp").mkdir(parents=True, exist_ok=True)
    if not is_possible():
        return _start(f"import sys; {code}", words, folder, log).wait()
    allowed = [str(path.resolve()) for path in (*_installed(), *readable)]
    contained = f"containment.contain({str(folder)!r}, {allowed!r})"
    start = f"from metaseq_lm.referee import containment; {contained}; import sys; {code}"
    before = _children()
    _libc.prctl(_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        process = _start(start, words, folder, log)
        try:
            return process.wait()
        finally:
            process.kill()
            process.wait()
            while orphans := _children() - before:  # the children of one killed are orphans, too
                _kill(orphans)
    finally:
        _libc.prctl(_CHILD_SUBREAPER, 0, 0, 0, 0)


def _start(code: str, words: Sequence[str], folder: Path, log: Path) -> subprocess.Popen[bytes]:
    """Start Python code in a folder, with a clean environment; its output goes to a file."""
    environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
    environment |= {"HOME": str(folder), "TMPDIR": str(folder / "tmp"), "PATH": "/usr/bin:/bin"}
    environment |= {"PYTHONPATH": str(_PACKAGE.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    with open(log, "ab") as output:
        return subprocess.Popen(
            [sys.executable, "-c", code, *words],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )


def _installed() -> list[Path]:
    places = [*map(Path, site.getsitepackages()), Path(site.getusersitepackages())]
    # Some installers make an environment of links into a store: of packages, or of their files.
    packages = chain.from_iterable(place.glob("*") for place in places)
    stored = set[Path]().union(*map(_linked, packages))
    return [Path(sys.prefix), Path(sys.base_prefix), *places, *stored, _PACKAGE]


def _linked(package: Path) -> set[Path]:
    """Return what a package is a link to, or the folders that its files are links into."""
    if package.is_symlink():
        return {package}
    inside = list(package.iterdir()) if package.is_dir() else []
    files = [path for path in inside if path.is_symlink() or path.is_file()]
    if files:
        return {file.resolve().parent for file in files if file.is_symlink()}
    # A folder without files is a namespace of packages.
    return set[Path]().union(*map(_linked, inside))


def _children() -> set[int]:
    texts = [file.read_text() for file in Path("/proc/self/task").glob("*/children")]
    return set(map(int, " ".join(texts).split()))


def _kill(processes: Iterable[int]) -> None:
    for pid in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


# ---------------------------------------------------------------- in the process itself


def contain(folder: str, readable: Sequence[str]) -> None:
    """Contain this process and its children, for good; see the module.

    Raises MetaseqError if a part of it does not work here.
    """
    _libc.prctl(_PARENT_DEATH, signal.SIGKILL, 0, 0, 0)
    _leave_user_namespace()
    for name, limit in (("CORE", 0), ("DATA", _MEMORY), ("FSIZE", _LARGEST_FILE)):
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
    version = _interface()
    every = _ALL[max(known for known in _ALL if known <= version)]
    # Later versions of the interface read further words, and refuse some that they do not know.
    handled = [every, *[_TCP] * (version >= 4), *[_SOCKETS_AND_SIGNALS] * (version >= 6)]
    attributes = struct.pack(f"={len(handled)}Q", *handled)
    ruleset = _check(_libc.syscall(_CREATE_RULESET, attributes, len(attributes), 0), "Landlock")
    rights = dict.fromkeys((*readable, *_SYSTEM), _READ)
    rights |= {str(_PACKAGE.parent): _LIST, folder: every, "/dev/null": every}
    for path, allowed in rights.items():
        _allow(ruleset, path, allowed & every)
    _check(_libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0), "no_new_privs")
    _check(_libc.syscall(_RESTRICT_SELF, ruleset, 0), "Landlock")
    os.close(ruleset)
    _forbid_sockets()


def _leave_user_namespace() -> None:
    """Move this process into a user namespace of its own, with the same user if that is allowed."""
    numbers = {"uid_map": os.getuid(), "gid_map": os.getgid()}
    _check(_libc.unshare(_NEW_USER), "a user namespace")
    with contextlib.suppress(OSError):  # the user is nobody then
        Path("/proc/self/setgroups").write_text("deny")
        for name, number in numbers.items():
            Path("/proc/self", name).write_text(f"{number} {number} 1")


def _forbid_sockets() -> None:
    """Refuse socket(2), and calls of other interfaces, in this process and its children."""
    architecture, socket = _MACHINES[platform.machine()]
    program = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_IS, 1, 0, architecture),
        (_RETURN, 0, 0, _KILLED),
        (_LOAD, 0, 0, _NUMBER),
        (_NOT_LESS, 2, 0, _OTHER_INTERFACE),
        (_IS, 1, 0, socket),
        (_IS, 0, 1, _IO_URING),
        (_RETURN, 0, 0, _REFUSED | errno.EACCES),
        (_RETURN, 0, 0, _ALLOWED),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in program))
    filters = struct.pack("@HP", len(program), ctypes.addressof(code))
    _check(_libc.prctl(_SECCOMP, 2, filters, 0, 0), "seccomp")


def _allow(ruleset: int, path: str, rights: int) -> None:
    """Allow a file or a folder with all below it, if it exists."""
    with contextlib.suppress(FileNotFoundError):
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            rights &= -1 if os.path.isdir(path) else _OF_FILES
            rule = struct.pack("=Qi", rights, descriptor)
            _check(_libc.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, rule, 0), "Landlock")
        finally:
            os.close(descriptor)


def _check(result: int, mechanism: str) -> int:
    if result < 0:
        reason = os.strerror(ctypes.get_errno())
        raise MetaseqError(f"other people's code cannot be contained here: {mechanism}: {reason}")
    return result
