"""Checks by its bytes that a file is text: no binary data, no other encoding, no damage.

Without these checks a model would be trained on such data without any error.
"""

import codecs
import re

from metaseq_lm.core.errors import MetaseqError, say
from metaseq_lm.data.records.encodings import guess_encodings, guess_seven_bits

HEAD = 1 << 18  # bytes of a file that are examined
DAMAGED_SHARE = 0.01  # of the lines; more is another encoding rather than damage
_MANY_HIGH = 0.3  # damaged characters of a line, NULs of a file: more than damage makes
_LONE_CR = re.compile(rb"\r(?!\r|\n)")
_CONTROL = re.compile(rb"[\x01-\x08\x0e-\x1a\x1c-\x1f\x7f]")
_UNICODE = ("utf_16_le", "utf_16_be", "utf_32_le", "utf_32_be")

_PICKLE = (
    "a Python pickle, which is not opened, because it can run code; write its text to a file first"
)
COLUMN_REMEDY = (
    "name the column of the text with --text-column NAME, or make a labelled set of it with "
    "--labelled NAME"
)
# The first bytes of files that are not UTF-8 text, with the remedy.
SIGNS = {
    b"version https://git-lfs.": "a pointer of Git LFS, not the file; get that with git lfs pull",
    b"PAR1": f"a Parquet file; {COLUMN_REMEDY}",
    b"ARROW1": f"an Arrow file; {COLUMN_REMEDY}",
    b"\xff\xff\xff\xff": f"an Arrow stream; {COLUMN_REMEDY}",
    b"PK\x03\x04": "a zip archive (or .docx, .xlsx, .npz); unpack it, or save it as plain text or "
    "CSV, first",
    b"\xd0\xcf\x11\xe0": "a Word or Excel document; save it as plain text or CSV first",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive; unpack it first",
    b"Rar!": "a RAR archive; unpack it first",
    b"\x04\x22\x4d\x18": "lz4 data; unpack it first",
    b"\x1f\x8b": "gzip data, packed twice; unpack it first",
    b"\x1f\x9d": "data of compress; unpack it first with uncompress",
    b"\x5d\0\0": "lzma data; unpack it first with unlzma",
    **dict.fromkeys((bytes([0x80, protocol]) for protocol in range(2, 6)), _PICKLE),
    b"%PDF-": "a PDF; extract its text first, for example with pdftotext",
    b"{\\rtf": "an RTF document; save it as plain text first",
    b"SQLite format 3\0": "an SQLite database; write its text to a file first",
    b"\x89PNG": "a PNG image, not text",
    b"\xff\xd8\xff": "a JPEG image, not text",
    b"GIF8": "a GIF image, not text",
    b"\x7fELF": "a program, not text",
    b"\x93NUMPY": "a NumPy array, not text",
    b"\x89HDF": "an HDF5 file; write its text to a file first",
    b"\xff\xfe\0\0": "UTF-32; convert it with --encoding utf-32",
    b"\0\0\xfe\xff": "UTF-32; convert it with --encoding utf-32",
    b"\xff\xfe": "UTF-16; convert it with --encoding utf-16",
    b"\xfe\xff": "UTF-16; convert it with --encoding utf-16",
}


def describe_head(head: bytes, encoding: str) -> str:
    """Return why the first bytes of a file are not text in `encoding`, with the remedy; else ""."""
    if codecs.lookup(encoding).name == "utf-8":
        return _describe_bytes(head)
    # Shorter signs, and those of UTF-16, may be text in some encoding.
    meaning = next((SIGNS[sign] for sign in SIGNS if len(sign) > 3 and head.startswith(sign)), "")
    if meaning:
        return "" if meaning.startswith("UTF") else meaning
    is_unicode = codecs.lookup(encoding).name.startswith("utf")
    if not (is_unicode or head.isascii()) and _decodes(head, "utf-8"):
        return f"UTF-8, not {encoding}; leave --encoding out"
    return ""


class Damage:
    """The lines of a file that hold invalid UTF-8 or NUL bytes.

    A model would otherwise be trained on text of another encoding without any error.
    """

    def __init__(self) -> None:
        self.lines = 0  # of the whole file
        self._invalid = self._nuls = self._first = self._last = 0
        self._sample = b""
        self._most_of_one = 1  # damaged lines that need no permission

    def add(self, line: bytes, number: int) -> None:
        """Count a damaged line, once if it comes in pieces."""
        if number == self._last:
            return
        self._first, self._last = self._first or number, number
        if is_utf8(line):
            self._nuls += 1
            return
        self._invalid += 1
        if len(self._sample) < HEAD:
            self._sample += line[:HEAD] + b"\n"
            if line.decode("utf-8", "replace").count("\ufffd") > _MANY_HIGH * len(line):
                self._most_of_one = 0

    def judge(self, name: str) -> None:
        """Raise a MetaseqError about the file `name` for more than one line and DAMAGED_SHARE."""
        invalid, nuls, lines = self._invalid, self._nuls, self.lines
        if invalid + nuls <= max(self._most_of_one, DAMAGED_SHARE * lines):
            if nuls:
                say(f"{name}: NUL bytes in {nuls:,} lines")
            return
        allow = "or allow the damage with --on-bad-utf8 replace or skip"
        if nuls > invalid:
            raise MetaseqError(
                f"{name}: {nuls:,} of {lines:,} lines hold NUL bytes, the first is line "
                f"{self._first}; remove them, for example with tr -d '\\000' < OLD > NEW, {allow}"
            )
        remedy = _name_encoding(self._sample.removesuffix(b"\n"))
        raise MetaseqError(
            f"{name}: {invalid:,} of {lines:,} lines hold invalid UTF-8, the first is line "
            f"{self._first}; {remedy}, {allow}"
        )


def _name_encoding(sample: bytes) -> str:
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


def is_utf8(data: bytes) -> bool:
    """Return whether bytes are valid UTF-8."""
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _decodes(data: bytes, encoding: str) -> bool:
    """Return whether the data, which may end inside a character, are valid in this encoding."""
    try:
        codecs.getincrementaldecoder(encoding)().decode(data)
    except UnicodeDecodeError:
        return False
    return True


def _describe_bytes(head: bytes) -> str:
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
    from charset_normalizer import from_bytes

    count, others = head.count(b"\0"), head.replace(b"\0", b"")
    # Text with a few NULs would pass as East Asian UTF-16.
    is_text = count < _MANY_HIGH * len(head) and _decodes(others, "utf-8")
    if not is_text and (match := from_bytes(head, cp_isolation=list(_UNICODE)).best()):
        encoding = match.encoding.replace("_", "-")
        kind = "-".join(encoding.upper().split("-")[:2])
        return f"{kind} without a byte order mark; convert it with --encoding {encoding}"
    if count > DAMAGED_SHARE * len(head) or not is_utf8(head[: head.index(b"\0")]):
        return "binary data, not text (it holds NUL bytes)"
    return ""
