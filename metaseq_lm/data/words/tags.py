"""Schemes of span tags: IOB1, BIO (IOB2), BIOES (and BILOU), IOE1, IOE2, and tags of words.

A tag is O or PREFIX-TYPE; the type begins after the first "-" and may hold more of them. In IOB1 a
span begins with I, or with B where a span of the same type ends just before it; in BIO it begins
with B; in BIOES it is S alone or B, I..., E. In IOE2 a span ends with E; in IOE1 it ends with I, or
with E where a span of the same type begins right after it. "conlleval" reads any of them like that
program: a tag that continues no span opens one, and no tag is wrong.

Other spellings (b-per, PER_B, BEGIN:PER, B alone; o, OUT, 0) become this one by `standard_tags`.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from itertools import product

from metaseq_lm.core.errors import UsageError

SCHEMES = ("auto", "iob1", "bio", "bioes", "ioe1", "ioe2", "conlleval", "none")
UNLABELLED = "unlabelled"  # the tag of words without one, in sets that label some words of a text
OUTSIDE = "O"
_PREFIXES = "BIES"
_UNTYPED = "SPAN"  # the type of spans whose tags name none
_OUTSIDE_NAMES = frozenset("o out outside other 0 _ - none null nil".split())
_PREFIX_NAMES = {
    **dict.fromkeys("b begin beg start".split(), "B"),
    **dict.fromkeys("i in inside m mid middle".split(), "I"),
    **dict.fromkeys("e end l last".split(), "E"),
    **dict.fromkeys("s single singleton u unit w whole".split(), "S"),
}
_SEPARATORS = "-_:/|.+"
_BRACKETS = re.compile(r"(?:\([^()*\s]+)*\*\)*")
SPELLING = "write spans as B-TYPE, I-TYPE and O, unless each tag is meant to be the class of a word"
_LONE_END = "is not before a span of its type, where ioe1 has E only"
_MOST_OUTSIDE = 0.4  # share of the words; a part of speech is rarer than words outside spans
# BILOU has other names for the last and the unit tag.
_SAME = {"L": "E", "U": "S"}

Span = tuple[int, int, str]  # first word, word after the last, type


class TagError(ValueError):
    """A tag that its scheme does not allow; `word` says where."""

    def __init__(self, word: int, reason: str) -> None:
        super().__init__(reason)
        self.word = word


def split_tag(tag: str) -> tuple[str, str]:
    """Return prefix and type of a tag, ("O", "") for O; ("", "") if it is not a tag of spans."""
    if tag == OUTSIDE:
        return OUTSIDE, ""
    prefix, dash, kind = tag.partition("-")
    prefix = _SAME.get(prefix, prefix)
    return (prefix, kind) if dash and kind and prefix in list(_PREFIXES) else ("", "")


def standard_tags(tags: Collection[str]) -> dict[str, str]:
    """Return each tag as O or PREFIX-TYPE, if all are span tags in one spelling; else {}.

    In another spelling some tag must mean O; otherwise parts of speech could count as spans.
    """
    for type_first, separator in (*product((False, True), _SEPARATORS), (False, "")):
        standard = {tag: _standard_tag(tag, separator, type_first) for tag in tags}
        prefixes = {tag[:1] for tag in standard.values()}
        is_spelling = OUTSIDE in prefixes and prefixes & {"B", "I"}
        if not separator:  # B, I, O, or the characters of words: B, M, E, S
            is_spelling = "B" in prefixes and prefixes & {"I", "E"} and prefixes & {OUTSIDE, "S"}
        if "" not in prefixes and is_spelling:
            return standard
    return {}


def _standard_tag(tag: str, separator: str, type_first: bool) -> str:
    """Return O or PREFIX-TYPE, "" for another tag; without a separator a tag is a prefix alone."""
    if tag.lower() in _OUTSIDE_NAMES:
        return OUTSIDE
    name, kind = tag, _UNTYPED
    if separator and type_first:
        kind, _, name = tag.rpartition(separator)
    elif separator:
        name, _, kind = tag.partition(separator)
    prefix = _PREFIX_NAMES.get(name.lower(), "")
    return f"{prefix}-{kind}" if prefix and kind else ""


def span_like(counts: Counter[str]) -> str:
    """Return why tags (and their counts) read as classes seem to mark spans, else ""."""
    variants: dict[tuple[str, ...], dict[str, str]] = defaultdict(dict)
    for tag in sorted(counts):
        # B_PER|x and I_PER|x, BPER and IPER differ in their prefix only.
        parts = [tag[:1], tag[1:]] if tag.isalpha() else re.split(r"([^A-Za-z0-9]+)", tag)
        for i, part in enumerate(parts):
            others = parts[:i] + parts[i + 1 :]
            if any(others) and (prefix := _PREFIX_NAMES.get(part.lower())):
                variants[(str(i), *others)][prefix] = tag
    for pair in variants.values():
        if {"B", "I"} <= pair.keys():
            return f"{pair['B']!r} and {pair['I']!r} look like tags of one span"
    brackets = [tag for tag in counts if "(" in tag]
    if brackets and all(map(_BRACKETS.fullmatch, counts)):
        return f"{brackets[0]!r} looks like the bracket of a span"
    outside, frequency = counts.most_common(1)[0] if counts else ("", 0)
    others = [tag for tag in counts if tag != outside]
    if frequency < _MOST_OUTSIDE * counts.total() or outside.lower() not in _OUTSIDE_NAMES:
        return ""
    if outside == "0" and len(others) > 1 and all(map(str.isdecimal, counts)):
        return "numbers, most of them 0, may stand for tags such as O and B-PER"
    if others and all(len(tag) > 1 and not tag.isdecimal() for tag in others):
        return (
            f"{outside!r} looks like the tag of words outside of spans, but {others[0]!r} has no "
            "prefix B or I"
        )
    return ""


def guess_scheme(sentences: Iterable[Sequence[str]]) -> str:
    """Return the scheme, but "auto", that the tags of all sentences obey.

    "none" if no tag is PREFIX-TYPE. UsageError if they are span tags that obey no single scheme.
    """
    fits = dict.fromkeys(("bio", "iob1", "bioes", "ioe2", "ioe1"), True)
    word_tag, span_tag = "", ""  # an example of each
    for tags in sentences:
        parts = [split_tag(tag) for tag in tags]
        for tag, (prefix, _) in zip(tags, parts):
            if prefix == "":
                word_tag = word_tag or tag
            elif prefix != OUTSIDE:
                span_tag = span_tag or tag
        for scheme in fits:
            fits[scheme] = fits[scheme] and _find_fault(parts, scheme) is None
    if word_tag and not span_tag:
        return "none"
    for scheme, good in fits.items():
        if good:
            return scheme
    if word_tag:
        raise UsageError(
            f"some tags are of spans, such as {span_tag!r}, and others, such as {word_tag!r}, are "
            "not; give --tag-scheme none if each word has a class of its own, else repair the file"
        )
    raise UsageError(
        "the tags are of spans, but of none of iob1, bio, bioes, ioe1 and ioe2 throughout; name "
        "the scheme with --tag-scheme to be told the first wrong line, or give --tag-scheme "
        "conlleval to read them as that program does"
    )


def _find_fault(parts: Sequence[tuple[str, str]], scheme: str) -> tuple[int, str] | None:
    """Return the first word whose tag the scheme does not allow, and why, or None."""
    before = (OUTSIDE, "")
    for word, (prefix, kind) in enumerate(parts):
        open_span = before[0] in "BI" and before[1] == kind
        tag = f"{prefix}-{kind}"
        if prefix == "":
            return word, "neither O nor PREFIX-TYPE"
        if scheme == "conlleval":
            continue
        if scheme in ("bio", "iob1") and prefix in "ES":
            return word, f"is a tag of bioes, not of {scheme}"
        if scheme in ("ioe1", "ioe2") and prefix in "BS":
            return word, f"is a tag of bioes, not of {scheme}"
        if scheme == "bio" and prefix == "I" and not open_span:
            return word, f"{tag} continues no span"
        if scheme == "iob1" and prefix == "B" and not open_span:
            return word, f"{tag} does not follow a span of its type, where iob1 has B only"
        if scheme == "bioes" and prefix in "IE" and not open_span:
            return word, f"{tag} continues no span"
        goes_on = open_span and prefix in "IE"
        if scheme in ("bioes", "ioe2") and before[0] in "BI" and not goes_on:
            return word, f"a span of type {before[1]} has no end before it"
        if scheme == "ioe1" and before[0] == "E" and not (kind == before[1] and prefix in "IE"):
            return word - 1, f"E-{before[1]} {_LONE_END}"
        before = prefix, kind
    if scheme in ("bioes", "ioe2") and before[0] in "BI":
        return len(parts) - 1, f"a span of type {before[1]} has no end"
    if scheme == "ioe1" and before[0] == "E":
        return len(parts) - 1, f"E-{before[1]} {_LONE_END}"
    return None


def read_spans(tags: Sequence[str], scheme: str) -> list[Span]:
    """Return the spans of a sentence, by a scheme of SCHEMES but "auto" and "none".

    TagError with the word for a tag that the scheme does not allow.
    """
    parts = [split_tag(tag) for tag in tags]
    fault = _find_fault(parts, scheme)
    if fault is not None:
        raise TagError(*fault)
    spans: list[Span] = []
    start = -1
    before = (OUTSIDE, "")
    for word, (prefix, kind) in enumerate([*parts, (OUTSIDE, "")]):
        goes_on = prefix in "IE" and before[0] in "BI" and before[1] == kind
        if start >= 0 and not goes_on:
            spans.append((start, word, before[1]))
            start = -1
        if prefix != OUTSIDE and not goes_on:
            start = word
        before = prefix, kind
    return spans


def bioes_tags(spans: Iterable[Span], words: int) -> list[str]:
    """Return the BIOES tags of a sentence; ValueError for spans that overlap or exceed it."""
    tags = [OUTSIDE] * words
    for start, end, kind in spans:
        if not 0 <= start < end <= words or any(tag != OUTSIDE for tag in tags[start:end]):
            raise ValueError(
                f"the span {start}..{end} overlaps another or leaves the {words} words"
            )
        if end - start == 1:
            tags[start] = f"S-{kind}"
        else:
            tags[start:end] = [f"B-{kind}", *[f"I-{kind}"] * (end - start - 2), f"E-{kind}"]
    return tags


def bio_tag(tag: str) -> str:
    """Return a tag of BIOES in BIO."""
    return {"S": "B", "E": "I"}.get(tag[0], tag[0]) + tag[1:]


def bio_tags(spans: Iterable[Span], words: int) -> list[str]:
    """Return the BIO tags of a sentence with these spans; ValueError as in `bioes_tags`."""
    return list(map(bio_tag, bioes_tags(spans, words)))


def bioes_names(kinds: Iterable[str]) -> list[str]:
    """Return the classes of spans of these types: O, then B, I, E and S of each type, sorted."""
    names = [OUTSIDE]
    for kind in sorted(set(kinds)):
        names += [f"{prefix}-{kind}" for prefix in _PREFIXES]
    return names
