"""Parallel text: two line-aligned files for each split to a data folder with two tokenizers."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from metaseq_lm.config.tasks import UNLABELLED
from metaseq_lm.core.errors import MetaseqError, MissingError, UsageError
from metaseq_lm.core.options import option, with_default
from metaseq_lm.data.corpus.encode import encode_texts
from metaseq_lm.data.parallel.sets import PARALLEL, REFERENCES, SIDES, SOURCE, TARGET
from metaseq_lm.data.preprocess.hold_out import HeldOutLines, HoldOut
from metaseq_lm.data.preprocess.options import PlainTextOptions
from metaseq_lm.data.preprocess.pipeline import (
    TRAIN,
    VALID,
    Columns,
    Pipeline,
    Request,
    Split,
    batches,
    find_packed,
    register_dataset_kind,
)
from metaseq_lm.data.preprocess.tokenizer import TokenizerOptions, describe_tokenizer
from metaseq_lm.data.records.file_kinds import PLAIN, Kind
from metaseq_lm.data.records.text_files import OPENERS
from metaseq_lm.data.tokenizers.base import Tokenizer
from metaseq_lm.data.unknown_tokens import count_unknown

_BATCH = 1024
_MAY_BE_EMPTY = (TRAIN, UNLABELLED)
_MAIN_COUNTS = ("rows", "tokens", "unknown")
# Rarer words are unknown; the target's limit is from Clark 2021, section 4.3.1.
_MIN_WORD_FREQUENCY = {SOURCE: 2, TARGET: 6}


@dataclass(frozen=True)
class _ParallelOptions(TokenizerOptions, PlainTextOptions):
    NOUN: ClassVar[str] = "parallel text"

    parallel: str = option(
        "",
        "files PREF.S and PREF.T, line by line, PREF of --trainpref and the like; written to "
        "D/NAME, a data folder of its own",
        metavar="NAME",
    )
    tokenizer: str = with_default(TokenizerOptions, "tokenizer", "word")
    source_lang: str = option("", "ending of the source files, en say", metavar="S")
    target_lang: str = option("", "ending of the target files, vi say", metavar="T")
    unlabelled: tuple[Path, ...] = option(
        (), "files (whole names) of source text without translations"
    )
    source_min_frequency: int | None = option(
        None,
        "only source words or merged pairs that occur this often get a symbol (default: 2 for "
        "--tokenizer word, so that [UNK] occurs in training; else 1)",
        at_least=1,
    )
    target_min_frequency: int | None = option(
        None, "the same of the target (default: 6 for --tokenizer word, else 1)", at_least=1
    )


@register_dataset_kind("parallel", _ParallelOptions)
class _ParallelPipeline(Pipeline[list[str], Columns]):
    """Two line-aligned files for each split; a request names them without .LANGUAGE."""

    kind, unit = PARALLEL, "rows"
    holds_out = True
    _held: HeldOutLines | None = None
    expected = "plain text"

    def __init__(self, options: _ParallelOptions, request: Request) -> None:
        super().__init__(request.inside(options.parallel).with_valid())
        if not (options.source_lang and options.target_lang):
            raise UsageError("--parallel needs --source-lang and --target-lang")
        self.options = options
        self.reads = frozenset(Kind) if options.plain_text else PLAIN
        self.tokenizers: dict[str, Tokenizer] = {}
        # The files of each split that belong together; those of UNLABELLED stand alone.
        self._pairs: dict[str, list[tuple[Path, ...]]] = {}
        self._first_empty = ""  # the place in train

    def input_files(self) -> Iterable[Path]:
        source, target = self.options.source_lang, self.options.target_lang
        splits = self.request.splits
        if source == target:
            raise UsageError(f"--source-lang and --target-lang are both {source!r}")
        if TRAIN not in splits:
            raise UsageError("parallel text needs --trainpref; its vocabularies come from there")
        if UNLABELLED in splits:
            raise UsageError(f"--split {UNLABELLED}=...: that name is kept for --unlabelled")
        for split, prefixes in splits.items():
            self._pairs[split] = [
                (_find_side(prefix, source), _find_side(prefix, target)) for prefix in prefixes
            ]
        if self.options.unlabelled:
            self._pairs[UNLABELLED] = [(path,) for path in self.options.unlabelled]
        return list(chain.from_iterable(chain.from_iterable(self._pairs.values())))

    def is_read_first(self, path: Path) -> bool:
        return path in (*chain.from_iterable(self._pairs[TRAIN]), *self.options.unlabelled)

    def prepare(self) -> dict[str, Any]:
        """Train the tokenizer of each side; the manifest names the source's and hashes both."""
        options = self.options
        if self.request.hold_out is not None:
            self._held = self._held_out_pairs(self.request.hold_out)
        for column, side in enumerate(SIDES):
            files = []
            for pair in self._pairs[TRAIN]:
                file = self.request.text_file(pair[column])
                blocks = file.blocks()
                # Text that is held out must not shape the vocabulary.
                if self._held is not None:
                    blocks = self._held.part(pair[column], blocks, False)
                files.append((file, blocks))
            if side == SOURCE:
                for file in map(self.request.text_file, options.unlabelled):
                    files.append((file, file.blocks()))
            min_frequency = getattr(options, f"{side}_min_frequency")
            if min_frequency is None:
                min_frequency = _MIN_WORD_FREQUENCY[side] if options.tokenizer == "word" else 1
            self.tokenizers[side] = options.train(files, min_frequency, task_tokens=1)
        hashes = "".join(self.tokenizers[side].fingerprint for side in SIDES)
        joined = hashlib.blake2b(hashes.encode(), digest_size=16).hexdigest()
        return {**describe_tokenizer(self.tokenizers[SOURCE]), "hash": joined}

    def _held_out_pairs(self, hold_out: HoldOut) -> HeldOutLines:
        lines: dict[Path, np.ndarray] = {}
        for pair in self._pairs[TRAIN]:
            is_full = []
            for _, sides in self._lines(pair):
                is_full.append(all(text.strip() for _, text, _ in sides))
            lines |= dict.fromkeys(pair, np.array(is_full, bool))
        counts = [int(lines[pair[0]].sum()) for pair in self._pairs[TRAIN]]
        held = np.split(hold_out.choose(sum(counts), "pairs"), np.cumsum(counts)[:-1])
        for pair, part in zip(self._pairs[TRAIN], held):
            places = lines[pair[0]].copy()
            places[places] = part
            lines |= dict.fromkeys(pair, places)
        return HeldOutLines(lines)

    def splits(self) -> Iterable[Split]:
        yield from super().splits()
        if self.options.unlabelled:
            yield Split(UNLABELLED, list(self.options.unlabelled))

    def _lines(self, pair: tuple[Path, ...]) -> Iterator[tuple[int, list[tuple[int, str, bool]]]]:
        sides = [self.request.text_file(path).lines() for path in pair]
        for number, lines in enumerate(zip_longest(*sides), 1):
            if None in lines:
                short = lines.index(None)
                raise MetaseqError(
                    f"{pair[short]}: {number - 1} lines, but {pair[1 - short]} goes on with "
                    f"line {number}; the lines of parallel files must belong together one by "
                    "one"
                )
            yield number, list(lines)

    def read(self, split: Split) -> Iterator[list[str]]:
        """Yield pairs; one with an empty side is counted if allowed, else a MetaseqError."""
        held = self._held if split.name in (TRAIN, VALID) else None
        for pair in self._pairs[split.name]:
            for number, lines in self._lines(pair):
                if held is not None and held.holds(pair[0], number) != (split.name == VALID):
                    continue
                texts = [text.strip() for _, text, _ in lines]
                if self.skips(split, any(bad for _, _, bad in lines)):
                    continue
                if all(texts):
                    yield texts
                    continue
                location = f"{pair[texts.index('')]}:{number}"
                if split.name not in _MAY_BE_EMPTY:
                    raise MetaseqError(
                        f"{location}: an empty line, which cannot be translated or compared with; "
                        "take the pair out of both files"
                    )
                split.counts["empty"] += 1
                if split.name == TRAIN:
                    self._first_empty = self._first_empty or location

    def encode(self, split: Split, records: Iterator[list[str]]) -> Iterator[Columns]:
        counts = split.counts
        counts["rows"], counts["unknown"] = 0, {}
        for batch in batches(records, _BATCH):
            columns: Columns = {}
            for side, texts in zip(SIDES, zip(*batch)):
                columns[side] = values, _ = encode_texts(self.tokenizers[side], texts)
                unk = self.tokenizers[side].vocabulary.unk
                unknown = counts["unknown"].get(side, 0) + count_unknown(values, unk)
                counts["unknown"][side] = unknown
            if split.name not in _MAY_BE_EMPTY:
                columns[REFERENCES] = "".join(f"{texts[-1]}\n" for texts in batch)
            counts["rows"] += len(batch)
            yield columns

    def write(self, split: Split, encoded: Iterator[Columns]) -> None:
        tokens = dict(self.write_columns(split, encoded))
        split.counts = {"rows": split.counts["rows"], "tokens": tokens, **split.counts}

    def nothing(self, split: Split) -> str:
        paths = chain.from_iterable(self._pairs[split.name])
        dropped = ", ".join(split.other_counts(*_MAIN_COUNTS)) or "none"
        return f"{', '.join(map(str, paths))}: no sentences; lines passed over: {dropped}"

    def finish(self, splits: list[Split]) -> dict[str, Any]:
        for side, tokenizer in self.tokenizers.items():
            self.shared_files += tokenizer.save(self.folder, f"{side}.")
        languages = {SOURCE: self.options.source_lang, TARGET: self.options.target_lang}
        tokenizers = {side: describe_tokenizer(t) for side, t in self.tokenizers.items()}
        return {**languages, "tokenizers": tokenizers}

    def summary(self, split: Split) -> str:
        counts = split.counts
        parts = [
            f"{tokens:,} {side} tokens ({counts['unknown'][side]:,} unknown)"
            for side, tokens in counts["tokens"].items()
        ]
        for count in split.other_counts(*_MAIN_COUNTS):
            if split.name == TRAIN and count.endswith("empty"):
                count += f" (the first at {self._first_empty})"
            parts.append(count)
        return f"{split.name}: {counts['rows']:,} sentences, {', '.join(parts)}"

    def report(self) -> str:
        return "\n".join(
            f"{self.request.destdir}: {side}: {t.name} with {len(t.vocabulary):,} symbols"
            for side, t in self.tokenizers.items()
        )


def _find_side(prefix: Path, language: str) -> Path:
    name = f"{prefix}.{language}"
    if path := find_packed(name):
        return path
    raise MissingError(
        f"{name}: no such file (nor with {', '.join(OPENERS)} behind it); --trainpref and the like "
        "take what stands before .LANGUAGE"
    )
