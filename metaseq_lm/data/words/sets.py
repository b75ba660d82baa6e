"""Sentences of words on disk: unlabelled text, tagged sets and treebanks of one vocabulary.

The data folder itself holds the vocabulary and unlabelled text, a folder DATA/NAME inside it a
labelled set. Each split is pairs of files: SPLIT (ids of the words of each sentence), SPLIT.forms
(each different word as it stands in the text, as code points), SPLIT.surface (the number of the
form of each word), SPLIT.labels (class of each word, or relation to its head) and SPLIT.heads
(place of the head, 1 for the first word, 0 for the root).
"""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from metaseq_lm.config.models import LONGEST_WORD
from metaseq_lm.core import random_streams
from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.data.storage.columns import ColumnSet
from metaseq_lm.data.storage.indexed import IndexedDataset, concatenate_ranges, number_outside
from metaseq_lm.data.storage.manifest import Manifest, require_sizes
from metaseq_lm.data.words.vocabulary import (
    BRACKETS,
    PAD,
    SubwordVocabulary,
    WordVocabulary,
    is_punctuation,
    load_vocabulary,
)

TEXT, TAGS, TREES = "text", "tags", "trees"
# The kind of a manifest, and the form of its sets.
KINDS = {"words": TEXT, "tags": TAGS, "trees": TREES}
ROOT = "root"
# More words than real sentences have: in one sentence, in the only sentence, and on average.
_LONG_SENTENCE, _LONG_SINGLE, _LONG_MEAN = 256, 50, 100


@dataclass(frozen=True)
class SentenceWords:
    """The words of sentences, for streams; `lengths` (sentences,) are their numbers."""

    lengths: np.ndarray
    missing: ClassVar[str] = ""

    def count(self, samples: np.ndarray, keys: np.ndarray, width: int) -> int:
        """Return the number of words of some sentences (B,)."""
        return int(self.lengths[samples].sum())


def missing_breaks(lengths: np.ndarray, form: str) -> str:
    """Return a warning if sentences run together, with the likely cause, else "".

    Args:
        lengths: The number of words of each sentence, int64 (sentences,).
        form: "text", "tags" or "trees".
    """
    longest, count = int(lengths.max(initial=0)), len(lengths)
    most = _LONG_SINGLE if count == 1 else _LONG_MEAN
    if longest <= _LONG_SENTENCE and lengths.sum() <= most * count:
        return ""
    cause = "a blank line ends a sentence, and some seem to be missing"
    if form == TEXT:
        cause = (
            "a line is a sentence; of running text, --split-text sentences or raw finds the "
            "sentences"
        )
    return f"sentence {lengths.argmax() + 1:,} of {count:,} has {longest:,} words: {cause}"


class WordSet(ColumnSet):
    """One split of sentences; `folder` is DATA for text, else DATA/NAME.

    Attributes:
        form: "text", "tags" or "trees".
        vocabulary: The words, or a tokenizer; read from the data folder if it is not given.
        label_names: The classes of tags, or the relations of trees, "root" first.
        spans: Whether tags are spans in BIOES (scored by F1) or one class per word (accuracy).
        unseen: The class of tags that train lacks, or None.
        words: The ids of words, a sequence for each sentence.
        labels: Tags or relations, a sequence for each sentence; None for text.
        heads: Heads, a sequence for each sentence; None except for trees.
        lengths: The number of words of each sentence, int64 (sentences,).
    """

    kinds = tuple(KINDS)
    refusal = (
        "not sentences of words; make them with 'metaseq-lm preprocess' and --words, --tagged or "
        "--treebank"
    )

    def __init__(
        self,
        folder: str | Path,
        split: str,
        vocabulary: WordVocabulary | SubwordVocabulary | None = None,
    ) -> None:
        super().__init__(folder, split)
        manifest = self.manifest
        self.form = KINDS[manifest.kind]
        self.vocabulary = vocabulary or load_vocabulary(self.data_folder)
        if self.vocabulary.hash != manifest.tokenizer["hash"]:
            raise MetaseqError(
                f"{self.folder}: made with another vocabulary than the one of {self.data_folder}; "
                "preprocess it again"
            )
        self._read_details(manifest)
        self.words = self.column("")
        self.lengths = self.words.sizes
        self.surface_forms, self._surface = self.column("forms"), self.column("surface")
        self.labels = self.column("labels") if self.form != TEXT else None
        self.heads = self.column("heads") if self.form == TREES else None
        self._check()
        # Each of two swapped files is sound by itself.
        require_sizes(self.folder)

    @property
    def data_folder(self) -> Path:
        """The folder with the vocabulary."""
        return self.folder if self.form == TEXT else self.folder.parent

    def _read_details(self, manifest: Manifest) -> None:
        details = manifest.details
        self.label_names: list[str] = details.get("labels", [])
        self.spans: bool = details.get("spans", False)
        self.unseen: int | None = details.get("unseen")
        names = self.label_names
        good = isinstance(names, list) and all(isinstance(name, str) for name in names)
        good = good and bool(names) == (self.form != TEXT) and isinstance(self.spans, bool)
        good = good and (self.form != TREES or names[0] == ROOT)
        if not good or not (self.unseen is None or self.unseen in range(len(names))):
            raise MetaseqError(f"{self.folder}: unknown content of the manifest; preprocess again")

    def _check(self) -> None:
        bounds = [(self.words, len(self.vocabulary)), (self._surface, len(self.surface_forms))]
        if self.labels is not None:
            bounds.append((self.labels, len(self.label_names)))
        if self.heads is not None:
            bounds.append((self.heads, int(self.lengths.max(initial=0)) + 1))
        for data, bound in bounds:
            self.check_rows(data, self.words, same_sizes=True)
            # Text may be long: take only its first words.
            most = 1 << 20 if self.form == TEXT else None
            if number_outside(data.tokens[:most], bound) is not None:
                raise MetaseqError(
                    f"{data.prefix}.bin: a number outside 0..{bound - 1}; preprocess again"
                )
        if self.heads is not None:
            longest_heads = np.repeat(self.lengths, self.lengths)
            if (np.asarray(self.heads.tokens) > longest_heads).any():
                raise MetaseqError(
                    f"{self.heads.prefix}.bin: a head outside its sentence; preprocess again"
                )

    def __len__(self) -> int:
        return len(self.words)

    def form_numbers(self, sentences: np.ndarray) -> np.ndarray:
        """Return the number of the form of each word of `sentences`, end to end, int64 (words,)."""
        return self.flat(self._surface, sentences)

    @staticmethod
    def flat(data: IndexedDataset, sentences: np.ndarray) -> np.ndarray:
        """Return the numbers of `sentences` in one of the data sets end to end, int64 (words,)."""
        rows = np.asarray(sentences, np.int64)
        places = concatenate_ranges(data.starts[rows], data.sizes[rows])
        return np.asarray(data.tokens[places], np.int64)

    def surface(self, sentences: np.ndarray) -> list[list[str]]:
        """Return the words of `sentences` as they stand in the file."""
        rows = np.asarray(sentences, np.int64)
        forms, at = np.unique(self.form_numbers(rows), return_inverse=True)
        texts = [self.form_text(int(form)) for form in forms]
        words = [texts[i] for i in at.ravel().tolist()]
        ends = np.cumsum(self.lengths[rows]).tolist()
        return [words[first:last] for first, last in zip([0, *ends], ends)]

    def form_text(self, number: int) -> str:
        """Return a form as text."""
        codes = self.surface_forms[number].astype("<u4")
        return bytes(codes.tobytes()).decode("utf-32-le", "replace")

    def characters(self, forms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the character ids of `forms` (N,), (N, LONGEST_WORD), and their numbers."""
        assert isinstance(self.vocabulary, WordVocabulary)
        codes, counts = self.surface_forms.gather(forms, 0, LONGEST_WORD)
        for number, sign in self._brackets.items():
            is_bracket = forms == number
            codes[is_bracket, 0], counts[is_bracket] = ord(sign), 1
        ids = self.vocabulary.character_ids(codes)
        return np.where(np.arange(LONGEST_WORD) < counts[:, None], ids, PAD), counts

    @functools.cached_property
    def _short_forms(self) -> dict[int, str]:
        """The forms that may be brackets or punctuation by their number."""
        short = np.flatnonzero(self.surface_forms.sizes <= max(map(len, BRACKETS)))
        return {int(i): self.form_text(int(i)) for i in short}

    @functools.cached_property
    def _brackets(self) -> dict[int, str]:
        return {i: BRACKETS[form] for i, form in self._short_forms.items() if form in BRACKETS}

    def punctuation(self, sentences: np.ndarray) -> np.ndarray:
        """Return which words of `sentences`, end to end, scores ignore, boolean (words,)."""
        forms = [i for i, form in self._short_forms.items() if is_punctuation(form)]
        return np.isin(self.form_numbers(sentences), forms)

    def fraction(self, share: float, seed: int) -> np.ndarray:
        """Return the numbers of a random share of the sentences, ascending, int64; at least one.

        A smaller share of the same seed lies within a larger one.
        """
        order = random_streams.generator(seed, "fraction of the labels").permutation(len(self))
        return np.sort(order[: max(1, round(share * len(self)))])
