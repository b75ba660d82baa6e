"""Parallel text: two line-aligned files for each split to a data folder with two tokenizers."""

import contextlib
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from metaseq_lm.core.config import option
from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.core.files import full_disk_message
from metaseq_lm.data.corpus.encode import encode_texts
from metaseq_lm.data.parallel.sets import (
    PARALLEL,
    SIDES,
    SOURCE,
    TARGET,
    UNLABELLED,
    references_name,
    side_name,
)
from metaseq_lm.data.preprocess.pipeline import (
    TRAIN,
    Pipeline,
    Request,
    Split,
    batches,
    register_dataset_kind,
)
from metaseq_lm.data.preprocess.tokenizer import TokenizerOptions, describe_tokenizer
from metaseq_lm.data.storage.indexed import IndexedWriter
from metaseq_lm.data.storage.manifest import Manifest
from metaseq_lm.data.storage.text_files import OPENERS
from metaseq_lm.data.tokenizers.base import Tokenizer

BATCH = 1024
MAY_BE_EMPTY = (TRAIN, UNLABELLED)
# Words that occur less often are unknown; of the target as in Clark 2021, section 4.3.1.
MIN_WORD_FREQUENCY = {SOURCE: 2, TARGET: 6}


@dataclass(frozen=True)
class ParallelOptions(TokenizerOptions):
    """Options of parallel text."""

    NOUN: ClassVar[str] = "parallel text"

    parallel: str = option(
        "",
        "files PREF.S and PREF.T, line by line, PREF of --trainpref and the like; written to D/NAME, "
        "a data folder of its own",
        metavar="NAME",
    )
    tokenizer: str = option("word", "")
    source_lang: str = option("", "ending of the source files, en say", metavar="S")
    target_lang: str = option("", "ending of the target files, vi say", metavar="T")
    unlabelled: tuple[Path, ...] = option(
        (), "files (whole names) of source text without translations"
    )
    source_min_frequency: int | None = option(
        None,
        "source words or merged pairs occur this often (default: 2 for --tokenizer word, so that "
        "training knows [UNK]; else 1)",
        at_least=1,
    )
    target_min_frequency: int | None = option(
        None, "the same of the target (default: 6 for --tokenizer word, else 1)", at_least=1
    )


@dataclass
class EncodedPairs:
    """A batch of texts: ids end to end and sizes of each side, and the texts of the last side."""

    sides: list[tuple[np.ndarray, np.ndarray]]
    targets: list[str]


class ParallelPipeline(Pipeline[list[str], EncodedPairs]):
    """Two line-aligned files for each split; the sources of a request are what stands before .LANGUAGE."""

    kind, unit = PARALLEL, "rows"

    def __init__(self, options: ParallelOptions, request: Request) -> None:
        super().__init__(request.inside(options.parallel))
        if not (options.source_lang and options.target_lang):
            raise UsageError("--parallel needs --source-lang and --target-lang")
        self.options = options
        self.tokenizers: dict[str, Tokenizer] = {}
        self._pairs: dict[str, list[tuple[Path, Path]]] = {}
        self._first_empty: dict[str, str] = {}

    def input_files(self) -> Iterable[Path]:
        one, other = self.options.source_lang, self.options.target_lang
        splits = self.request.splits
        if one == other:
            raise UsageError(f"--source-lang and --target-lang are both {one!r}")
        if TRAIN not in splits:
            raise UsageError("parallel text needs --trainpref; its vocabularies come from there")
        if UNLABELLED in splits:
            raise UsageError(f"--split {UNLABELLED}=...: that name is kept for --unlabelled")
        self._pairs = {
            split: [(find_side(prefix, one), find_side(prefix, other)) for prefix in prefixes]
            for split, prefixes in splits.items()
        }
        aligned = [path for pairs in self._pairs.values() for pair in pairs for path in pair]
        return [*aligned, *self.options.unlabelled]

    def prepare(self) -> dict[str, Any]:
        """Train the tokenizer of each side; the manifest names the source's, with the hash of both."""
        options = self.options
        for place, side in enumerate(SIDES):
            corpus = [pair[place] for pair in self._pairs[TRAIN]]
            if side == SOURCE:
                corpus += options.unlabelled
            least = getattr(options, f"{side}_min_frequency")
            if least is None:
                least = MIN_WORD_FREQUENCY[side] if options.tokenizer == "word" else 1
            self.tokenizers[side] = options.train(
                list(map(self.request.text_file, corpus)), least, task_tokens=1
            )
        hashes = "".join(self.tokenizers[side].fingerprint for side in SIDES)
        joined = hashlib.blake2b(hashes.encode(), digest_size=16).hexdigest()
        return {**describe_tokenizer(self.tokenizers[SOURCE]), "hash": joined}

    def splits(self) -> Iterable[Split]:
        extra = (
            [Split(UNLABELLED, list(self.options.unlabelled))] if self.options.unlabelled else []
        )
        return [*super().splits(), *extra]

    def read(self, split: Split) -> Iterator[list[str]]:
        if split.name == UNLABELLED:
            return self._source_lines(split)
        return self._aligned_lines(split)

    def _source_lines(self, split: Split) -> Iterator[list[str]]:
        counts = split.counts
        for path in split.sources:
            for _, text, bad in self.request.text_file(path).lines():
                counts["bad_utf8"] += bad
                if bad and self.request.on_bad_utf8 == "skip":
                    counts["skipped"] += 1
                elif not text.strip():
                    counts["empty"] += 1
                else:
                    yield [text.strip()]

    def _aligned_lines(self, split: Split) -> Iterator[list[str]]:
        """Yield pairs; those with an empty side are counted where allowed, else a MetaseqError."""
        counts = split.counts
        for pair in self._pairs[split.name]:
            sides = [self.request.text_file(path).lines() for path in pair]
            for number, lines in enumerate(zip_longest(*sides), 1):
                if None in lines:
                    short = lines.index(None)
                    raise MetaseqError(
                        f"{pair[short]}: {number - 1} lines, but {pair[1 - short]} goes on with line "
                        f"{number}; the lines of parallel files must belong together one by one"
                    )
                texts = [text.strip() for _, text, _ in lines]
                bad = any(bad for _, _, bad in lines)
                counts["bad_utf8"] += bad
                if bad and self.request.on_bad_utf8 == "skip":
                    counts["skipped"] += 1
                elif all(texts):
                    yield texts
                else:
                    place = f"{pair[texts.index('')]}:{number}"
                    if split.name not in MAY_BE_EMPTY:
                        raise MetaseqError(
                            f"{place}: an empty line, which cannot be translated or compared with; take "
                            "the pair out of both files"
                        )
                    counts["empty"] += 1
                    self._first_empty.setdefault(split.name, place)

    def encode(self, split: Split, records: Iterator[list[str]]) -> Iterator[EncodedPairs]:
        sides = SIDES[: 1 if split.name == UNLABELLED else 2]
        for batch in batches(records, BATCH):
            columns = [
                encode_texts(self.tokenizers[side], texts)
                for side, texts in zip(sides, zip(*batch))
            ]
            yield EncodedPairs(columns, [texts[-1] for texts in batch])

    def write(self, split: Split, encoded: Iterator[EncodedPairs]) -> None:
        sides = SIDES[: 1 if split.name == UNLABELLED else 2]
        names = [side_name(split.name, side) for side in sides]
        unknown, rows = dict.fromkeys(sides, 0), 0
        path = self.folder / references_name(split.name)
        with contextlib.ExitStack() as stack:
            writers = [
                stack.enter_context(IndexedWriter(self.folder / name, self.tokenizers[side].dtype))
                for name, side in zip(names, sides)
            ]
            references = None
            if split.name not in MAY_BE_EMPTY:
                references = stack.enter_context(open(path, "wb"))
                split.files.append(path.name)
            for batch in encoded:
                rows += len(batch.targets)
                for side, writer, (values, sizes) in zip(sides, writers, batch.sides):
                    writer.extend(values, sizes)
                    unk = self.tokenizers[side].vocabulary.unk
                    unknown[side] += 0 if unk is None else int((values == unk).sum())
                if references is not None:
                    data = "".join(f"{text}\n" for text in batch.targets).encode("utf-8")
                    with full_disk_message(path, partial(len, data)):
                        references.write(data)
                        references.flush()
            tokens = {side: writer.tokens for side, writer in zip(sides, writers)}
        split.files += [f"{name}.{ending}" for name in names for ending in ("bin", "idx")]
        split.counts = {"rows": rows, "tokens": tokens, "unknown": unknown, **split.counts}

    def nothing(self, split: Split) -> str:
        paths = split.sources
        if split.name != UNLABELLED:
            paths = [path for pair in self._pairs[split.name] for path in pair]
        dropped = [f"{number:,} {name}" for name, number in self._dropped(split).items()]
        return (
            f"{', '.join(map(str, paths))}: no sentences; lines passed over: "
            f"{', '.join(dropped) or 'none'}"
        )

    @staticmethod
    def _dropped(split: Split) -> dict[str, int]:
        kept = ("rows", "tokens", "unknown")
        return {name: n for name, n in split.counts.items() if n and name not in kept}

    def finish(self, splits: list[Split]) -> dict[str, Any]:
        for side, tokenizer in self.tokenizers.items():
            self.shared_files += tokenizer.save(self.folder, f"{side}.")
        described = {side: describe_tokenizer(one) for side, one in self.tokenizers.items()}
        languages = {SOURCE: self.options.source_lang, TARGET: self.options.target_lang}
        return {**languages, "tokenizers": described}

    def summary(self, split: Split) -> str:
        counts = split.counts
        parts = [
            f"{tokens:,} {side} tokens ({counts['unknown'][side]:,} unknown)"
            for side, tokens in counts["tokens"].items()
        ]
        text = f"{split.name}: {counts['rows']:,} sentences, {', '.join(parts)}"
        for name, count in self._dropped(split).items():
            text += f", {count:,} {name}"
            if name == "empty" and split.name in self._first_empty:
                text += f" (the first at {self._first_empty[split.name]})"
        return text

    def report(self, manifest: Manifest) -> str:
        return "\n".join(
            f"{self.request.destdir}: {side}: {about['name']} with {about['vocab_size']:,} symbols"
            for side, about in manifest.details["tokenizers"].items()
        )


register_dataset_kind("parallel", ParallelOptions)(ParallelPipeline)


def find_side(prefix: Path, language: str) -> Path:
    """Return the file PREFIX.LANGUAGE, plain or packed; MetaseqError if there is none."""
    names = [f"{prefix}.{language}{suffix}" for suffix in ("", *OPENERS)]
    for name in names:
        if Path(name).exists():
            return Path(name)
    raise MetaseqError(
        f"{names[0]}: no such file (nor with {', '.join(OPENERS)} behind it); --trainpref and the like "
        "take what stands before .LANGUAGE"
    )
