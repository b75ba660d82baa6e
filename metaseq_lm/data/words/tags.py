"""Schemes of span tags: IOB1, BIO (IOB2), BIOES (and BILOU), and tags of words.

A tag is O or PREFIX-TYPE; the type begins after the first "-" and may hold more of them. In IOB1 a
span begins with I, or with B where a span of the same type ends just before it; in BIO it begins
with B; in BIOES it is S alone or B, I..., E. "conlleval" reads any of them as that program does:
what continues no span opens one, and no tag is wrong.
"""

from collections.abc import Iterable, Sequence

from metaseq_lm.core.errors import UsageError

SCHEMES = ("auto", "iob1", "bio", "bioes", "conlleval", "none")
OUTSIDE = "O"
PREFIXES = "BIES"
# BILOU names the last and the unit tag otherwise.
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
    return (prefix, kind) if dash and kind and prefix in list(PREFIXES) else ("", "")


def guess_scheme(sentences: Iterable[Sequence[str]]) -> str:
    """Return the scheme, but "auto", that the tags of all sentences obey.

    "none" if no tag is PREFIX-TYPE. UsageError if they are span tags of no one scheme.
    """
    fits = {"bio": True, "iob1": True, "bioes": True}
    word_tag, span_tag = "", ""  # an example of each
    for tags in sentences:
        parts = [split_tag(tag) for tag in tags]
        for tag, (prefix, _) in zip(tags, parts):
            if prefix == "":
                word_tag = word_tag or tag
            elif prefix != OUTSIDE:
                span_tag = span_tag or tag
        for scheme in fits:
            fits[scheme] = fits[scheme] and _fault(parts, scheme) is None
    if word_tag and not span_tag:
        return "none"
    for scheme, good in fits.items():
        if good:
            return scheme
    if word_tag:
        raise UsageError(
            f"some tags are of spans, such as {span_tag!r}, and others, such as {word_tag!r}, are not; give "
            "--tag-scheme none if each word has a class of its own, else repair the file"
        )
    raise UsageError(
        "the tags are of spans, but of none of iob1, bio and bioes throughout; name the scheme with "
        "--tag-scheme to be told the first wrong line, or give --tag-scheme conlleval to read them as "
        "that program does"
    )


def _fault(parts: Sequence[tuple[str, str]], scheme: str) -> tuple[int, str] | None:
    """Return the first word whose tag the scheme does not allow, and why, or None."""
    before = (OUTSIDE, "")
    for word, (prefix, kind) in enumerate(parts):
        open_span = before[0] in "BI" and before[1] == kind
        tag = f"{prefix}-{kind}"
        if prefix == "":
            return word, "neither O nor PREFIX-TYPE"
        if scheme == "conlleval":
            continue
        if scheme != "bioes" and prefix in "ES":
            return word, f"is a tag of bioes, not of {scheme}"
        if scheme == "bio" and prefix == "I" and not open_span:
            return word, f"{tag} continues no span"
        if scheme == "iob1" and prefix == "B" and not open_span:
            return word, f"{tag} does not follow a span of its type, where iob1 has B only"
        if scheme == "bioes":
            if prefix in "IE" and not open_span:
                return word, f"{tag} continues no span"
            if before[0] in "BI" and not (open_span and prefix in "IE"):
                return word, f"a span of type {before[1]} has no end before it"
        before = prefix, kind
    if scheme == "bioes" and before[0] in "BI":
        return len(parts) - 1, f"a span of type {before[1]} has no end"
    return None


def read_spans(tags: Sequence[str], scheme: str) -> list[Span]:
    """Return the spans of a sentence, by a scheme of SCHEMES but "auto" and "none".

    TagError with the word for a tag that the scheme does not allow.
    """
    parts = [split_tag(tag) for tag in tags]
    fault = _fault(parts, scheme)
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
    """Return the BIOES tags of a sentence with these spans; ValueError if they overlap or stick out."""
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


def bio_tags(spans: Iterable[Span], words: int) -> list[str]:
    """Return the BIO tags of a sentence with these spans; ValueError as `bioes_tags` has it."""
    same = {"S": "B", "E": "I"}
    return [same.get(tag[0], tag[0]) + tag[1:] for tag in bioes_tags(spans, words)]


def bioes_names(kinds: Iterable[str]) -> list[str]:
    """Return the classes of spans of these types: O, then B, I, E and S of each type, sorted."""
    return [OUTSIDE, *(f"{prefix}-{kind}" for kind in sorted(set(kinds)) for prefix in PREFIXES)]
