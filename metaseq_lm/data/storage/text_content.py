"""What a file holds, told by its content: binary data, another encoding, JSON lines, a table.

What is no plain text in UTF-8 would otherwise be learned, without a word, as if it were.
"""

import codecs
import csv
import json
import re
from collections.abc import Iterable, Iterator, Sequence

from metaseq_lm.core.errors import MetaseqError, say
from metaseq_lm.data.storage.text_files import SIGNS, Block, TextFile, blocks

DAMAGED_SHARE = 0.01  # of the lines; more is another encoding rather than damage
HEAD, HEAD_LINES = 1 << 18, 200  # bytes and lines of a file whose form is looked at
MANY_HIGH = 0.3  # bytes above ASCII: more than Western languages have
MOST = 0.95  # of the lines looked at
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
OPENS_JSON = re.compile(r'\s*\[?\s*\{\s*"[^"\n]*"\s*:')
CONLL_ROW = re.compile(r"\S+(?:[ \t]+\S+){0,8}[ \t]+(?:O|[BIESLU]-\S+)\s*")
CONLLU_ROW = re.compile(r"\d+(?:[-.]\d+)?(?:\t[^\t]+){9}\s*")
FASTTEXT = "__label__"
OPENS_MARKUP = re.compile(r"\s*<(?:(\?xml)\b|!doctype html|html[\s>])", re.IGNORECASE)
# A quoted text or a number, with the next field right behind it.
FIRST_FIELD = re.compile(r'("([^"]|"")*"|-?\d+(\.\d+)?)([,;|])\S')
COLUMN_NAME = re.compile(r"\w[\w .:/()-]{0,39}")


def check_content(file: TextFile, damage_allowed: bool) -> None:
    """Raise a MetaseqError unless a file is text in the encoding that it is read in.

    All of it is read: if several lines hold invalid UTF-8 or NULs, and a share above DAMAGED_SHARE,
    this is told, unless it is allowed, before any work is done.
    """
    head = next((chunk for chunk, _ in file.raw_chunks(HEAD)), b"")
    if file.is_utf8:
        if meaning := describe_bytes(head):
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
    for block in blocks(file):
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
    return len(lines) > 1 and _share(map(_reads_as_utf8, lines)) > 0.5


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


WORDS_AND_TAGS = "words and tags in columns (CoNLL)"
REMEDIES = {
    "HTML": "extract its text first",
    "XML": "extract its text first",
    WORDS_AND_TAGS: "make a set of it with --tagged NAME",
    "CoNLL-U": "make a set of it with --treebank NAME or --tagged NAME",
    "fastText's labelled lines": "write label and text as a table and make a set of it with --labelled NAME",
}


def check_plain_text(file: TextFile, remedy: str) -> None:
    """Raise a MetaseqError, which ends in `remedy`, if the first lines of a file are markup, JSON or a table."""
    block = next(blocks(file, HEAD), None)
    lines = [] if block is None else block.data.decode("utf-8", "replace").split("\n")[:HEAD_LINES]
    if meaning := describe_lines(lines):
        if meaning in REMEDIES:
            remedy = f"{REMEDIES[meaning]}, or read the file as it is with --plain-text"
        raise MetaseqError(f"{file}: is {meaning}, not plain text; {remedy}")


def describe_lines(lines: Sequence[str]) -> str:
    """Return what the first lines of a file are, if they are markup, JSON or a table; "" for plain text."""
    lines = [line for line in lines if line.strip()]
    if not lines:
        return ""
    if match := OPENS_MARKUP.match(lines[0]):
        return "XML" if match[1] else "HTML"
    rows = [line for line in lines if not line.startswith("#")]
    for meaning, fits in (
        (WORDS_AND_TAGS, CONLL_ROW.fullmatch),
        ("CoNLL-U", CONLLU_ROW.fullmatch),
        ("fastText's labelled lines", lambda line: line.startswith(FASTTEXT)),
    ):
        if len(rows) > 1 and _share(bool(fits(row)) for row in rows) >= MOST:
            return meaning
    if OPENS_JSON.match("\n".join(lines[:5])) or _share(map(_is_json, lines)) > 0.5:
        return "JSON lines" if _is_json(lines[0]) else "JSON"
    # Tabs in front of a line indent it.
    tabs = [line.lstrip("\t ").count("\t") for line in lines]
    if len(lines) > 1 and tabs[0] and _share(n == tabs[0] for n in tabs) >= MOST:
        return f"a table of {tabs[0] + 1} columns with tabs between them"
    for delimiter, name in ((",", "commas"), (";", "semicolons"), ("|", "bars")):
        columns = table_columns(lines, delimiter)
        if columns:
            return f"a table ({', '.join(columns)}) with {name} between its columns"
    if len(lines) > 4 and _share(bool(FIRST_FIELD.match(line)) for line in lines) >= MOST:
        return "a table without a header row"
    return ""


def _share(values: Iterable[bool]) -> float:
    answers = list(values)
    return sum(answers) / len(answers)


def _is_json(line: str) -> bool:
    line = line.strip()
    if line[:1] not in ("{", "["):
        return False
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return bool(OPENS_JSON.match(line))
    return isinstance(value, (dict, list)) and bool(value)


def table_columns(lines: Sequence[str], delimiter: str) -> list[str]:
    """Return the names in the first line of a table with at least two columns; [] for other text."""
    try:
        rows = list(csv.reader((f"{line}\n" for line in lines), delimiter=delimiter))
    except csv.Error:
        return []
    header = rows[0]
    if len(rows) < 2 or len(header) < 2 or not all(map(COLUMN_NAME.fullmatch, header)):
        return []
    # The last row may go on behind the lines looked at.
    rows = rows[1:-1] or rows[1:]
    return header if _share(len(row) == len(header) for row in rows) >= MOST else []
