"""Sentences in rows with lists of tokens, tags, heads: how `datasets` exports CoNLL and CoNLL-U."""

from dataclasses import dataclass, replace
from itertools import compress
from typing import Any, ClassVar

from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.core.registry import abbreviated, nearest
from metaseq_lm.data.records.record import Record
from metaseq_lm.data.words.columns import Sentence, SentenceReader, checked_tree, head_number

_WORD_FIELDS = ("tokens", "words", "form")
_HEADS, RELATIONS = "head", "deprel"
_REMEDY = "Rows of a text and a label are a labelled set: --labelled NAME"
# Heads of tokens that are several words, such as "don't", and of empty nodes.
_NO_HEAD = (None, "None", "_", "")


@dataclass
class TokenListReader(SentenceReader):
    """Reads words and the tags in `tag_field`; "" means the only other list of that length.

    `tag_names` are the names of tags that are numbers; without them a number is refused, unless
    `keeps_numbers`. With `has_tags` False only the words are read, and also serve as labels. With
    `trees` the heads are read as well. Tokens without a head are skipped if others have one.
    """

    reader: ClassVar[str] = ""
    tag_field: str = ""
    tag_names: tuple[str, ...] = ()
    keeps_numbers: bool = False
    has_tags: bool = True
    trees: bool = False

    def _sentence(self, record: Record) -> Sentence:
        record.remedy = _REMEDY
        name = next((name for name in _WORD_FIELDS if name in record.fields), _WORD_FIELDS[0])
        words, heads = record.get(name, list), self._heads(record)
        labels = self._tags(record, name, len(words)) if self.has_tags else list(words)
        if heads is not None and len(heads) == len(words):
            is_word = [head not in _NO_HEAD for head in heads]
            self.reading.counts["multi_word"] += is_word.count(False)
            words, labels, heads = (
                list(compress(values, is_word)) for values in (words, labels, heads)
            )
        elif self.trees:
            raise MetaseqError(
                f"{record.where}: {len(heads or ())} {_HEADS} for {len(words)} {name}"
            )
        for word in words:
            if not isinstance(word, str) or not word or any(sign in word for sign in " \t\r\n\f\v"):
                raise MetaseqError(f"{record.where}: token {str(word)[:40]!r} is not a word")
        labels = [self._tag(record, label) for label in labels] if self.has_tags else words
        sentence = Sentence(self.file.path, [record.line] * len(words), words, labels)
        if words and self.trees:
            numbers = [head_number(str(head), record.where) for head in heads or ()]
            return checked_tree(replace(sentence, heads=numbers))
        return sentence

    def _heads(self, record: Record) -> list[Any] | None:
        if self.trees:
            return list(record.get(_HEADS, list))
        heads = record.fields.get(_HEADS)
        if isinstance(heads, list) and any(head not in _NO_HEAD for head in heads):
            return heads
        return None

    def _tags(self, record: Record, word_field: str, count: int) -> list[Any]:
        if not self.tag_field:
            lists = []
            for name, values in record.fields.items():
                if name != word_field and isinstance(values, list) and len(values) == count:
                    lists.append(name)
            if len(lists) != 1:
                listed = f": {abbreviated(lists)}" if lists else ", and there is none"
                raise UsageError(
                    f"{record.where}: name the field with the list of tags, --tag-column "
                    f"NAME{listed}"
                )
            self.tag_field = lists[0]
        if self.tag_field not in record.fields:
            hint = nearest(self.tag_field, list(record.fields))
            raise MetaseqError(f"{record.where}: no field '{self.tag_field}'.{hint}")
        values = record.get(self.tag_field, list)
        if len(values) != count:
            raise MetaseqError(
                f"{record.where}: {len(values)} {self.tag_field} for {count} {word_field}"
            )
        return list(values)

    def _tag(self, record: Record, value: Any) -> str:
        if isinstance(value, str) and value.strip():
            return value.strip()
        if type(value) is int and self.tag_names and 0 <= value < len(self.tag_names):
            return self.tag_names[value]
        if type(value) is int and self.keeps_numbers and not self.tag_names:
            return str(value)
        remedy = (
            "name the numbers in order with --tag-names O,B-PER,..., or keep them with "
            "--tag-scheme none"
        )
        if self.tag_names:
            remedy = f"the names are of the numbers 0 to {len(self.tag_names) - 1}"
        raise MetaseqError(f"{record.where}: tag {str(value)[:40]!r} is not a name; {remedy}")
