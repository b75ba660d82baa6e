"""Documents of a world: a corpus, labelled sets for probes and minimal pairs, with their answers.

The data folder is that of a corpus. It also holds `world.json` with the constants of the world and
the scores of a perfect model, a set for each of the world's labels, and `pairs/KIND.jsonl`.
"""

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.core.files import write_atomic
from metaseq_lm.core.options import option
from metaseq_lm.core.output import is_quiet
from metaseq_lm.data.corpus.encode import Counts
from metaseq_lm.data.labelled.files import LabelledRow
from metaseq_lm.data.ngrams import NGram
from metaseq_lm.data.preprocess.corpus import TokenPipeline
from metaseq_lm.data.preprocess.labelled import LabelledForm, LabelledPipeline
from metaseq_lm.data.preprocess.pipeline import (
    NAME,
    TRAIN,
    Pipeline,
    Request,
    Split,
    already_there,
    is_half_published,
    register_dataset_kind,
)
from metaseq_lm.data.preprocess.tokenizer import describe_tokenizer
from metaseq_lm.data.preprocess.word_sets import TaggedOptions, TagsPipeline
from metaseq_lm.data.records.record import Reading
from metaseq_lm.data.storage.indexed import IndexedWriter
from metaseq_lm.data.storage.manifest import MANIFEST_FILE, Manifest
from metaseq_lm.data.storage.word_starts import WordStartsWriter
from metaseq_lm.data.tokenizers.loading import load_tokenizer
from metaseq_lm.data.tokenizers.plain import WordTokenizer
from metaseq_lm.data.tokenizers.vocabulary import Vocabulary, special_symbols
from metaseq_lm.data.words.columns import Sentence
from metaseq_lm.data.words.tags import UNLABELLED
from metaseq_lm.data.worlds import measures
from metaseq_lm.data.worlds.base import (
    NO_LABEL,
    NO_TOKEN,
    Documents,
    World,
    build_world,
    check_documents,
    describe,
    words_of,
)

__all__ = ["load_world"]

WORLD_FILE = "world.json"
_DIGITS = 8  # significant digits of the numbers in world.json
_PAIRS = "pairs"
_VALID, _TEST = "valid", "test"
_BATCH = 4096  # documents
_RARE = 1000  # most documents drawn for one with a label, or one that makes a pair
_COUNTED = 20_000  # most documents on which n-grams are counted


@dataclass(frozen=True)
class _WorldOptions:
    """Options of a world."""

    NOUN: ClassVar[str] = "a world"

    world: str = option(
        "",
        "documents of a small language whose every probability is known, such as quad, instead of "
        "files; with labelled sets and minimal pairs in D",
        metavar="NAME",
    )
    world_seed: int = option(0, "seed of the world's constants and documents", at_least=0)
    world_documents: int = option(20000, "documents of the train split", at_least=1)
    world_held_out: int = option(1000, "documents of the valid split, and of test", at_least=2)
    world_labelled: int = option(512, "documents of each split of a labelled set", at_least=1)
    world_pairs: int = option(500, "minimal pairs of each kind", at_least=1)
    world_options: tuple[str, ...] = option((), "options of the world", metavar="A=1,B=2")
    task_tokens: int = option(1, "number of symbols [CLS0], [CLS1], ...", at_least=1)


def load_world(data: Path) -> World:
    """Return the world of a data folder.

    Raises:
        MetaseqError: The folder has no manifest, or a damaged one, or is of no world.
        UsageError: The world belongs to a plug-in, which is not loaded.
    """
    world = Manifest.load(data).details.get("world")
    if not isinstance(world, dict):
        raise MetaseqError(f"{data}: not made of a world; make it with preprocess --world NAME")
    return build_world(world["name"], world["seed"], words_of(world["options"]))


def _round_floats(content: Any) -> Any:
    """Return nested mappings and lists with DIGITS significant digits of each float.

    Exponentials and logarithms differ between processors in the last digit, and the hash of the
    data must not differ.
    """
    if isinstance(content, dict):
        return {key: _round_floats(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_round_floats(value) for value in content]
    return float(f"{content:.{_DIGITS}g}") if isinstance(content, float) else content


def _collect_documents(
    world: World, purpose: str, count: int, select: Callable[[np.ndarray], Documents]
) -> Documents:
    """Return the first `count` documents that `select` makes of keys (N,) of a purpose."""
    batches, size, start = [], 0, 0
    while size < count:
        step = min(_BATCH, max(64, 2 * (count - size)))
        batch = select(world.keys(purpose, start, step))
        start += step
        batches.append(batch)
        size += len(batch)
        if size * _RARE < start - _RARE:
            raise MetaseqError(
                f"world {world.name}: {size:,} of {start:,} documents serve for {purpose}; its "
                "options leave too little"
            )
    labels = {}
    for name in batches[0].labels:
        labels[name] = np.concatenate([batch.labels[name] for batch in batches])[:count]
    return Documents(np.concatenate([batch.tokens for batch in batches])[:count], labels)


def _collect_labelled(world: World, name: str, split: str, count: int) -> Documents:
    """Return `count` documents that have a label of the set `name`."""

    def labelled(keys: np.ndarray) -> Documents:
        documents = world.sample_labelled(name, split, keys)
        check_documents(world, documents, len(keys))
        has_label = documents.labels[name] != NO_LABEL
        if has_label.ndim > 1:  # labels of words
            has_label = has_label.any(axis=1)
        return documents.select(has_label)

    return _collect_documents(world, f"{name} {split}", count, labelled)


def _collect_pairs(world: World, kind: str, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return `count` minimal pairs of a kind, the good and the bad documents (count, S) each."""

    def pairs(keys: np.ndarray) -> Documents:
        good, bad = world.minimal_pairs(kind, keys)
        return Documents(good, {"bad": bad})

    documents = _collect_documents(world, f"pairs {kind}", count, pairs)
    return documents.tokens, documents.labels["bad"]


@register_dataset_kind("world", _WorldOptions)
class _WorldPipeline(TokenPipeline[Documents, Documents]):
    """Makes the corpus of a world, and what stands beside it."""

    def __init__(self, options: _WorldOptions, request: Request) -> None:
        super().__init__(request)
        if request.splits:
            flags = ", ".join(f"--{split}pref" for split in (TRAIN, _VALID, _TEST))
            raise UsageError(f"a world makes its own text; leave out {flags} and --split")
        self.options = options
        self.world = build_world(options.world, options.world_seed, options.world_options)
        # What a killed command has written is replaced without being asked.
        if self._was_cut_short():
            self.request = replace(self.request, overwrite=True)
        self._samples: dict[str, Documents] = {}
        self._labelled: dict[str, dict[str, Documents]] = {}
        self._pairs: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        self._exact: dict[str, Any] = {}  # scores of exact readers and baselines, by labelled set

    def input_files(self) -> Iterable[Path]:
        return []

    def prepare(self) -> dict[str, Any]:
        world, options = self.world, self.options
        self._check_folders()
        symbols = [*special_symbols(options.task_tokens, unk=True), *world.symbols]
        self.tokenizer = WordTokenizer(Vocabulary(symbols))
        self._ids = np.array([self.tokenizer.vocabulary.index(word) for word in world.symbols])
        for name in world.label_sets:
            self._labelled[name] = {
                split: _collect_labelled(world, name, split, options.world_labelled)
                for split in (TRAIN, _VALID, _TEST)
            }
        for kind in world.pair_kinds:
            self._pairs[kind] = _collect_pairs(world, kind, options.world_pairs)
        return describe_tokenizer(self.tokenizer)

    def _was_cut_short(self) -> bool:
        """Return whether this command was killed before all of its sets were there."""
        dest = self.request.destdir
        if is_half_published(dest):
            return True
        names = list(self.world.label_sets)
        if self.world.pair_kinds:
            names.append(_PAIRS)
        if all((dest / name / MANIFEST_FILE).exists() for name in names):
            return False
        # With other options the sets may be missing on purpose.
        return (dest / MANIFEST_FILE).exists() and (
            Manifest.load(dest).command == self.request.command
        )

    def _check_folders(self) -> None:
        """Raise UsageError if a set is there already: the corpus must not be written without it."""
        if self.request.overwrite:
            return
        for name in (*self.world.label_sets, _PAIRS):
            folder = self.request.destdir / name
            if (folder / MANIFEST_FILE).exists():
                raise already_there(folder)

    def splits(self) -> Iterable[Split]:
        return [Split(name, []) for name in (TRAIN, _VALID, _TEST)]

    def read(self, split: Split) -> Iterator[Documents]:
        options, start = self.options, 0
        count = options.world_documents if split.name == TRAIN else options.world_held_out
        while start < count:
            step = min(_BATCH, count - start)
            documents = self.world.sample(self.world.keys(split.name, start, step))
            yield check_documents(self.world, documents, step)
            start += step

    def encode(self, split: Split, records: Iterator[Documents]) -> Iterator[Documents]:
        return records

    def write(self, split: Split, encoded: Iterator[Documents]) -> None:
        counts = Counts()
        frequencies = np.zeros(len(self.tokenizer.vocabulary), np.int64)
        seen: list[Documents] = []
        prefix = self.folder / split.name
        with (
            IndexedWriter(prefix, self.tokenizer.dtype) as writer,
            WordStartsWriter(prefix) as words,
        ):
            for documents in encoded:
                values = self._ids[documents.tokens[documents.tokens != NO_TOKEN]]
                writer.extend(values, documents.lengths)
                words.extend(np.ones(len(values), np.int32))
                size, n = len(documents), len(values)
                counts.add(Counts(lines=size, sequences=size, documents=size, words=n, tokens=n))
                frequencies += np.bincount(values, minlength=len(frequencies))
                # The first documents serve for the baselines in world.json.
                if len(seen) * _BATCH < _COUNTED:
                    seen.append(Documents(documents.tokens))
        self._samples[split.name] = Documents(np.concatenate([d.tokens for d in seen])[:_COUNTED])
        self.note(split, counts, frequencies)

    def finish(self, splits: list[Split]) -> dict[str, Any]:
        details = super().finish(splits)
        world, constants = self.world, _round_floats(self.references())
        self._exact = constants["labelled"]
        content = {
            **describe(world),
            "symbols": list(world.symbols),
            "parameters": _round_floats(world.parameters()),
            "constants": constants,
        }
        text = json.dumps(content, indent=1, sort_keys=True) + "\n"
        write_atomic(self.folder / WORLD_FILE, text.encode())
        self.shared_files.append(WORLD_FILE)
        return {**details, "world": {**describe(world), "constants": constants}}

    def references(self) -> dict[str, Any]:
        """Return the scores of a perfect model, n-grams and chance on valid and on the sets."""
        world, valid = self.world, self._samples[_VALID]
        ngram = NGram(*measures.join_documents(self._samples[TRAIN].tokens), len(world.symbols))
        losses = measures.measure_losses(world, ngram, valid)
        return {
            "tokens_per_document": float(valid.lengths.mean()),
            "losses": {name: asdict(estimate) for name, estimate in losses.items()},
            "pairs": {
                kind: measures.pair_references(world, ngram, pairs)
                for kind, pairs in self._pairs.items()
            },
            "labelled": {
                name: measures.label_references(world, name, sets[TRAIN], sets[_TEST])
                for name, sets in self._labelled.items()
            },
            **world.references(),
        }

    def summary(self, split: Split) -> str:
        n_documents, n_tokens = split.counts["documents"], split.counts["tokens"]
        return f"{split.name}: {n_documents:,} documents, {n_tokens:,} tokens"

    def report(self) -> str:
        lines = [super().report()]
        if not is_quiet():
            lines += _table_of_needs(self._exact)
        return "\n".join(lines)

    def companions(self) -> Iterator[Pipeline[Any, Any]]:
        for name, sets in self._labelled.items():
            request = replace(self.request, splits={split: [Path(split)] for split in sets})
            documents = _LabelledDocuments(self.world, name, sets)
            if sets[TRAIN].labels[name].ndim == 1:
                yield _DocumentLabels(documents, request)
            else:
                yield _WordLabels(documents, request)
        if self._pairs:
            yield _PairsPipeline(self.world, self._pairs, self.request)


def _table_of_needs(exact: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the lines of a table of the exact readers of each set whose need is known."""
    rows = {name: scores for name, scores in exact.items() if scores.keys() & {"needs", "asks"}}
    if not rows:
        return []
    width = max(map(len, rows))
    lines = [f"{'set':{width}}  needs    word   left  right   both"]
    for name, scores in rows.items():
        need = "later" if "asks" in scores else scores["needs"] or "-"
        values = [scores["word"], scores["bayes_left"], scores["bayes_right"], scores["bayes"]]
        lines.append(f"{name:{width}}  {need:6}" + "".join(f"{value:7.3f}" for value in values))
    return lines


@dataclass(frozen=True)
class _LabelledDocuments:
    """The documents of each split of a labelled set of a world."""

    world: World
    name: str
    splits: Mapping[str, Documents]

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise UsageError(f"world {self.world.name}: {self.name!r} is no name of a labelled set")

    @property
    def classes(self) -> list[str]:
        return list(self.world.label_sets[self.name])

    def rows(self, split: str) -> Iterator[LabelledRow]:
        """Yield the documents of a split, which have a label each."""
        data = self.splits[split]
        for number, (tokens, label) in enumerate(zip(data.tokens, data.labels[self.name]), 1):
            yield LabelledRow(number, (self.world.text(tokens),), self.classes[label], False)

    def sentences(self, split: str) -> Iterator[Sentence]:
        """Yield the documents of a split, whose words have labels; UNLABELLED for the others."""
        data, tags = self.splits[split], [*self.classes, UNLABELLED]
        for number, (tokens, labels) in enumerate(zip(data.tokens, data.labels[self.name]), 1):
            words = [self.world.symbols[token] for token in tokens if token != NO_TOKEN]
            numbers = np.where(labels == NO_LABEL, len(tags) - 1, labels)[: len(words)]
            of_words = [tags[number] for number in numbers]
            yield Sentence(Path(split), [number] * len(words), words, of_words)


class _DocumentLabels(LabelledPipeline):
    """Makes the labelled set of documents with one label each."""

    def __init__(self, documents: _LabelledDocuments, request: Request) -> None:
        def open_rows(split: str, path: Path, reading: Reading) -> Iterator[LabelledRow]:
            return documents.rows(split)

        inside = request.inside(documents.name)
        form = LabelledForm(documents.classes, details={"world": documents.world.name})
        super().__init__(inside, form, open_rows, load_tokenizer(request.destdir))

    def input_files(self) -> Iterable[Path]:
        return []

    def summary(self, split: Split) -> str:
        return f"{self.request.destdir.name}/{super().summary(split)}"


class _WordLabels(TagsPipeline):
    """Makes the tagged set of documents with labelled words; other words are UNLABELLED."""

    def __init__(self, documents: _LabelledDocuments, request: Request) -> None:
        options = TaggedOptions(
            tagged=documents.name, tag_scheme="none", tokenizer_from=request.destdir
        )
        super().__init__(options, request)
        self.documents = documents

    def input_files(self) -> Iterable[Path]:
        return []

    def open_file(self, path: Path, reading: Reading) -> Iterable[Sentence]:
        return self.documents.sentences(path.name)  # a source is named like its split

    def choose_labels(self) -> None:
        self.scheme = "none"
        self.labels = [*self.documents.classes, UNLABELLED]

    def warnings(self) -> list[str]:
        """Return no warnings: warnings of long sentences are for text, not for documents."""
        return []

    def summary(self, split: Split) -> str:
        return f"{self.documents.name}/{super().summary(split)}"


class _PairsPipeline(Pipeline[dict[str, str], dict[str, str]]):
    """Writes the minimal pairs of each kind as a file that the suite `pairs` reads."""

    kind, unit = _PAIRS, "pairs"

    def __init__(
        self,
        world: World,
        pairs: Mapping[str, tuple[np.ndarray, np.ndarray]],
        request: Request,
    ) -> None:
        super().__init__(request.inside(_PAIRS))
        self.world = world
        self.pairs = pairs
        self.data = request.destdir

    def input_files(self) -> Iterable[Path]:
        return []

    def prepare(self) -> dict[str, Any]:
        return describe_tokenizer(load_tokenizer(self.data))

    def splits(self) -> Iterable[Split]:
        return [Split(kind, []) for kind in self.pairs]

    def read(self, split: Split) -> Iterator[dict[str, str]]:
        for good, bad in zip(*self.pairs[split.name]):
            texts = {"sentence_good": self.world.text(good), "sentence_bad": self.world.text(bad)}
            yield {"kind": split.name, **texts}

    def encode(self, split: Split, records: Iterator[dict[str, str]]) -> Iterator[dict[str, str]]:
        return records

    def write(self, split: Split, encoded: Iterator[dict[str, str]]) -> None:
        with contextlib.ExitStack() as stack:
            append = self.open_text(stack, split, f"{split.name}.jsonl")
            for pair in encoded:
                append(json.dumps(pair) + "\n")
                split.counts["pairs"] += 1

    def summary(self, split: Split) -> str:
        return f"{_PAIRS}/{split.name}: {split.counts['pairs']:,} pairs"
