"""Tagged sentences as rows of subword tokens: a word's class is at its first token.

A row is `[CLS] tokens [SEP]`, where the tokens encode the words joined by single blanks, as in
running text. This module is apart from the sets, which `preprocess` reads without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from metaseq_lm.core.batch import TokenBatch, as_tensor
from metaseq_lm.core.errors import UsageError
from metaseq_lm.data.corpus.rows import layout_of
from metaseq_lm.data.storage.indexed import concatenate_ranges
from metaseq_lm.data.tokenizers.base import Tokenizer
from metaseq_lm.data.tokenizers.loading import load_tokenizer
from metaseq_lm.data.words.sets import TAGS, WordSet
from metaseq_lm.data.words.tags import UNLABELLED, Span, bio_tag, bioes_tags
from metaseq_lm.data.words.vocabulary import SubwordVocabulary


def bio_names(labels: Sequence[str]) -> list[str]:
    """Return the BIO classes, which transformers joins to spans, for labels in BIOES."""
    return [name for name in labels if name == bio_tag(name)]


def predicted_names(labels: Sequence[str]) -> list[str]:
    """Return the classes that words of a set without spans can have."""
    return [name for name in labels if name != UNLABELLED]


def tagged_rows(folder: Path, split: str, tokens_per_sample: int) -> TaggedRows:
    """Return the rows of a split, see `TaggedRows`; a process keeps the last few that it opened.

    To encode the words of a treebank takes a second, and each suite of a run needs them.
    """
    files = []
    for file in sorted([*folder.iterdir(), *folder.parent.iterdir()]):
        if file.is_file():
            status = file.stat()
            files.append((file.name, status.st_size, status.st_mtime_ns))
    return _open_rows(folder, split, tokens_per_sample, tuple(files))


@lru_cache(maxsize=6)  # the splits of two sets
def _open_rows(folder: Path, split: str, tokens_per_sample: int, files: Any) -> TaggedRows:
    """Return the rows of a split; `files` change when the set or its tokenizer does."""
    return TaggedRows(folder, split, tokens_per_sample)


class TaggedRows:
    """One split of a tagged set as rows of at most `tokens_per_sample` tokens.

    A longer sentence becomes several rows, cut between words; a word that is too long keeps only
    its beginning. Row i holds the words `begin[i]` to `end[i] - 1`, counted over the split, of
    sentence `sentence[i]`, and has `lengths[i]` tokens with the special ones. `targets` are the
    classes of all words of the split, -1 for a word with the tag UNLABELLED, which counts for
    nothing. Raises UsageError for a length without room for text and for a set of another form.
    """

    def __init__(self, folder: Path, split: str, tokens_per_sample: int) -> None:
        tokenizer = load_tokenizer(folder.parent)
        self.vocabulary = tokenizer.vocabulary
        self.data = WordSet(folder, split, SubwordVocabulary(tokenizer))
        if self.data.form != TAGS or self.data.labels is None:
            raise UsageError(f"{folder}: a set of {self.data.form}, not of tags")
        room = tokens_per_sample - 2
        if room < 1:
            raise UsageError(f"task.tokens_per_sample is {tokens_per_sample}; it is at least 3")
        names = self.data.label_names
        self.classes = bio_names(names) if self.data.spans else predicted_names(names)
        if self.data.spans:
            names = list(map(bio_tag, names))
        numbers = {name: number for number, name in enumerate(self.classes)}
        of_label = np.array([numbers.get(name, -1) for name in names])
        self.targets = of_label[np.asarray(self.data.labels.tokens, np.int64)]
        self._encode_words(tokenizer, room)
        self._cut_sentences(room)

    def _encode_words(self, tokenizer: Tokenizer, room: int) -> None:
        """Encode each form of a word twice: as it begins a text, and as it follows a blank."""
        data, vocabulary = self.data, self.vocabulary
        forms = [data.form_text(i) for i in range(len(data.surface_forms))]
        encoded = tokenizer.encode_batch([*forms, *(f" {form}" for form in forms)])
        # Some tokenizers have no tokens for some signs.
        unknown = [vocabulary.mask if vocabulary.unk is None else vocabulary.unk]
        tokens = [ids[:room] or unknown for ids in encoded]
        is_cut = np.array([len(ids) > room for ids in encoded], bool)
        sizes = np.array([len(ids) for ids in tokens], np.int64)
        self._tokens = np.array(list(chain.from_iterable(tokens)), np.int64)
        numbers = data.form_numbers(np.arange(len(data)))
        is_later = np.ones(len(numbers), bool)
        is_later[(np.cumsum(data.lengths) - data.lengths)[data.lengths > 0]] = False
        numbers = numbers + len(forms) * is_later
        # Where the tokens of each word of the split begin, and how many there are.
        self._starts, self._sizes = (np.cumsum(sizes) - sizes)[numbers], sizes[numbers]
        self.is_cut = is_cut[numbers]  # for each word

    def _cut_sentences(self, room: int) -> None:
        rows, first, sizes = [], 0, self._sizes.tolist()
        for sentence, length in enumerate(self.data.lengths.tolist()):
            begin, used = first, 0
            for word in range(first, first + length):
                if used + sizes[word] > room:
                    rows.append((sentence, begin, word))
                    begin, used = word, 0
                used += sizes[word]
            first += length
            rows.append((sentence, begin, first))
        self.sentence, self.begin, self.end = np.array(rows, np.int64).T
        total = np.concatenate([[0], np.cumsum(self._sizes)])
        self.lengths = total[self.end] - total[self.begin] + 2

    def __len__(self) -> int:
        return len(self.sentence)

    def words(self, samples: np.ndarray) -> np.ndarray:
        """Return the numbers of the words of the rows `samples`, end to end."""
        return concatenate_ranges(self.begin[samples], self.end[samples] - self.begin[samples])

    def batch(self, samples: np.ndarray, keys: np.ndarray, width: int = 0) -> TokenBatch:
        """Return the rows `samples` (B,), padded to at least `width`; sizes "rows" and "words".

        Targets (B, S) are the class at the first token of a word, -1 elsewhere; "words" counts
        them. `keys` are not used.
        """
        lengths, n_words = self.lengths[samples], self.end[samples] - self.begin[samples]
        width = max(width, int(lengths.max()))
        words = self.words(samples)
        sizes, row = self._sizes[words], np.repeat(np.arange(len(samples)), n_words)
        before = np.cumsum(sizes) - sizes  # tokens of earlier words of the batch
        row_start = np.cumsum(lengths - 2) - (lengths - 2)
        column = 1 + before - row_start[row]
        tokens = np.full((len(samples), width), self.vocabulary.pad, np.int64)
        targets = np.full(tokens.shape, -1)
        tokens[:, 0] = self.vocabulary.cls()
        tokens[np.arange(len(samples)), lengths - 1] = self.vocabulary.sep
        places = concatenate_ranges(row * width + column, sizes)
        tokens.reshape(-1)[places] = self._tokens[concatenate_ranges(self._starts[words], sizes)]
        targets[row, column] = chosen = self.targets[words]
        return TokenBatch(
            tokens=as_tensor(tokens),
            layout=layout_of(lengths, width),
            segments=as_tensor(np.zeros_like(tokens)),
            targets=as_tensor(targets),
            samples=samples,
            sizes={"rows": len(samples), "words": int((chosen >= 0).sum())},
        )

    def labels(
        self,
        spans_of: Callable[[list[str]], Iterable[Span]],
        sentence: int,
        classes: Sequence[int],
    ) -> list[int]:
        """Return the set's label for each word of a sentence.

        Args:
            spans_of: Reads spans from tags in BIO.
            sentence: The number of the sentence.
            classes: The classes of its words that have a target.
        """
        names = [self.classes[i] for i in classes]
        numbers = self.data.label_names.index
        if self.data.spans:
            return [numbers(tag) for tag in bioes_tags(spans_of(names), len(names))]
        length = int(self.data.lengths[sentence])
        first = int(self.data.lengths[:sentence].sum())
        words = np.full(length, UNLABELLED, object)
        words[self.targets[first : first + length] >= 0] = names
        return list(map(numbers, words))
