"""Sentences of words from unlabelled text: one per line, or cut out of running text by rules."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby

from metaseq_lm.data.records.text_files import Block, TextFile

SPLITTING = ("lines", "sentences", "raw")
_ENDS = frozenset((".", "!", "?", "...", "…"))
_CLOSERS = frozenset(("''", '"', "'", ")", "]", "}", "”", "’", "»", "-RRB-", "-RSB-", "-RCB-"))
# A clitic is a word of its own, as in the Penn Treebank: do n't, he 's.
_CLITIC = re.compile(r"(?i)(?<=\w)(n['’]t|['’](?:s|re|ve|ll|d|m))(?!\w)")
_OPENING = re.compile(r"""(^|[\s(\[{`'‘-])"(?=[^\s"])""")
_TITLES = (
    "Mr Mrs Ms Dr St Prof Rev Hon Capt Col Gen Lt Sgt Maj Esq Jr Sr Messrs vs cf Fig Figs al approx"
)
_WORD = re.compile(
    rf"(?:{'|'.join(_TITLES.split())}|e\.g|i\.e|etc(?=\. [a-z,;]))\."  # abbreviations
    r"|(?:[^\W\d_]\.){2,}|[A-Z]\.(?=\s*[A-Z])"  # U.S., J. Smith
    r"|n['’]t(?!\w)|['’](?:s|re|ve|ll|d|m)(?!\w)"
    r"|\d+(?:[.,:/]\d+)+(?:-\w+)*|\+/-|\.{2,}|--+|''|``"
    r"|<unk>|\w+(?:[-'’]\w+)*|\S"
)


def words_of(text: str) -> list[str]:
    """Return the words and signs of untokenised English text, about as in the Penn Treebank.

    Straight quotation marks become `` where they open and '' where they close.
    """
    text = _OPENING.sub(r"\1 `` ", text).replace('"', " '' ")
    return _WORD.findall(_CLITIC.sub(r" \1 ", text))


def _sentences_of(words: list[str]) -> Iterator[list[str]]:
    """Yield the sentences of a text in words: they end at . ! ? and the quotes and brackets after.

    A full stop before a word in lower case does not end one. A straight quotation mark closes if
    the ones before it do not pair up.
    """
    start, at, count = 0, 0, len(words)
    quoted = False
    while at < count:
        if words[at] not in _ENDS:
            quoted ^= words[at] == '"'
            at += 1
            continue
        while at < count and (words[at] in _ENDS or words[at] in _CLOSERS):
            if words[at] == '"':
                if not quoted:
                    break
                quoted = False
            at += 1
        if at == count or not words[at][0].islower():
            yield words[start:at]
            start = at
    if start < count:
        yield words[start:]


@dataclass
class TextReader:
    """Iterates over the sentences (lists of words) of a text file; `counts` are those left out.

    `splitting` "lines": a line is a sentence, white space separates words; "sentences": a line
    holds several; "raw": running text, cut into words and sentences by rules. With `paragraphs` the
    lines up to a blank one belong together ("sentences" and "raw").
    """

    file: TextFile
    splitting: str = "lines"
    paragraphs: bool = False
    blocks: Iterable[Block] | None = None  # the lines to read, None for all of the file
    counts: Counter[str] = field(default_factory=Counter)

    def __iter__(self) -> Iterator[list[str]]:
        if self.splitting == "lines":
            for text in self._lines():
                if words := text.split():
                    yield words
            return
        texts = self._lines()
        if self.paragraphs:
            groups = groupby(texts, lambda text: not text.strip())
            texts = (" ".join(lines) for is_blank, lines in groups if not is_blank)
        for text in texts:
            words = words_of(text) if self.splitting == "raw" else text.split()
            yield from _sentences_of(words)

    def _lines(self) -> Iterator[str]:
        blocks = self.file.blocks() if self.blocks is None else self.blocks
        for block in blocks:
            self.counts["lines"] += len(block.texts)
            self.counts["bad_utf8"] += len(block.bad)
            for at, text in enumerate(block.texts):
                if at in block.bad and self.file.skips_bad:
                    self.counts["skipped"] += 1
                    continue
                if text.isspace() or not text:
                    self.counts["blank"] += 1
                yield text
