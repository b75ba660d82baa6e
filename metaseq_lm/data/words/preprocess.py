"""Unlabelled text to a data folder with a vocabulary of words."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.data.corpus.preprocess import Job
from metaseq_lm.data.storage.manifest import Manifest
from metaseq_lm.data.storage.staging import publish, staging
from metaseq_lm.data.storage.text_files import check_policy, check_text_file
from metaseq_lm.data.words.columns import SentenceReader
from metaseq_lm.data.words.overlap import Overlap, besides, evaluation_overlap, words_reader
from metaseq_lm.data.words.running_text import SPLITTING, TextReader, count_forms
from metaseq_lm.data.words.vectors import read_vectors, vector_table
from metaseq_lm.data.words.vocabulary import (
    SPECIAL_WORDS,
    WordVocabulary,
    characters_of,
    count_words,
    frequent_words,
)
from metaseq_lm.data.words.writing import BATCH, SentenceWriter

WORDS = "words"  # the kind of the manifest
PLACES = ("text", "vectors", "both")


@dataclass(frozen=True)
class VocabularyChoice:
    """Which words get a place.

    `places` "text": the normalised words that occur `least` times, at most the `most` frequent ones;
    "vectors": all words of the file of vectors; "both": the one and then the other. Words are
    counted in the train split, in the `corpus` of plain text and in the `labelled` files in columns or
    CoNLL-U, whose words stand in `word_column`. `source` is a folder whose vocabulary is taken over.
    """

    least: int = 1
    most: int | None = None
    places: str = "text"
    vectors: Path | None = None
    corpus: tuple[Path, ...] = ()
    labelled: tuple[Path, ...] = ()
    word_column: int = 0
    source: Path | None = None

    def check(self) -> None:
        """Raise UsageError or MetaseqError for options that exclude each other and unreadable files."""
        if self.places not in PLACES:
            raise UsageError(f"--word-places {self.places}: choose one of {', '.join(PLACES)}")
        if self.places != "text" and self.vectors is None:
            raise UsageError(f"--word-places {self.places} needs --word-vectors FILE")
        for path in (*self.corpus, *self.labelled, *([self.vectors] if self.vectors else [])):
            check_text_file(path)


@dataclass(frozen=True)
class TextChoice:
    """How text is cut into sentences of words (`running_text.TextReader`), and what is left out.

    `drop` are names of sets or files (`overlap.evaluation_overlap`) whose evaluation sentences are
    removed from the train split.
    """

    splitting: str = "lines"
    paragraphs: bool = False
    drop: tuple[str, ...] = ()

    def check(self) -> None:
        """Raise UsageError for an unknown option."""
        if self.splitting not in SPLITTING:
            raise UsageError(f"--split-text {self.splitting}: choose one of {', '.join(SPLITTING)}")
        if self.paragraphs and self.splitting == "lines":
            raise UsageError(
                "--documents blank joins lines of running text; with --words it needs --split-text "
                "sentences or raw"
            )


def describe(vocabulary: WordVocabulary) -> dict[str, Any]:
    """Return what a manifest says of a vocabulary."""
    return {"name": WORDS, "hash": vocabulary.hash, "vocab_size": len(vocabulary)}


def preprocess_words(job: Job, choice: VocabularyChoice, text: TextChoice) -> Manifest:
    """Write vocabulary and sentences of unlabelled text into `job.destdir`; return the manifest.

    Without any split it is the vocabulary only, from the other files of `choice`. MetaseqError for
    input that cannot be used; then the folder is as it was.
    """
    if job.splits or choice.source is not None:
        job.check()
    check_policy(job.on_bad_utf8)
    choice.check()
    text.check()
    with staging(job.destdir, job.overwrite) as folder:
        vocabulary = make_vocabulary(job, choice, text)
        overlap = evaluation_overlap(text.drop, job.destdir, choice.word_column, job.on_bad_utf8)
        manifest = Manifest(WORDS, describe(vocabulary), {}, job.command)
        manifest.details = {"least": choice.least, "places": choice.places}
        names = vocabulary.save(folder)
        for split, paths in job.splits.items():
            readers = [_reader(path, job, text) for path in paths]
            counts = Counter({"dropped_overlap": 0})
            with SentenceWriter(folder, split, vocabulary) as writer:
                kept = without_overlap(
                    chain.from_iterable(readers), overlap if split == "train" else None, counts
                )
                while batch := list(islice(kept, BATCH)):
                    writer.extend(batch)
                for reader in readers:
                    counts.update(reader.counts)
                if not writer.sentences:
                    but = besides(counts["dropped_overlap"])
                    raise MetaseqError(f"{', '.join(map(str, paths))}: no text{but}")
            names += writer.names
            manifest.splits[split] = split_counts(writer, counts, paths)
            print(summary(split, manifest.splits[split]), flush=True)
        manifest.add_files(folder, names)
        publish(folder, job.destdir, manifest)
    return manifest


def _reader(path: Path, job: Job, text: TextChoice) -> TextReader:
    return TextReader(path, job.on_bad_utf8, text.splitting, text.paragraphs)


def make_vocabulary(job: Job, choice: VocabularyChoice, text: TextChoice) -> WordVocabulary:
    """Return the vocabulary of the train split and the files of `choice`, or that of its source."""
    if choice.source is not None:
        return WordVocabulary.load(choice.source)
    forms: Counter[str] = Counter()
    for path in job.splits.get("train", []):
        count_forms(_reader(path, job, text), forms)
    for path in choice.corpus:
        count_forms(TextReader(path, job.on_bad_utf8), forms)
    for path in choice.labelled:
        count_forms(_words(words_reader(path, choice.word_column, job.on_bad_utf8)), forms)
    if not forms:
        raise UsageError(
            "there is no text to take words from; give --trainpref, --tokenizer-corpus (plain text) or "
            "--labelled-corpus (CoNLL columns or .conllu)"
        )
    counts = count_words(forms)
    words = [] if choice.places == "vectors" else frequent_words(counts, choice.least, choice.most)
    known = {}
    if choice.vectors is not None:
        wanted = set(words) if choice.places == "text" else None
        known = read_vectors(choice.vectors, wanted, job.on_bad_utf8)
        if choice.places != "text":
            have = set(words)
            words += [word for word in known if word not in have]
    words = [*SPECIAL_WORDS, *words]
    table = vector_table(words, known) if choice.vectors is not None else None
    if table is not None:
        print(f"{len(words):,} words, {len(known):,} of them with a vector in {choice.vectors}")
    return WordVocabulary(words, characters_of(forms), [counts[word] for word in words], table)


def _words(reader: SentenceReader) -> Iterator[list[str]]:
    for sentence in reader:
        yield sentence.words


def without_overlap(
    sentences: Iterable[list[str]], overlap: Overlap | None, counts: Counter[str]
) -> Iterator[list[str]]:
    """Yield the sentences that are not in `overlap`, counting the others as "dropped_overlap"."""
    for words in sentences:
        if overlap is not None and words in overlap:
            counts["dropped_overlap"] += 1
        else:
            yield words


def split_counts(writer: SentenceWriter, counts: Counter[str], paths: list[Path]) -> dict[str, Any]:
    """Return what a manifest says of a split."""
    return {
        "sentences": writer.sentences,
        "words": writer.words,
        "unknown": writer.unknown,
        "forms": writer.forms,
        **counts,
        "sources": list(map(str, paths)),
    }


def summary(split: str, counts: dict[str, Any]) -> str:
    """Return the line of a split for the end of the run."""
    share = 100 * counts["unknown"] / max(counts["words"], 1)
    text = f"{split}: {counts['sentences']:,} sentences, {counts['words']:,} words ({share:.1f} % unknown)"
    said = {
        "blank": "blank lines",
        "documents": "lines of documents passed over",
        "multi_word": "multi-word tokens passed over",
        "empty_nodes": "empty nodes passed over",
        "bad_utf8": "with invalid UTF-8",
        "skipped": "skipped",
        "dropped_overlap": "dropped, they occur in an evaluation split",
    }
    for name, meaning in said.items():
        if counts.get(name):
            text += f", {counts[name]:,} {meaning}"
    return text
