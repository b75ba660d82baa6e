"""Whether a file is text, told by its bytes: binary data, another encoding, damage.

What is no text in UTF-8 would otherwise be learned, without a word, as if it were.
"""

import codecs
import re
from collections.abc import Iterator

from metaseq_lm.core.errors import MetaseqError, say
from metaseq_lm.data.storage.file_kinds import HEAD
from metaseq_lm.data.storage.text_files import SIGNS, Block, TextFile, blocks, check_length

DAMAGED_SHARE = 0.01  # of the lines; more is another encoding rather than damage
MANY_HIGH = 0.3  # bytes above ASCII: more than Western languages have
LONE_CR = re.compile(rb"\r(?!\r|\n)")
CONTROL = re.compile(rb"[\x01-\x08\x0e-\x1a\x1c-\x1f\x7f]")
EAST_ASIAN = re.compile("[\u3000-\u9fff\uac00-\ud7a3\uff01-\uff5e]")
HIRAGANA, HANGUL = re.compile("[\u3041-\u3096]"), re.compile("[\uac00-\ud7a3]")
# Encodings in which text of another one could be read, too, stand behind it: a pattern of what a
# share of the characters above ASCII must be, the share, and the name that reads most files.
EAST_ASIAN_ENCODINGS = (
    ("shift_jis", HIRAGANA, 0.15, "shift_jis"),
    ("euc_jp", HIRAGANA, 0.15, "euc_jp"),
    ("euc_kr", HANGUL, 0.9, "euc_kr"),
    ("gb2312", EAST_ASIAN, 0.9, "gb18030"),
    ("big5", EAST_ASIAN, 0.9, "big5"),
    ("gb18030", EAST_ASIAN, 0.9, "gb18030"),
)
# The characters that Windows has for the bytes 0x80 to 0x9F.
WINDOWS = {ord(c): n for n in range(0x80, 0xA0) if (c := bytes([n]).decode("cp1252", "ignore"))}


def check_content(file: TextFile, damage_allowed: bool, holds_lines: bool = True) -> None:
    """Raise a MetaseqError unless a file is text in the encoding that it is read in.

    All of it is read: if several lines hold invalid UTF-8 or NULs, and a share above DAMAGED_SHARE,
    this is told, unless it is allowed, before any work is done. So is a line that is too long for those who
    hold lines whole.
    """
    head = next((chunk for chunk, _ in file.raw_chunks(HEAD)), b"")
    if file.is_utf8:
        if meaning := describe_bytes(head):
            raise MetaseqError(f"{file}: is {meaning}")
    elif meaning := next((SIGNS[s] for s in SIGNS if len(s) > 3 and head.startswith(s)), ""):
        if not meaning.startswith("UTF"):  # shorter signs may be text in some encoding
            raise MetaseqError(f"{file}: is {meaning}")
    elif _is_other_utf8(head, file.encoding):
        raise MetaseqError(f"{file}: is UTF-8, not {file.encoding}; leave --encoding out")
    if damage_allowed:
        return
    if file.is_utf8 and _is_encoded_twice(head):
        raise MetaseqError(
            f'{file}: its letters are encoded twice, such as "Ã©" for "é"; mend it, for example with '
            "iconv -f utf-8 -t cp1252 OLD > NEW, or allow it with --on-bad-utf8 replace"
        )
    lines = invalid = nuls = first = 0
    sample = b""
    last_damaged = 0  # a line may be several blocks
    most_of_one = 1  # damaged lines that need no permission
    length = 0  # of the line that goes on
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
                if line.decode("utf-8", "replace").count("\ufffd") > MANY_HIGH * len(line):
                    most_of_one = 0
    if invalid + nuls <= max(most_of_one, DAMAGED_SHARE * lines):
        if nuls:
            say(f"{file}: NUL bytes in {nuls:,} lines")
        return
    allow = "or allow the damage with --on-bad-utf8 replace or skip"
    if nuls > invalid:
        raise MetaseqError(
            f"{file}: {nuls:,} of {lines:,} lines hold NUL bytes, the first is line {first}; remove "
            f"them, for example with tr -d '\\000' < OLD > NEW, {allow}"
        )
    guess = guess_encoding(sample)
    raise MetaseqError(
        f"{file}: {invalid:,} of {lines:,} lines hold invalid UTF-8, the first is line {first}; "
        f"perhaps the text is {guess}: convert it with --encoding {guess} (or with iconv), {allow}"
    )


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


def _is_encoded_twice(head: bytes) -> bool:
    """Return whether bytes are UTF-8 that was taken for another encoding and encoded again."""
    lines = [
        line for line in head.decode("utf-8", "replace").split("\n")[:-1] if not line.isascii()
    ]
    return len(lines) > 1 and 2 * sum(map(_reads_as_utf8, lines)) > len(lines)


def _reads_as_utf8(line: str) -> bool:
    try:
        return not line.translate(WINDOWS).encode("latin-1").decode("utf-8").isascii()
    except UnicodeError:
        return False


def _is_other_utf8(head: bytes, encoding: str) -> bool:
    """Return whether bytes to be read in an encoding of one byte a character are plainly UTF-8."""
    if codecs.lookup(encoding).name.startswith("utf") or head.isascii():
        return False
    return _decodes(head, "utf-8")


def _decodes(data: bytes, encoding: str) -> bool:
    """Return whether the data, which may end inside a character, are of this encoding."""
    try:
        codecs.getincrementaldecoder(encoding)().decode(data)
    except UnicodeDecodeError:
        return False
    return True


def describe_bytes(head: bytes) -> str:
    """Return what the first bytes of a file say it is, with the remedy; "" for text."""
    for sign, meaning in SIGNS.items():
        if head.startswith(sign):
            return meaning
    if head[257:262] == b"ustar":
        return "a tar archive; unpack it first"
    if b"\0" in head and (meaning := _describe_nuls(head)):
        return meaning
    if b"\x1b$B" in head or b"\x1b$@" in head:
        return "ISO-2022-JP; convert it with --encoding iso2022_jp"
    if len(CONTROL.findall(head)) > DAMAGED_SHARE * len(head):
        return "binary data, not text"
    if len(LONE_CR.findall(head)) > max(1, head.count(b"\n") // 2):
        return "text, but its lines end in CR alone; convert them with tr '\\r' '\\n' < OLD > NEW"
    return ""


def _describe_nuls(head: bytes) -> str:
    share = head.count(b"\0") / len(head)
    # Plain text with a few NULs could be East Asian UTF-16, of which few bytes are NUL.
    is_text = share < MANY_HIGH and _decodes(head.replace(b"\0", b""), "utf-8")
    for width, least in () if is_text else (("32", 0.5), ("16", 0.001)):
        for order in ("le", "be"):
            encoding = f"utf-{width}-{order}"
            if share > least and _decodes(head, encoding):
                text = codecs.getincrementaldecoder(encoding)().decode(head)
                # The wrong order makes rare characters of spaces and line ends.
                if "\0" not in text and (" " in text or "\n" in text):
                    return f"UTF-{width} without a byte order mark; convert it with --encoding {encoding}"
    if share > DAMAGED_SHARE or not _valid(head[: head.index(b"\0")]):
        return "binary data, not text (it holds NUL bytes)"
    return ""


def guess_encoding(sample: bytes) -> str:
    """Return the likely encoding of text that is not UTF-8."""
    if b" " not in sample and sample.count(b"@") > 0.05 * len(sample):
        return "cp037"  # of IBM; blanks are "@"
    high = [byte for byte in sample if byte >= 0x80]
    if len(high) < MANY_HIGH * len(sample):
        return "cp1252" if any(byte < 0xA0 for byte in high) else "latin-1"
    for encoding, pattern, share, name in EAST_ASIAN_ENCODINGS:
        if _decodes(sample, encoding):
            text = codecs.getincrementaldecoder(encoding)().decode(sample)
            others = [character for character in text if not character.isascii()]
            if len(pattern.findall(text)) > share * len(others):
                return name
    letters = sum(byte >= 0xC0 for byte in high)
    if letters < MANY_HIGH * len(sample):
        return "cp1252"
    # Small letters, which most letters are, are the last 32 of one and the last but 32 of the other.
    return "cp1251" if 2 * sum(byte >= 0xE0 for byte in high) > letters else "koi8-r"
