"""Guesses encodings in which text that is not UTF-8 is plausible in some language.

A wrong guess would store nonsense, so there is no guess if no language fits, and several if several
do. charset-normalizer always guesses, and reads a third of our test texts wrongly: short lines in
French, Polish, Hebrew or Japanese.
"""

import codecs
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass

_FITTING = 0.95  # of the words with letters outside ASCII, or of the characters without words
_FEW_WORDS = 0.1  # share of the words, if only names and borrowed words have such letters
# Encodings of seven bits, and the beginnings of characters outside ASCII in them.
_SEVEN_BITS = {
    "iso2022_jp": re.compile(rb"\x1b\$[@B]"),
    "iso2022_kr": re.compile(rb"\x1b\$\)C"),
    "hz": re.compile(rb"~\{(?:[!-w][!-~])+~\}"),
    "utf-7": re.compile(rb"\+[A-Za-z0-9/]{3,}"),
}
_EBCDIC = ("cp037", "cp500", "cp273")  # not even their ASCII is ASCII
# Signs around words and between them; any other sign in a word reveals a wrong encoding.
_EDGES = "“”‘’«»„‚‹›…–—¿¡°€£§™®©•·¶²³ªº\N{NO-BREAK SPACE}"
_BETWEEN = re.compile(
    "[\\s!-@\\[-`{-~“”‘’–—…\N{SOFT HYPHEN}\N{NO-BREAK SPACE}"
    "\u3000-\u3004\u3008-\u3020\uff01-\uff20\uff3b-\uff40\uff5b-\uff65]+"
)


@dataclass(frozen=True)
class _Language:
    """Features of text in a language, or in several with one alphabet.

    Attributes:
        encodings: Its encodings to try, the most frequent first.
        alphabet: Its lower-case letters outside ASCII, and the range of letters without case.
        frequent: Letters that make up at least a `share` of the letters outside ASCII.
        never: A pattern that none of its words contains.
    """

    encodings: tuple[str, ...]
    alphabet: str
    frequent: str = ""
    share: float = 0.0
    never: str = "$^"

    def has_letter(self, character: str) -> bool:
        """Return whether a character outside ASCII is a letter of the language."""
        if self.alphabet[1:2] == "-":
            return self.alphabet[0] <= character <= self.alphabet[2]
        return character.lower()[0] in self.alphabet or unicodedata.combining(character) > 0


_WESTERN = ("latin-1", "cp1252", "mac-roman", "cp850", *_EBCDIC)
_CENTRAL = ("cp1250", "iso8859-2", "cp852", "mac-latin2")
_BALTIC = ("cp1257", "iso8859-13", "iso8859-4")
_CYRILLIC = ("cp1251", "koi8-r", "koi8-u", "iso8859-5", "cp866", "mac-cyrillic")
# Hebrew comes before Cyrillic: Hebrew can look like Cyrillic words, but not the reverse.
_WESTERN_LANGUAGES = tuple(
    _Language(_WESTERN, alphabet)
    for alphabet in (
        "àâæçéèêëîïôœùûüÿ",  # French
        "äöüßé",  # German
        "áéíñóúüªº",  # Spanish
        "áâãàçéêíóôõúü",  # Portuguese
        "àèéìíòóùú",  # Italian
        "åäöéæøü",  # Danish, Norwegian, Swedish, Finnish
        "áéíóúýðþæö",  # Icelandic
        "áéíóúàèïüçñ",  # Catalan, Irish, Galician
        "éëïöüèêáíóú",  # Dutch
    )
)
_LANGUAGES = (
    *_WESTERN_LANGUAGES,
    _Language(_CENTRAL, "ąćęłńóśźż"),  # Polish
    _Language(_CENTRAL, "áčďéěíňóřšťúůýž"),  # Czech
    _Language(_CENTRAL, "áäčďéíĺľňóôŕšťúýž"),  # Slovak
    _Language(_CENTRAL, "áéíóöőúüű"),  # Hungarian
    _Language(_CENTRAL, "čćđšž"),  # Croatian, Slovene
    _Language(("iso8859-16", *_CENTRAL), "ăâîșțşţ"),  # Romanian
    _Language(("cp1254", "iso8859-9", "cp857", "mac-turkish"), "çğıiöşüâîû"),  # Turkish
    _Language(_BALTIC, "ąčęėįšųūž"),  # Lithuanian
    _Language(_BALTIC, "āčēģīķļņōšūž"),  # Latvian
    _Language((*_BALTIC, *_WESTERN), "äõöüšž"),  # Estonian
    _Language(("cp1258",), "ăâđêôơưàáãèéìíòóõùúý"),  # Vietnamese
    _Language(("cp1255", "iso8859-8", "cp862"), "\u0591-ת", "יוהלאתרמשבנ", 0.5, "[םןץףך][א-ת]"),
    _Language(("cp1256", "iso8859-6", "cp864"), "،-ۿ", "اليمونرتبعد", 0.5),
    _Language(("cp874",), "ก-๛", "านรอกเงมยลวดทสตะปบคหแจพชขใไัี่้ิ์ุู", 0.7),
    _Language(  # Russian
        _CYRILLIC, "абвгдежзийклмнопрстуфхцчшщъыьэюяё", "оеаинтсрвлкм", 0.4, "^[ъыь]|ъ(?![еёюя])"
    ),
    _Language(_CYRILLIC, "абвгдежзийклмнопрстуфхцчшщъьюя", "аиоетнрсвдлк", 0.65, "^ь"),  # Bulgarian
    _Language(
        _CYRILLIC, "абвгґдеєжзиіїйклмнопрстуфхцчшщьюя", "оаніивтерслк", 0.5, "^ь"
    ),  # Ukrainian
    _Language(
        _CYRILLIC, "абвгдеёжзійклмнопрстуўфхцчшыьэюя", "анірелоясткц", 0.5, "^[ыь]"
    ),  # Belarusian
    _Language(_CYRILLIC, "абвгдђежзијклљмнњопрстћуфхцчџшѓѕќ", "аоиенјтсрвук", 0.5),  # Serbian
    _Language(
        ("cp1253", "iso8859-7", "cp737"),
        "αάβγδεέζηήθιίϊΐκλμνξοόπρσςτυύϋΰφχψωώ",
        "αοιετσνηυρπ",
        0.5,
        "ς.|[^σ]σ$",
    ),
    _Language(
        ("gb18030",),
        "一-龥",
        "的一是不了在人有我他这个们中来上大为和国地到以说时要就出会可也你对生能而子那得于着下自之年过发"
        "后作里用道行所然家种事成方多经么去法学如都同现当没动面起看定天分还进好小部其些主样理心她本前开"
        "但因只从想实日者意无力与长把机十民第公此已工使情明性知全三又关点正业外将两高间由问很最今气们语言",
        0.2,
    ),
    _Language(
        ("big5",),
        "一-龥",
        "的一是不了在人有我他這個們中來上大為和國地到以說時要就出會可也你對生能而子那得於著下自之年過發"
        "後作裡用道行所然家種事成方多經麼去法學如都同現當沒動面起看定天分還進好小部其些主樣理心她本前開"
        "但因只從想實日者意無力與長把機十民第公此已工使情明性知全三又關點正業外將兩高間由問很最今氣語言",
        0.2,
    ),
    _Language(
        ("shift-jis", "euc-jp", "cp932"),
        "々-龥",
        "のにはたいをとがしてでなるれさもかっらりこうすくんー",
        0.25,
    ),
    _Language(
        ("euc-kr", "cp949"),
        "가-힣",
        "이다는에의을가고하지로한를은도어서기사리아나자시인그과있라정",
        0.2,
    ),
)


def guess_encodings(sample: bytes) -> list[str]:
    """Return the encodings in which text that is not UTF-8 is plausible, [] if there is none.

    If several decode it to the same text, only the first is named.
    """
    candidates: dict[str, str] = {}
    for encoding in _WESTERN:
        text = _decoded(sample, encoding)
        if text is not None and _has_borrowed_words(text):
            candidates.setdefault(text, encoding)
    for language in _LANGUAGES:
        for encoding in language.encodings:
            text = _decoded(sample, encoding)
            if (
                text is not None
                and text not in candidates
                and _is_plausible(text, language, encoding)
            ):
                candidates[text] = encoding
    return list(candidates.values())


def guess_seven_bits(head: bytes) -> str:
    """Return the seven-bit encoding of bytes that are all ASCII, "" if they are plain ASCII."""
    for encoding, sign in _SEVEN_BITS.items():
        marks = sign.findall(head)
        if not marks:
            continue
        if encoding.startswith("iso2022"):  # an escape reveals it
            return encoding
        # A single "~" is ASCII in damaged HZ; that of UTF-7 is plausible in its words only.
        text = _decoded(b" ".join(marks) if encoding == "hz" else head, encoding)
        if text and any(_is_plausible(text, language) for language in _LANGUAGES):
            return encoding
    return ""


def _decoded(sample: bytes, encoding: str) -> str | None:
    """Return the text, which may end inside a character; None for other bytes and controls."""
    try:
        text = codecs.getincrementaldecoder(encoding)().decode(sample)
    except UnicodeDecodeError:
        return None
    kinds = {unicodedata.category(c) for c in set(text) - set("\t\r\n\f\v\x85\x1a")}
    return None if kinds & {"Cc", "Co", "Cn", "Cs"} else text


def _words(text: str) -> Iterator[str]:
    for word in _BETWEEN.split(text):
        if word := word.strip(_EDGES):
            yield word


def _is_plausible(text: str, language: _Language, encoding: str = "") -> bool:
    """Return whether text is of a language by its letters and where capitals stand."""
    words = list(_words(text))
    foreign = [word for word in words if not word.isascii()]
    if not foreign:
        return encoding in _EBCDIC and _is_ascii_text(text)
    good = [word for word in foreign if _is_word(word, language)]
    if 2 * sum(map(str.isupper, foreign)) > len(foreign):
        return False  # as text in KOI8-R looks in cp1251
    letters = [c for c in "".join(map(str.lower, foreign)) if not c.isascii()]
    frequent = sum(c in language.frequent for c in letters)
    return len(good) >= _FITTING * len(foreign) and frequent >= language.share * len(letters)


def _is_ascii_text(text: str) -> bool:
    letters = [c for c in text.lower() if c.isalpha()]
    most = 2 * len(letters) > len("".join(text.split()))
    return most and sum(c in "etaoinsrhldu" for c in letters) > 0.6 * len(letters)


def _is_word(word: str, language: _Language) -> bool:
    outside = [c for c in word if not c.isascii()]
    if not all(map(language.has_letter, outside)):
        return False
    if language.frequent and len(outside) < len(word):
        return False  # two scripts
    if re.search(language.never, word.lower()):
        return False
    return word[1:].islower() or word.isupper() or word.upper() == word.lower() or len(word) == 1


def _has_borrowed_words(text: str) -> bool:
    """Return whether text is ASCII except for signs and a few words of some Western language."""
    words = list(_words(text))
    foreign = [word for word in words if not word.isascii()]
    if len(foreign) > _FEW_WORDS * len(words) or not any(map(str.isascii, words)):
        return False
    count = 0
    for word in foreign:
        count += any(_is_word(word, language) for language in _WESTERN_LANGUAGES)
    return count >= _FITTING * len(foreign)
