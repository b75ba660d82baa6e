"""Checks by its bytes that a file is text: no binary data, no other encoding, no damage.

Without these checks a model would be trained on such data without any error.
"""

import codecs
import re
from collections.abc import Iterator, Sequence

from metaseq_lm.core.errors import MetaseqError, say
from metaseq_lm.data.storage.encodings import guess_encodings, guess_seven_bits
from metaseq_lm.data.storage.file_kinds import HEAD
from metaseq_lm.data.storage.text_files import SIGNS, Block, TextFile, blocks, check_length

DAMAGED_SHARE = 0.01  # of the lines; more is another encoding rather than damage
_MANY_HIGH = 0.3  # damaged characters of a line, NULs of a file: more than damage makes
_LONE_CR = re.compile(rb"\r(?!\r|\n)")
_CONTROL = re.compile(rb"[\x01-\x08\x0e-\x1a\x1c-\x1f\x7f]")
_UNICODE = ("utf_16_le", "utf_16_be", "utf_32_le", "utf_32_be")


def check_content(file: TextFile, damage_allowed: bool, holds_lines: bool = True) -> None:
    """Raise a MetaseqError unless a file is text in the encoding that it is read in.

    The whole file is read before any work is done. Several lines with invalid UTF-8 or NULs, and a
    share above DAMAGED_SHARE of them, are an error unless `damage_allowed`; with `holds_lines`, for
    readers that hold lines whole, a line that is too long is also an error.
    """
    head = next((chunk for chunk, _ in file.raw_chunks(HEAD)), b"")
    if file.is_utf8:
        if meaning := _describe_bytes(head):
            raise MetaseqError(f"{file}: is {meaning}")
    elif meaning := next((SIGNS[s] for s in SIGNS if len(s) > 3 and head.startswith(s)), ""):
        if not meaning.startswith("UTF"):  # shorter signs may be text in some encoding
            raise MetaseqError(f"{file}: is {meaning}")
    elif _is_other_utf8(head, file.encoding):
        raise MetaseqError(f"{file}: is UTF-8, not {file.encoding}; leave --encoding out")
    if damage_allowed:
        return
    lines = invalid = nuls = first = 0
    sample = b""
    last_damaged = 0  # a line may be several blocks
    most_of_one = 1  # damaged lines that need no permission
    length = 0  # of the unfinished line
    for block in blocks(file):
        length = (length + len(block.data)) if block.piece else 0
        if holds_lines:
            check_length(length, "line", f"{file}:{block.line}")
        length *= block.continues
        lines += block.data.removesuffix(b"\n").count(b"\n") + (not block.continues)
        for number, line in _damaged_lines(block):
            first = first or number
            if number > last_damaged:
                nuls += _valid(line)
                invalid += not _valid(line)
                last_damaged = number
            if len(sample) < HEAD and not _valid(line):
                sample += line[:HEAD] + b"\n"
                if line.decode("utf-8", "replace").count("\ufffd") > _MANY_HIGH * len(line):
                    most_of_one = 0
    if invalid + nuls <= max(most_of_one, DAMAGED_SHARE * lines):
        if nuls:
            say(f"{file}: NUL bytes in {nuls:,} lines")
        return
    allow = "or allow the damage with --on-bad-utf8 replace or skip"
    if nuls > invalid:
        raise MetaseqError(
            f"{file}: {nuls:,} of {lines:,} lines hold NUL bytes, the first is line {first}; "
            f"remove them, for example with tr -d '\\000' < OLD > NEW, {allow}"
        )
    remedy = _name_encoding(sample.removesuffix(b"\n"))
    raise MetaseqError(
        f"{file}: {invalid:,} of {lines:,} lines hold invalid UTF-8, the first is line {first}; "
        f"{remedy}, {allow}"
    )


def _name_encoding(sample: bytes) -> str:
    """Return the remedy for a file, given lines of it that are not UTF-8."""
    guesses = guess_encodings(sample)
    if not guesses:
        return (
            "name its encoding with --encoding; of one that Python does not know, such as TCVN or "
            "VISCII, convert it with iconv"
        )
    remedy = f"perhaps the text is {guesses[0]}: convert it with --encoding {guesses[0]}"
    if others := " or ".join(guesses[1:]):
        remedy += f", or it is {others}: look at the result"
    return remedy


def _damaged_lines(block: Block) -> Iterator[tuple[int, bytes]]:
    if b"\0" not in block.data and _valid(block.data):
        return
    for number, line in enumerate(block.data.split(b"\n"), block.line):
        if b"\0" in line or not _valid(line):
            yield number, line


def _valid(line: bytes) -> bool:
    try:
        line.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _is_other_utf8(head: bytes, encoding: str) -> bool:
    """Return whether bytes to be read in an encoding of one byte a character are plainly UTF-8."""
    if codecs.lookup(encoding).name.startswith("utf") or head.isascii():
        return False
    return _decodes(head, "utf-8")


def _decodes(data: bytes, encoding: str) -> bool:
    """Return whether the data, which may end inside a character, are valid in this encoding."""
    try:
        codecs.getincrementaldecoder(encoding)().decode(data)
    except UnicodeDecodeError:
        return False
    return True


def _describe_bytes(head: bytes) -> str:
    """Return the content of a file by its first bytes, with the remedy; "" for text."""
    for sign, meaning in SIGNS.items():
        if head.startswith(sign):
            return meaning
    if head[257:262] == b"ustar":
        return "a tar archive; unpack it first"
    if b"\0" in head and (meaning := _describe_nuls(head)):
        return meaning
    if encoding := guess_seven_bits(head):
        return f"text in {encoding.upper()}; convert it with --encoding {encoding}"
    if len(_CONTROL.findall(head)) > DAMAGED_SHARE * len(head):
        return "binary data, not text"
    if len(_LONE_CR.findall(head)) > max(1, head.count(b"\n") // 2):
        return "text, but its lines end in CR alone; convert them with tr '\\r' '\\n' < OLD > NEW"
    return ""


def _describe_nuls(head: bytes) -> str:
    # Text with a few NULs would pass as East Asian UTF-16.
    is_text = head.count(b"\0") < _MANY_HIGH * len(head) and _decodes(
        head.replace(b"\0", b""), "utf-8"
    )
    if not is_text and (encoding := _detect(head, _UNICODE)):
        kind = "-".join(encoding.upper().split("-")[:2])
        return f"{kind} without a byte order mark; convert it with --encoding {encoding}"
    if head.count(b"\0") > DAMAGED_SHARE * len(head) or not _valid(head[: head.index(b"\0")]):
        return "binary data, not text (it holds NUL bytes)"
    return ""


def _detect(data: bytes, encodings: Sequence[str]) -> str:
    """Return the most likely of `encodings` by charset-normalizer, "" if none fits."""
    from charset_normalizer import from_bytes

    match = from_bytes(data, cp_isolation=list(encodings)).best()
    return match.encoding.replace("_", "-") if match else ""
