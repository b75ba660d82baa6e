"""WNLI as a choice between antecedents: the pronoun of a sentence and its candidates, by rule.

A row of WNLI is a sentence with a pronoun, and a hypothesis that repeats a clause of it with a noun
phrase, the query, in place of the pronoun. Nothing in the files says which pronoun it is, nor what
else it could stand for; Clark 2021, section 5.2.4, extracts both by rules that he does not give.
The rules here:

1. The pronoun is the one around which most words of sentence and hypothesis agree; the words of
   the hypothesis in its place, cut down to their last noun phrase, are the query.
2. A noun phrase is a name (words in capitals, two joined by "and" too), or a determiner and up to
   MOST_WORDS words, or a run of as many words without one, none of them a function word; "of" and
   one more word may follow, and a name with "'s" goes before like a determiner. Where a phrase ends
   and a verb begins cannot be told by lists alone, so every beginning of such a run counts, cut
   before a word that looks like a verb or an adverb.
3. The candidates are these phrases, except the pronoun and phrases that overlap the query.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

_POSSESSIVE = frozenset("his her hers its their theirs".split())
_PRONOUNS = _POSSESSIVE | frozenset(
    "he she it they him them himself herself itself themselves".split()
)
_DETERMINERS = frozenset(
    "a an the this these those my your his her its our their some any no every each another "
    "all both many several few two three".split()
)
# What may be inside a noun phrase, between its words.
_LINKS = frozenset("of in and with on at for under from".split())
_FUNCTION_WORDS = _LINKS | frozenset(
    "or but so because since although though while when where if as than then that which who whom "
    "whose what how why to by without over into onto out off up down about after before behind "
    "below above through against between during around near across along until unless till "
    "is are was were be been being am do does did don doesn didn isn wasn weren aren have has had "
    "hadn hasn haven will won would wouldn can could couldn cannot shall should shouldn may might "
    "must not n there here just only very too also still yet again ever never now later soon even "
    "enough more most much almost back away together instead "
    "i you he she it we they me him us them himself herself itself myself themselves".split()
)
_VERB_ENDING = re.compile(r"(?<=..)(ed|ing|ly)$")
_ENDINGS = ("'s", "’s", "'", "’")
_MOST_WORDS = 3
_MOST_QUERY_WORDS = 6
_WORD = re.compile(r"(?:Mr|Mrs|Ms|Dr|St)\.|\w+(?:-\w+)*|['’]\w+|[^\w\s]")


@dataclass(frozen=True)
class Word:
    """A word or a punctuation mark and its position in the text."""

    text: str
    start: int
    end: int

    @property
    def lower(self) -> str:
        """The word in lower case, which lists and comparisons use."""
        return self.text.lower()


def words_of(text: str) -> list[Word]:
    """Return the words and punctuation marks of a text; "'s" is a word of its own."""
    return [Word(match.group(), *match.span()) for match in _WORD.finditer(text)]


def _align(sentence: Sequence[Word], hypothesis: Sequence[Word]) -> tuple[int, list[Word]] | None:
    """Return the number of the word that the hypothesis replaces and its replacement, or None.

    The pronoun with the most equal words before it (up to the beginning of the hypothesis) and
    after it (up to its end) is taken, at least one; a tie goes to the one with more words before
    it, then to the first.
    """
    words = [word.lower for word in sentence]
    claim = [word.lower for word in hypothesis]
    while claim and not claim[-1][0].isalnum() and not claim[-1].startswith(("'", "’")):
        claim.pop()
    best: tuple[int, int] = (0, 0)  # equal words, and how many of them precede the pronoun
    aligned = None
    for at, word in enumerate(words):
        if word not in _PRONOUNS:
            continue
        rest = words[at + 1 :]
        after = [n for n in range(len(claim)) if claim[len(claim) - n :] == rest[:n]]
        for before in range(min(at, len(claim) - 1) + 1):
            if words[at - before : at] != claim[:before]:
                continue
            most = max(n for n in after if before + n < len(claim))
            if (before + most, before) > best:
                best = before + most, before
                aligned = at, list(hypothesis[before : len(claim) - most])
    if aligned is None:
        return None
    at, claimed = aligned
    for position in range(len(claimed) - 2, -1, -1):
        # The clauses differ further up, but the word before the pronoun is here too.
        if at and claimed[position].lower == words[at - 1] and words[at - 1] not in _LINKS:
            claimed = claimed[position + 1 :]
            break
    query = _last_phrase(claimed)
    return (at, query) if query else None


def _last_phrase(words: list[Word]) -> list[Word]:
    """Return the noun phrase at the end of `words`, empty if there is none of a fair length."""
    # A hypothesis may begin with words of its own: "She saw that Janie" is about Janie.
    for at in range(len(words) - 1, -1, -1):
        lower = words[at].lower
        is_inner = lower in _LINKS and 0 < at < len(words) - 1
        is_sign = not lower[0].isalnum() and lower[0] not in "'’"
        if is_sign or (lower in _FUNCTION_WORDS and not is_inner):
            words = words[at + 1 :]
            break
        if lower in _DETERMINERS and at and words[at - 1].lower not in _LINKS:
            words = words[at:]
            break
    while words and words[0].lower in _LINKS:
        words = words[1:]
    good = 0 < len(words) <= _MOST_QUERY_WORDS and key([word.text for word in words])
    return words if good else []


def _noun_phrases(words: Sequence[Word]) -> Iterator[tuple[int, int]]:
    """Yield the first word and the word after the last of each noun phrase by rule 2."""
    at = 0
    while at < len(words):
        if _is_name(words[at]):
            end = at + 1
            while end < len(words) and _is_name(words[end]):
                end += 1
            yield at, end
            if end + 1 < len(words) and words[end].lower == "and" and _is_name(words[end + 1]):
                yield at, end + 2
            if end < len(words) and words[end].lower in _ENDINGS:
                yield from _runs(words, at, end + 1)
            at = end
        else:
            first = at + (words[at].lower in _DETERMINERS)
            if first > at or not _VERB_ENDING.search(words[at].lower):
                yield from _runs(words, at, first)
            at = max(first + _belongs(words, first, first), at + 1)


def _runs(words: Sequence[Word], start: int, first: int) -> Iterator[tuple[int, int]]:
    """Yield phrases that begin at `start` and whose words begin at `first`, from short to long."""
    end = first
    while end - first < _MOST_WORDS and _belongs(words, first, end):
        end += 1
        yield start, end
    if end > first and end < len(words) and words[end].lower == "of":
        inner = end + 1 + (end + 1 < len(words) and words[end + 1].lower in _DETERMINERS)
        if _belongs(words, inner, inner):
            yield start, inner + 1


def _belongs(words: Sequence[Word], first: int, at: int) -> bool:
    """Return whether a word may be part of the noun phrase whose words begin with `first`."""
    if at >= len(words) or not _is_content(words[at]):
        return False
    return at == first or not _VERB_ENDING.search(words[at].lower)


def _is_content(word: Word) -> bool:
    return word.text[0].isalpha() and word.lower not in _FUNCTION_WORDS | _DETERMINERS


def _is_name(word: Word) -> bool:
    return _is_content(word) and word.text[0].isupper()


def facts_of(sentence: str, hypothesis: str) -> dict[str, Any]:
    """Return the facts of a row that a set keeps: sentence, pronoun, query, candidates.

    `pronoun` is [first character, character after the last]. `query` and the `candidates` are texts
    to put in its place: with "'s" for a possessive pronoun, and with their first word capitalised
    like the pronoun. If no clause can be aligned, `pronoun` is None, and query and candidates are
    missing.
    """
    words = words_of(sentence)
    aligned = _align(words, words_of(hypothesis))
    if aligned is None:
        return {"sentence": sentence, "pronoun": None}
    position, query = aligned
    pronoun = words[position]
    possessive = pronoun.lower in _POSSESSIVE and (pronoun.lower != "her" or _is_possessive(query))
    query_key = key([word.text for word in query])
    texts: dict[tuple[str, ...], str] = {}
    for first, end in _noun_phrases(words):
        name = key([word.text for word in words[first:end]])
        if not first <= position < end and name and not overlap(name, query_key):
            texts.setdefault(name, sentence[words[first].start : words[end - 1].end])

    def fitted(text: str) -> str:
        if possessive and not _is_possessive(words_of(text)):
            text += "'" if text.endswith("s") else "'s"
        # At the start of a sentence, like the pronoun, or in the middle of one.
        if pronoun.text[0].isupper():
            return text[0].upper() + text[1:]
        if text.split()[0].lower() in _DETERMINERS:
            return text[0].lower() + text[1:]
        return text

    return {
        "sentence": sentence,
        "pronoun": [pronoun.start, pronoun.end],
        "query": fitted(hypothesis[query[0].start : query[-1].end]),
        "candidates": list(map(fitted, texts.values())),
    }


# ------------------------------------------------------------------------ comparing phrases


def key(words: Sequence[str]) -> tuple[str, ...]:
    """Return the words by which phrases are compared: lower case, without determiner and "'s"."""
    lower = [word.lower().replace("’", "'") for word in words]
    while lower and lower[0] in _DETERMINERS:
        lower = lower[1:]
    while lower and lower[-1] in ("'s", "'"):
        lower = lower[:-1]
    return tuple(lower)


def phrase_key(text: str) -> tuple[str, ...]:
    """Return the `key` of a text."""
    return key([word.text for word in words_of(text)])


def overlap(one: tuple[str, ...], other: tuple[str, ...]) -> bool:
    """Return whether the longer of two keys contains the shorter."""
    short, long = sorted((one, other), key=len)
    size = len(short)
    return any(long[at : at + size] == short for at in range(len(long) - size + 1))


def _is_possessive(words: Sequence[Word]) -> bool:
    """Return whether a phrase ends as in "Ann's" or "the boys'"."""
    return words[-1].lower in _ENDINGS
