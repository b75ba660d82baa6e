"""CoNLL-U, the format of Universal Dependencies, in and out."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.core.registry import nearest
from metaseq_lm.data.words.columns import Sentence, SentenceReader, checked_tree

FIELDS = ("id", "form", "lemma", "upos", "xpos", "feats", "head", "deprel", "deps", "misc")
ID, FORM, HEAD, RELATION = 0, 1, 6, 7


def field_number(name: str) -> int:
    """Return the column of a field of CoNLL-U by its name; UsageError for an unknown name."""
    if name not in FIELDS:
        raise UsageError(
            f"--tag-column {name}: a .conllu file has the columns {', '.join(FIELDS)}."
            f"{nearest(name, list(FIELDS))}"
        )
    return FIELDS.index(name)


@dataclass
class ConlluReader(SentenceReader):
    """Reads the words of .conllu files with one column as their label, and with heads if `trees`.

    Comments, lines of multi-word tokens (3-4) and empty nodes (8.1) are passed over; subtypes of
    relations (nsubj:pass) are kept. MetaseqError with file and line for rows that have not ten
    fields, ids out of order, and heads that make no tree.
    """

    label: int = RELATION
    trees: bool = True

    def _sentence(self, lines: list[tuple[int, str]]) -> Sentence | None:
        rows: list[tuple[int, list[str]]] = []
        for number, text in lines:
            if text.startswith("#"):
                continue
            fields = text.split("\t")
            if len(fields) != len(FIELDS) or not all(fields):
                raise MetaseqError(
                    f"{self.file}:{number}: {len(fields)} fields (none may be empty), but a row of CoNLL-U "
                    f"has {len(FIELDS)} with tabs between them"
                )
            if "-" in fields[ID] or "." in fields[ID]:
                self.counts["multi_word" if "-" in fields[ID] else "empty_nodes"] += 1
                continue
            if fields[ID] != str(len(rows) + 1):
                raise MetaseqError(
                    f"{self.file}:{number}: id {fields[ID]!r} where {len(rows) + 1} should stand"
                )
            rows.append((number, fields))
        sentence = Sentence(
            self.file.path,
            [number for number, _ in rows],
            [fields[FORM] for _, fields in rows],
            [fields[self.label] for _, fields in rows],
        )
        if not self.trees:
            return sentence
        heads = [self._head(number, fields[HEAD]) for number, fields in rows]
        return checked_tree(replace(sentence, heads=heads))

    def _head(self, number: int, text: str) -> int:
        if not (text.isascii() and text.isdigit() and len(text) < 10):
            raise MetaseqError(f"{self.file}:{number}: head {text[:20]!r} is not a whole number")
        return int(text)


def conllu_text(words: Sequence[str], heads: Sequence[int], relations: Sequence[str]) -> str:
    """Return a sentence as rows of CoNLL-U with its blank line; heads from 1, 0 for the root.

    What is not known of a word is "_". ValueError if the three differ in length.
    """
    if not len(words) == len(heads) == len(relations):
        raise ValueError(f"{len(words)} words, {len(heads)} heads, {len(relations)} relations")
    rows = []
    for number, (word, head, relation) in enumerate(zip(words, heads, relations), 1):
        fields = ["_"] * len(FIELDS)
        fields[ID], fields[FORM] = str(number), word
        fields[HEAD], fields[RELATION] = str(head), relation
        rows.append("\t".join(fields))
    return "\n".join(rows) + "\n\n"
