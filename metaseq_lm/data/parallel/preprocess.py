"""Two line-aligned files for each split to a data folder of parallel text."""

import contextlib
import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain, islice, zip_longest
from pathlib import Path

from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.core.files import full_disk_message
from metaseq_lm.data.corpus.encode import encode_texts
from metaseq_lm.data.corpus.preprocess import Job, TokenizerChoice, describe, make_tokenizer
from metaseq_lm.data.parallel.sets import (
    PARALLEL,
    SIDES,
    SOURCE,
    TARGET,
    UNLABELLED,
    references_name,
    side_name,
)
from metaseq_lm.data.storage.indexed import IndexedWriter
from metaseq_lm.data.storage.manifest import Manifest
from metaseq_lm.data.storage.staging import publish, staging
from metaseq_lm.data.storage.text_files import OPENERS, numbered_lines
from metaseq_lm.data.tokenizers.base import Tokenizer

BATCH = 1024
TRAIN = "train"
MAY_BE_EMPTY = (TRAIN, UNLABELLED)


@dataclass(frozen=True)
class ParallelChoice:
    """The two languages (endings of the files), the tokenizer of each side, and source-only text.

    Job's splits are prefixes: PREF of PREF.en and PREF.vi.
    """

    languages: tuple[str, str]
    tokenizers: dict[str, TokenizerChoice]
    unlabelled: tuple[Path, ...] = ()


@dataclass
class _Counts:
    """What became of the lines of a split."""

    rows: int = 0
    tokens: dict[str, int] = field(default_factory=dict)
    unknown: dict[str, int] = field(default_factory=dict)
    dropped: Counter[str] = field(default_factory=Counter)
    first_empty: str = ""

    def stored(self) -> dict:
        """Return what the manifest keeps."""
        return {"rows": self.rows, "tokens": self.tokens, "unknown": self.unknown, **self.dropped}


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


def aligned(pair: tuple[Path, Path], job: Job, counts: _Counts, may_be_empty: bool) -> Iterator:
    """Yield the two texts of each line of two files.

    Pairs with an empty side are passed over and counted where they may be. MetaseqError with file
    and line where they may not, and for files of different length.
    """
    sides = [numbered_lines(path, job.on_bad_utf8) for path in pair]
    number = 0
    for number, lines in enumerate(zip_longest(*sides), 1):
        if None in lines:
            short = lines.index(None)
            raise MetaseqError(
                f"{pair[short]}: {number - 1} lines, but {pair[1 - short]} goes on with line {number}; "
                "the lines of parallel files must belong together one by one"
            )
        texts = [text.strip() for _, text, _ in lines]
        counts.dropped["bad_utf8"] += any(bad for _, _, bad in lines)
        if any(bad for _, _, bad in lines) and job.on_bad_utf8 == "skip":
            counts.dropped["skipped"] += 1
        elif not all(texts):
            where = f"{pair[texts.index('')]}:{number}"
            if not may_be_empty:
                raise MetaseqError(
                    f"{where}: an empty line, which cannot be translated or compared with; take the pair "
                    "out of both files"
                )
            counts.dropped["empty"] += 1
            counts.first_empty = counts.first_empty or where
        else:
            yield texts


def lines_of(paths: tuple[Path, ...], job: Job, counts: _Counts) -> Iterator[list[str]]:
    """Yield the text of each line that has some, as a list of one."""
    for path in paths:
        for _, text, bad in numbered_lines(path, job.on_bad_utf8):
            counts.dropped["bad_utf8"] += bad
            if bad and job.on_bad_utf8 == "skip":
                counts.dropped["skipped"] += 1
            elif not text.strip():
                counts.dropped["empty"] += 1
            else:
                yield [text.strip()]


def preprocess_parallel(job: Job, choice: ParallelChoice) -> Manifest:
    """Write the parallel text of `job` into its folder and return its manifest.

    MetaseqError with file and line for what cannot be used; then nothing is written. UsageError
    without a train split, or for two equal languages.
    """
    files = check(job, choice)
    with staging(job.destdir, job.overwrite) as folder:
        tokenizers, names = _train_tokenizers(job, choice, files, folder)
        sizes = {side: describe(tokenizer) for side, tokenizer in tokenizers.items()}
        joined = "".join(sizes[side]["hash"] for side in SIDES).encode()
        about = {**sizes[SOURCE], "hash": hashlib.blake2b(joined, digest_size=16).hexdigest()}
        details = {SOURCE: choice.languages[0], TARGET: choice.languages[1], "tokenizers": sizes}
        manifest = Manifest(PARALLEL, about, {}, job.command, details)
        for split in [*files, *([UNLABELLED] if choice.unlabelled else [])]:
            counts = _Counts()
            rows: Iterator = lines_of(choice.unlabelled, job, counts)
            if split in files:
                loose = split in MAY_BE_EMPTY
                rows = (r for pair in files[split] for r in aligned(pair, job, counts, loose))
            names += _write_split(folder, split, rows, tokenizers, counts)
            sources = choice.unlabelled if split == UNLABELLED else job.splits[split]
            if not counts.rows:
                taken = sources if split == UNLABELLED else chain.from_iterable(files[split])
                dropped = [f"{n:,} {name}" for name, n in counts.dropped.items() if n]
                raise MetaseqError(
                    f"{', '.join(map(str, taken))}: no sentences; lines passed over: "
                    f"{', '.join(dropped) or 'none'}"
                )
            manifest.splits[split] = {**counts.stored(), "sources": list(map(str, sources))}
            print(_summary(split, counts), flush=True)
        manifest.add_files(folder, names)
        publish(folder, job.destdir, manifest)
    return manifest


def check(job: Job, choice: ParallelChoice) -> dict[str, list[tuple[Path, Path]]]:
    """Return the pairs of files of each split; raises before anything is written."""
    if choice.languages[0] == choice.languages[1]:
        raise UsageError(f"--source-lang and --target-lang are both {choice.languages[0]!r}")
    if TRAIN not in job.splits:
        raise UsageError("parallel text needs --trainpref; its vocabularies come from there")
    if UNLABELLED in job.splits:
        raise UsageError(f"--split {UNLABELLED}=...: that name is kept for --unlabelled")
    files = {}
    for split, prefixes in job.splits.items():
        one, other = choice.languages
        files[split] = [(find_side(p, one), find_side(p, other)) for p in prefixes]
    paths = {split: [p for pair in pairs for p in pair] for split, pairs in files.items()}
    if choice.unlabelled:
        paths[UNLABELLED] = list(choice.unlabelled)
    replace(job, splits=paths).check()
    return files


def _train_tokenizers(
    job: Job,
    choice: ParallelChoice,
    files: dict[str, list[tuple[Path, Path]]],
    folder: Path,
) -> tuple[dict[str, Tokenizer], list[str]]:
    """Return the tokenizer of each side and the names of its files, which are written."""
    tokenizers, names = {}, []
    for place, side in enumerate(SIDES):
        corpus = [pair[place] for pair in files[TRAIN]]
        if side == SOURCE:
            corpus += choice.unlabelled
        wanted = replace(choice.tokenizers[side], corpus=tuple(corpus))
        tokenizers[side] = make_tokenizer(wanted, job)
        names += tokenizers[side].save(folder, f"{side}.")
    return tokenizers, names


def _write_split(
    folder: Path,
    split: str,
    rows: Iterator[list[str]],
    tokenizers: dict[str, Tokenizer],
    counts: _Counts,
) -> list[str]:
    """Write the token files of a split, and its references, and return the names of the files."""
    sides = SIDES[: 1 if split == UNLABELLED else 2]
    names = [f"{side_name(split, side)}.{ending}" for side in sides for ending in ("bin", "idx")]
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        writers = [
            enter(IndexedWriter(folder / side_name(split, side), tokenizers[side].dtype))
            for side in sides
        ]
        if split not in MAY_BE_EMPTY:
            names.append(references_name(split))
            references = enter(open(folder / references_name(split), "wb"))
        counts.unknown = dict.fromkeys(sides, 0)
        while batch := list(islice(rows, BATCH)):
            counts.rows += len(batch)
            for place, (side, writer) in enumerate(zip(sides, writers)):
                tokenizer = tokenizers[side]
                values, sizes = encode_texts(tokenizer, [row[place] for row in batch])
                writer.extend(values, sizes)
                unknown = tokenizer.vocabulary.unk
                counts.unknown[side] += 0 if unknown is None else int((values == unknown).sum())
            if split not in MAY_BE_EMPTY:
                data = "".join(f"{row[1]}\n" for row in batch).encode("utf-8")
                with full_disk_message(folder / references_name(split), lambda: len(data)):
                    references.write(data)
                    references.flush()
        counts.tokens = {side: writer.tokens for side, writer in zip(sides, writers)}
    return names


def _summary(split: str, counts: _Counts) -> str:
    parts = [
        f"{counts.tokens[side]:,} {side} tokens ({counts.unknown[side]:,} unknown)"
        for side in counts.tokens
    ]
    text = f"{split}: {counts.rows:,} sentences, {', '.join(parts)}"
    for name, count in counts.dropped.items():
        text += f", {count:,} {name}" if count else ""
        if count and name == "empty" and counts.first_empty:
            text += f" (the first at {counts.first_empty})"
    return text
