"""Writes files atomically: a reader finds the old content or the new, never a part."""

import ctypes
import errno
import glob
import hashlib
import itertools
import json
import math
import os
import re
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, BinaryIO

from metaseq_lm.core.errors import MetaseqError

# To the user, a quota (EDQUOT) and a file size limit (EFBIG) mean the same as a full disk.
FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

# The manifest of a corpus of 10 TB is smaller; parsed, JSON can be twenty times its size.
LARGEST_JSON = 12 << 20
LARGEST_SWEEP = 64 << 20  # sweep.json of some 30,000 runs
LARGEST_LOG = 1 << 30  # log of a run or a job, or an archive of runs


def read_bounded(path: Path, limit: int) -> bytes:
    """Return the content of an untrusted file; ValueError for a pipe, device or larger file."""
    size = path.stat().st_size
    if not path.is_file() or size > limit:
        raise ValueError(f"not a file of at most {limit:,} bytes ({size:,})")
    return path.read_bytes()


def check_regular(path: Path) -> None:
    """Raise MetaseqError if a file to append to is a link, pipe or device."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise MetaseqError(
            f"{path}: not a file of this folder but a link, a pipe or a device; remove it"
        )


def without_link(path: str, flags: int) -> int:
    """Open a file to append to, as the `opener` of `open`; MetaseqError for a link."""
    check_regular(Path(path))
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def check_folder(path: Path, root: Path | None = None) -> None:
    """Raise MetaseqError if a folder, or one between it and `root`, is a link.

    `root` is the folder that a command fills (default: the parent).
    """
    root = root or path.parent
    for folder in (path, *itertools.takewhile(lambda parent: parent != root, path.parents)):
        if folder.is_symlink():
            raise MetaseqError(
                f"{folder}: a link, so what is written and removed there would be files of another "
                f"folder; remove it. {root} itself may be a link"
            )


def read_json(path: Path, limit: int = LARGEST_JSON) -> dict[str, Any]:
    """Return the JSON object in an untrusted file; ValueError for other content."""
    try:
        content = json.loads(read_bounded(path, limit))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(content, dict):
        raise ValueError("not a JSON object")
    return content


_KINDS = {
    dict: "mapping",
    list: "list",
    str: "text",
    int: "whole number",
    float: "number",
    bool: "yes or no (true, false)",
    type(None): "null",
}


@dataclass(frozen=True)
class _Form:
    """Form of a number or text in a JSON file: types, words for messages, and a further test."""

    kind: type | tuple[type, ...]
    noun: str
    fits: Callable[[Any], bool]


def _is_time(text: str) -> bool:
    try:
        time = datetime.fromisoformat(text)
        return time.tzinfo is not None and bool(time.astimezone(timezone.utc))
    except (ValueError, OverflowError):
        return False


def _is_name(text: str) -> bool:
    is_flat = "/" not in text and "\\" not in text and text not in (".", "..")
    return is_flat and text.isprintable() and 0 < len(text) <= 255


_LARGEST_WHOLE = (1 << 63) - 1
_NUMBERS = (float, int)
COUNT = _Form(int, "a whole number from 0 on", lambda value: 0 <= value <= _LARGEST_WHOLE)
NUMBER = _Form(_NUMBERS, "a number", lambda value: not _overflows(value))
FINITE = _Form(_NUMBERS, "a finite number", lambda value: _is_finite(value))
AMOUNT = _Form(
    _NUMBERS, "a finite number from 0 on", lambda value: _is_finite(value) and value >= 0
)
COST = _Form(_NUMBERS, "a number from 0 on", lambda value: not (_overflows(value) or value < 0))
POSITIVE = _Form(_NUMBERS, "a finite number above 0", lambda value: _is_finite(value) and value > 0)
TIME = _Form(str, "a time with its zone, such as 2026-11-27T16:40:00+00:00", _is_time)
NAME = _Form(str, "a name without separators and control characters", _is_name)
FOLDER = _Form(
    str,
    "a folder inside, without '..' and control characters",
    lambda text: all(map(_is_name, text.split("/"))),
)


def _overflows(value: float) -> bool:
    return isinstance(value, int) and abs(value) > sys.float_info.max


def _is_finite(value: float) -> bool:
    return not _overflows(value) and math.isfinite(value)


def schema_error(value: Any, form: Any, name: str = "it") -> str:
    """Return how a JSON value deviates from `form`, "" if it fits.

    A form is a type; a `_Form`; a range of whole numbers; a pattern that a text matches; a tuple of
    alternative forms; a list with one form, of at least one item unless an ellipsis follows; a list
    with the forms of exactly as many items; or a dict with the forms of its keys. A key that ends
    with a question mark may be missing or null; "*" matches every key.
    """
    if isinstance(form, range):
        numbers, noun = form, f"a whole number from {form.start} to {form.stop - 1}"
        form = _Form(int, noun, lambda value: value in numbers)
    if isinstance(form, tuple):
        problems = [schema_error(value, part, name) for part in form]
        return "" if "" in problems else problems[0]
    kind = _kind_of(form)
    # In Python, but not in JSON, a truth value is a whole number.
    is_other = not isinstance(value, kind) or (type(value) is bool and form is not bool)
    if isinstance(form, _Form):
        if is_other or not form.fits(value):
            return f"{name} is {_shown(value)}, not {form.noun}"
        return ""
    if is_other:
        return f"{name} is no {_KINDS[kind]}"
    if isinstance(value, int) and abs(value) > _LARGEST_WHOLE:
        return f"{name} is too large"
    if isinstance(form, re.Pattern) and not form.fullmatch(value):
        return f"{name} {value[:60]!r} is not of the form {form.pattern}"
    if isinstance(form, list):
        return _schema_error_of_items(value, form, name)
    if isinstance(form, dict):
        return _schema_error_of_keys(value, form, name)
    return ""


def _kind_of(form: Any) -> Any:
    if isinstance(form, type):
        return form
    if isinstance(form, _Form):
        return form.kind
    return str if isinstance(form, re.Pattern) else type(form)


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # a number of more than 4,300 digits
        return "a number that is too large"
    return text if len(text) <= 60 else f"{text[:60]}..."


def _schema_error_of_items(value: list[Any], form: list[Any], name: str) -> str:
    may_be_empty = form[1:] == [...]
    forms = form[:1] * len(value) if len(form) == 1 or may_be_empty else form
    if not value and not may_be_empty:
        return f"{name} is empty"
    if len(value) != len(forms):
        return f"{name} has {len(value)} items, not {len(form)}"
    item = f"an item of {name}"
    return next(filter(None, map(schema_error, value, forms, itertools.repeat(item))), "")


def _schema_error_of_keys(value: dict[str, Any], form: dict[str, Any], name: str) -> str:
    for named, part in form.items():
        for key in value if named == "*" else [named.rstrip("?")]:
            if named.endswith("?") and value.get(key) is None:
                continue
            if key not in value:
                return f"{name} lacks '{key}'"
            if problem := schema_error(value[key], part, key):
                return problem
    return ""


_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def to_json(value: Any, indent: int | None = None) -> str:
    """Return strict JSON (RFC 8259): a number that is not finite becomes a text, such as "NaN"."""
    try:
        return json.dumps(value, indent=indent, allow_nan=False)
    except ValueError:
        return json.dumps(as_text(value), indent=indent, allow_nan=False)


def checksum(content: Any) -> str:
    """Return a checksum of a JSON value, or of bytes."""
    data = content if isinstance(content, bytes) else to_json(content).encode()
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def with_checksum(content: dict[str, Any]) -> dict[str, Any]:
    """Return a JSON object with a checksum of its other entries."""
    return {**content, "checksum": checksum(content)}


def is_altered(content: dict[str, Any]) -> bool:
    """Return whether a JSON object was changed after `with_checksum`, or has no checksum."""
    rest = {key: value for key, value in content.items() if key != "checksum"}
    try:
        return bool(content.get("checksum") != checksum(rest))
    except RecursionError:  # nested deeper than any file of this package
        return True


def as_text(value: Any, spell: Callable[[float], Any] = json.dumps) -> Any:
    """Return a JSON value with texts, or what `spell` returns, for numbers that are not finite."""
    if isinstance(value, dict):
        return {key: as_text(item, spell) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_text(item, spell) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return spell(value)
    return value


def is_number(value: Any) -> bool:
    """Return whether `value` is a float or an int that fits in one; a bool is not."""
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) <= sys.float_info.max
    return isinstance(value, float)


def as_numbers(value: Any, depth: int = 20) -> Any:
    """Return a JSON value with numbers restored from the texts of `to_json`.

    Values nested deeper than `depth` are unchanged: an untrusted file may nest without bound.
    """
    if isinstance(value, dict) and depth:
        return {key: as_numbers(item, depth - 1) for key, item in value.items()}
    if isinstance(value, list) and depth:
        return [as_numbers(item, depth - 1) for item in value]
    return _NOT_FINITE.get(value, value) if isinstance(value, str) else value


def human_bytes(count: float) -> str:
    """Return a byte count with a unit, such as "1.5 GiB"."""
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} bytes" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def free_bytes(path: Path) -> int:
    """Return the bytes free on the file system of `path`, or of its nearest existing parent."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


@contextmanager
def full_disk_message(path: Path, needed: Callable[[], int] = lambda: 0) -> Iterator[None]:
    """Turn "no space left" inside the block into a MetaseqError with path, bytes needed and free.

    `needed` is called only then, and returns 0 if the size is unknown; other errors pass through.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in FULL_DISK:
            raise
        free, size = free_bytes(path), needed()
        about = f"about {size:,} bytes are needed and " if size else ""
        raise MetaseqError(
            f"{path}: {error.strerror}; {about}{free:,} bytes are free ({human_bytes(free)}). Free "
            "some space (or raise the quota or file size limit) and start again; this file was "
            "not written."
        ) from error


def sync_folder(folder: Path) -> None:
    """Make the renames done in `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Errors of renameat2 if the system, or the file system (such as NFS), cannot exchange names.
_NO_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)


def exchange_names(first: Path, second: Path) -> bool:
    """Exchange two names atomically; return False, with nothing changed, if that is impossible.

    Linux only, and not on every file system. Raises OSError if it is possible but fails.
    """
    AT_FDCWD, RENAME_EXCHANGE = -100, 2
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "renameat2"):
        return False
    names = (os.fsencode(first), os.fsencode(second))
    if not library.renameat2(AT_FDCWD, names[0], AT_FDCWD, names[1], RENAME_EXCHANGE):
        return True
    number = ctypes.get_errno()
    if number in _NO_EXCHANGE:
        return False
    raise OSError(number, os.strerror(number), str(first), None, str(second))


def sync_file(path: Path) -> None:
    """Flush the content of a file written by another library to the disk."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def require_folder(folder: Path) -> None:
    """Raise MetaseqError if the working folder of a command was removed."""
    if not folder.is_dir():
        raise MetaseqError(
            f"{folder}: this folder is gone; was it deleted or moved while the command ran? Move "
            "it back, or start the command again"
        )


def temporary_name(path: Path) -> Path:
    """Return a random name in the folder of `path`, so that nobody can plant a link there."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")


def remove_leftovers(path: Path) -> None:
    """Remove leftovers of killed processes that wrote `path`; nobody may be writing it now."""
    for file in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        file.unlink(missing_ok=True)


@contextmanager
def replacing(path: Path, needed: Callable[[], int] = lambda: 0) -> Iterator[BinaryIO]:
    """Yield a new file that replaces the one at `path` when the block ends without an error.

    If `path` is a link, its target is not written.
    """
    require_folder(path.parent)
    temporary = temporary_name(path)
    try:
        with full_disk_message(path, needed), open(temporary, "xb") as file:
            yield file
            # The content must be on the disk before the name is, or a power cut leaves a part.
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def write_atomic(path: Path, content: bytes) -> None:
    """Replace the file at `path` by `content` atomically."""
    with replacing(path, lambda: len(content)) as file:
        file.write(content)
