"""Reader -> encoder -> writer: how `metaseq-lm preprocess` makes a data folder of any kind.

A kind of dataset is a class (or factory function) registered with `register_dataset_kind`. Its
dataclass of options declares its part of the command line; the object that it returns, a
`Pipeline`, reads records, encodes them and writes the files of a split. `preprocess` does the work
that all kinds share.
"""

import argparse
import contextlib
import fcntl
import os
import re
import shutil
from collections import Counter
from collections.abc import (
    Callable,
    Collection,
    Generator,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field, fields, replace
from itertools import chain, compress, islice
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from metaseq_lm.core.documents import show_result, sizes_in
from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.core.files import check_folder, full_disk_message, sync_file, sync_folder
from metaseq_lm.core.options import add_options, flag_of, read_options
from metaseq_lm.core.output import show, show_progress
from metaseq_lm.core.registry import Entry, Registry
from metaseq_lm.data.preprocess.hold_out import HoldOut
from metaseq_lm.data.records.file_kinds import Kind, check_kind
from metaseq_lm.data.records.reading import judge
from metaseq_lm.data.records.record import ARROW, signed_reader
from metaseq_lm.data.records.text_content import describe_head
from metaseq_lm.data.records.text_files import OPENERS, TextFile, text_files
from metaseq_lm.data.storage.indexed import IndexedWriter
from metaseq_lm.data.storage.manifest import MANIFEST_FILE, VALID_REMEDY, Manifest
from metaseq_lm.data.unknown_tokens import TOKENS, unknown_share
from metaseq_lm.runs.conditions import REMEDY, describe_unknown

__all__ = ["Pipeline", "Request", "Split", "register_dataset_kind"]

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_DEFAULT_KIND = "corpus"
TRAIN, VALID = "train", "valid"
_STAGING = ".preprocess"

DATASET_KINDS: Registry[Any] = Registry("dataset kind")
"""The kinds of datasets that `preprocess` makes.

A plug-in registers its own:

    @dataclass(frozen=True)
    class PoemOptions:
        NOUN: ClassVar[str] = "poems"
        poems: str = option("", "the files are poems, written to D/NAME", metavar="NAME")

    @register_dataset_kind("poems", PoemOptions)
    def poems(options: PoemOptions, request: Request) -> Pipeline: ...

The option `--poems`, named like the kind, selects it. A field that another kind has too, such as
`vocab_size`, is one option; it is declared by a base class of both, see `preprocess.options`.
`UNUSED_WITH` may say which options (names with blanks between them) exclude another one.
"""
# The decorator of a kind of dataset: its name, and `dataclass`, its options.
register_dataset_kind = DATASET_KINDS.register

Record = TypeVar("Record")
Encoded = TypeVar("Encoded")
# Columns of some rows by their names: numbers end to end with the sizes of the rows, or text.
Columns = dict[str, tuple[np.ndarray, np.ndarray] | str]


@dataclass(frozen=True)
class Request:
    """Options common to all kinds of datasets: the folder to fill, the files of each split, etc.

    Only a corpus uses more than one of the `workers`; `command` is recorded in the manifest. If a
    pipeline `holds_out`, `hold_out` says which documents of train become valid. If `on_bad_utf8` is
    None, invalid UTF-8 is replaced in files that have little of it.
    """

    destdir: Path
    splits: dict[str, list[Path]]
    on_bad_utf8: str | None = None
    workers: int = 1
    overwrite: bool = False
    command: str = ""
    encoding: str = "utf-8"
    hold_out: HoldOut | None = None
    files: dict[Path, TextFile] = field(default_factory=dict)  # those opened so far

    def text_file(self, path: Path) -> TextFile:
        """Return a file, to be read as the request says; one object for each path."""
        # What is found out about a file, such as its kind or its damage, stays with the object.
        if path not in self.files:
            is_judged = self.on_bad_utf8 is not None
            policy = self.on_bad_utf8 or "replace"
            self.files[path] = TextFile(path, policy, self.encoding, is_judged)
        return self.files[path]

    def expanded(self) -> "Request":
        """Return the same request with the files in its folders."""
        return replace(
            self, splits={name: text_files(paths) for name, paths in self.splits.items()}
        )

    def with_valid(self) -> "Request":
        """Return the same request with the files of train for valid if documents are held out."""
        if self.hold_out is None:
            return self
        if VALID in self.splits or TRAIN not in self.splits:
            raise UsageError(
                "--hold-out takes documents of --trainpref for the missing --validpref"
            )
        paths = list(dict.fromkeys(self.splits[TRAIN]))
        others = {name: files for name, files in self.splits.items() if name != TRAIN}
        return replace(self, splits={TRAIN: paths, VALID: paths, **others})

    def inside(self, name: str) -> "Request":
        """Return the same request for the set NAME in the folder."""
        if not NAME.fullmatch(name):
            raise UsageError(f"name of a set {name!r}: letters, digits, '_' and '-' only")
        check_folder(self.destdir / name)
        return replace(self, destdir=self.destdir / name)


@dataclass
class Split:
    """A split in the making: its sources, its counts, and the names of the files written.

    A count that was never set is 0.
    """

    name: str
    sources: list[Path]
    counts: dict[str, Any] = field(default_factory=Counter)
    files: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return ", ".join(map(str, self.sources))

    def other_counts(self, *names: str) -> list[str]:
        """Return "NUMBER NAME" of each count that is not zero, apart from `names`."""
        return [f"{n:,} {name}" for name, n in self.counts.items() if n and name not in names]


class Pipeline(Generic[Record, Encoded]):
    """Makes a dataset of one kind; `preprocess` calls the methods in this order.

    Each split goes through `read`, `encode` and `write` as one stream.

    Attributes:
        kind: The kind that the manifest names.
        unit: The count of a split that must not be zero.
        reads_records: Whether the files may also be Parquet or Arrow files, or folders of them.
        reads: The kinds of files that it reads; `expected` names them.
        holds_out: Whether it can hold out documents of train.
        folder: The staging folder; set before `prepare` is called.
        shared_files: The names of files that belong to no split, such as the tokenizer's.
    """

    kind: ClassVar[str]
    unit: ClassVar[str]
    reads_records: bool = False
    reads: frozenset[Kind] = frozenset(Kind)
    expected: str = "a file of this kind"
    holds_out: ClassVar[bool] = False
    folder: Path

    def __init__(self, request: Request) -> None:
        self.request = request.expanded() if self.reads_records else request
        self.shared_files: list[str] = []
        self._held_records: set[Hashable] = set()

    def input_files(self) -> Iterable[Path]:
        """Return the text files that must be readable; UsageError if there is nothing to do."""
        if not self.request.splits:
            raise UsageError("nothing to do; give --trainpref, --validpref, --testpref or --split")
        return list(chain.from_iterable(self.request.splits.values()))

    def check_file(self, path: Path) -> None:
        """Raise a MetaseqError if an input file cannot be read, is not text or of another kind."""
        file = self.request.text_file(path)
        reader = signed_reader(file)
        is_text = not reader or (reader == ARROW and not self.reads_records)
        if is_text and (meaning := describe_head(file.head, file.encoding)):
            raise MetaseqError(f"{file}: is {meaning}")
        check_kind(file, self.reads, self.expected)
        if not self.is_read_first(path):
            judge(file)

    def is_read_first(self, path: Path) -> bool:
        """Return whether `prepare` reads a whole file, and so judges the damage in it."""
        return False

    def prepare(self) -> dict[str, Any]:
        """Make or open the tokenizer; return its part of the manifest."""
        raise NotImplementedError

    def splits(self) -> Iterable[Split]:
        """Return the splits to write, in order."""
        return [Split(name, paths) for name, paths in self.request.splits.items()]

    def read(self, split: Split) -> Iterator[Record]:
        """Yield the records of the files of a split; MetaseqError names file and line."""
        raise NotImplementedError

    def encode(self, split: Split, records: Iterator[Record]) -> Iterator[Encoded]:
        """Yield the numbers to store, in batches."""
        raise NotImplementedError

    def write(self, split: Split, encoded: Iterator[Encoded]) -> None:
        """Write the files of a split into `folder`; note counts and file names."""
        raise NotImplementedError

    def nothing(self, split: Split) -> str:
        """Return the complaint about a split without any `unit`."""
        return f"{split}: no {self.unit}"

    def write_columns(self, split: Split, encoded: Iterable[Columns]) -> Counter[str]:
        """Append columns to the files SPLIT.NAME of a split; return how many numbers each got.

        Columns of numbers are pairs of files of the type of the first numbers.
        """
        writers: dict[str, IndexedWriter] = {}
        appends: dict[str, Callable[[str], None]] = {}
        with contextlib.ExitStack() as stack:
            for columns in encoded:
                for part, column in columns.items():
                    name = ".".join(filter(None, (split.name, part)))
                    if isinstance(column, str):
                        if part not in appends:
                            appends[part] = self.open_text(stack, split, name)
                        appends[part](column)
                        continue
                    if part not in writers:
                        split.files += [f"{name}.bin", f"{name}.idx"]
                        writer = IndexedWriter(self.folder / name, column[0].dtype)
                        writers[part] = stack.enter_context(writer)
                    writers[part].extend(*column)
        return Counter({part: writer.tokens for part, writer in writers.items()})

    def open_text(
        self, stack: contextlib.ExitStack, split: Split, name: str
    ) -> Callable[[str], None]:
        """Open the text file `name` of a split; return the function that appends to it."""
        split.files.append(name)
        return stack.enter_context(_text_file(self.folder / name))

    def skips(self, split: Split, bad: bool) -> bool:
        """Count a record if it held invalid UTF-8, `bad`; return whether to leave it out."""
        split.counts["bad_utf8"] += bad
        if not bad or self.request.on_bad_utf8 != "skip":
            return False
        split.counts["skipped"] += 1
        return True

    def hold_out(self, records: Iterable[Hashable], unit: str) -> None:
        """Draw those of the `records` of train, equal ones together, that become valid."""
        if self.request.hold_out is not None:
            names = list(dict.fromkeys(records))
            self._held_records = {*compress(names, self.request.hold_out.choose(len(names), unit))}

    def is_elsewhere(self, split: Split, record: Hashable) -> bool:
        """Return whether a record of the files of train and valid is of the other one."""
        if not self._held_records or split.name not in (TRAIN, VALID):
            return False
        return (record in self._held_records) != (split.name == VALID)

    def finish(self, splits: list[Split]) -> dict[str, Any]:
        """Write the files that depend on all splits; return the details of the manifest."""
        return {}

    def summary(self, split: Split) -> str:
        """Return the line of a split for the end of the run."""
        raise NotImplementedError

    def report(self) -> str:
        """Return the text to print at the end, if any."""
        return ""

    def companions(self) -> "Iterable[Pipeline[Any, Any]]":
        """Return pipelines for further data sets inside the folder, to run after this one."""
        return []


def preprocess(pipeline: Pipeline[Any, Any]) -> Manifest:
    """Make a dataset and return its manifest.

    No file gets its final name before all of the data are written.

    Raises:
        UsageError: An option cannot be used.
        MetaseqError: Input cannot be used, or the disk is full; then the folder is as it was.
    """
    request = pipeline.request
    if request.workers < 1:
        raise UsageError(f"--workers {request.workers}: at least 1")
    if request.hold_out is not None and not pipeline.holds_out:
        raise UsageError(f"--hold-out does not apply to {pipeline.kind} data")
    # All files before any work: the last of many may be the damaged one.
    for path in pipeline.input_files():
        pipeline.check_file(path)
    shares: dict[str, float | None] = {}
    with staging(request.destdir, request.overwrite) as folder:
        pipeline.folder = folder
        tokenizer = pipeline.prepare()
        splits = list(pipeline.splits())
        for split in splits:
            _write_split(pipeline, split)
        manifest = Manifest(pipeline.kind, tokenizer, {}, request.command, pipeline.finish(splits))
        for split in splits:
            manifest.splits[split.name] = {
                **split.counts,
                "sources": list(map(str, split.sources)),
            }
            manifest.add_files(folder, split.files)
            text = pipeline.summary(split)
            if "tokens" in split.counts:
                shares[split.name] = share = unknown_share(split.counts)
                if share and pipeline.kind in TOKENS:
                    text += f"; {100 * share:.3g} % of the tokens are [UNK]"
            show_progress(text)
        manifest.add_files(folder, pipeline.shared_files)
        _publish(folder, request.destdir, manifest)
    if text := pipeline.report():
        show(text)
    if text := describe_unknown(shares):
        show(f"warning: {request.destdir}: {text}; {REMEDY}")
    # A league makes sets for its probes, which are not trained on.
    if request.command and pipeline.holds_out and not manifest.has_valid:
        show_progress(f"no valid split, which training needs: {VALID_REMEDY}")
    # They open the tokenizer of the folder, which is published now.
    for companion in pipeline.companions():
        preprocess(companion)
    return manifest


def make_dataset(pipeline: Pipeline[Any, Any]) -> None:
    """Make the dataset of a command; with --json print what was made."""
    manifest, folder = preprocess(pipeline), pipeline.request.destdir
    about = {"folder": str(folder), "kind": manifest.kind, "data_hash": manifest.data_hash}
    parts = {"tokenizer": manifest.tokenizer, "splits": manifest.splits, "files": sizes_in(folder)}
    show_result("preprocess", {**about, **parts})


def _write_split(pipeline: Pipeline[Any, Any], split: Split) -> None:
    encoded = pipeline.encode(split, pipeline.read(split))
    try:
        pipeline.write(split, encoded)
    finally:
        # Close at once on an error, so that no worker process outlives the message.
        if isinstance(encoded, Generator):
            encoded.close()
    if not split.counts[pipeline.unit]:
        raise MetaseqError(pipeline.nothing(split))


@contextlib.contextmanager
def staging(dest: Path, overwrite: bool) -> Iterator[Path]:
    """Yield an empty folder inside `dest`, on the same file system; it is removed at the end.

    UsageError if `dest` holds a data set and `overwrite` is false; MetaseqError if another
    process is filling it. Files left by a killed process are removed.
    """
    existed = dest.is_dir()
    if dest.exists() and not existed:
        raise UsageError(f"{dest}: is a file; --destdir must be a folder")
    data_files = [path for path in dest.glob("*") if path.suffix in (".bin", ".idx")]
    is_there = (dest / MANIFEST_FILE).exists() or (data_files and not is_half_published(dest))
    if not overwrite and is_there:
        raise already_there(dest)
    folder = dest / _STAGING
    check_folder(folder)
    new_parents = [parent for parent in dest.parents if not parent.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            existed = True
            raise MetaseqError(
                f"{dest}: another preprocess is writing here; wait for it"
            ) from error
        try:
            for left in folder.iterdir():
                left.unlink()
            yield folder
        finally:
            shutil.rmtree(folder)
    finally:
        os.close(lock)
        if not existed and not any(dest.iterdir()):
            dest.rmdir()
            for parent in new_parents:
                with contextlib.suppress(OSError):  # another process has written into it
                    parent.rmdir()


def already_there(dest: Path) -> UsageError:
    """Return the error for a folder that holds a data set, without --overwrite."""
    return UsageError(
        f"{dest}: already holds a data set; give another --destdir, or --overwrite to replace"
    )


def is_half_published(dest: Path) -> bool:
    """Return whether a command was killed while it moved its files to `dest`."""
    return (dest / _STAGING / MANIFEST_FILE).exists() and not (dest / MANIFEST_FILE).exists()


def _publish(folder: Path, dest: Path, manifest: Manifest) -> None:
    """Move the files of `manifest` from the staging `folder` to `dest`, replacing old files.

    An index is moved after its tokens, the manifest last; an old index is removed before new tokens
    arrive, so that a kill in between never leaves an old file paired with a new one.
    """
    names = sorted(manifest.files, key=lambda name: (name.endswith(".idx"), name))
    for name in names:
        sync_file(folder / name)
    manifest.save(folder)
    try:
        old = [*Manifest.load(dest).files, *names]
    except MetaseqError:  # missing or damaged; files of the same names are removed anyway
        old = names
    (dest / MANIFEST_FILE).unlink(missing_ok=True)
    sync_folder(dest)  # after a power cut the old manifest must not be among new files
    for name in sorted(old, key=lambda name: not name.endswith(".idx")):
        if name.endswith(".idx") or name not in manifest.files:
            (dest / name).unlink(missing_ok=True)
    for name in names:
        os.replace(folder / name, dest / name)
    sync_folder(dest)
    os.replace(folder / MANIFEST_FILE, dest / MANIFEST_FILE)
    sync_folder(dest)


@contextlib.contextmanager
def _text_file(path: Path) -> Iterator[Callable[[str], None]]:
    with open(path, "xb") as file:

        def append(text: str) -> None:
            data = text.encode("utf-8")
            with full_disk_message(path, lambda: len(data)):
                file.write(data)
                file.flush()

        yield append


def find_packed(path: str | Path) -> Path | None:
    """Return a file or its .gz, .xz or .bz2 form, None if there is none."""
    return next(filter(Path.is_file, (Path(f"{path}{suffix}") for suffix in ("", *OPENERS))), None)


def end_to_end(
    rows: Collection[Sequence[int]], dtype: npt.DTypeLike
) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of rows end to end, and the sizes of the rows."""
    sizes = np.fromiter(map(len, rows), np.int64, len(rows))
    return np.fromiter(chain.from_iterable(rows), dtype, int(sizes.sum())), sizes


def batches(records: Iterable[Record], size: int) -> Iterator[list[Record]]:
    """Yield lists of `size` records; the last one may be shorter."""
    iterator = iter(records)
    while batch := list(islice(iterator, size)):
        yield batch


# ---------------------------------------------------------------- options


def all_kinds() -> dict[str, Any]:
    """Return the dataclass of the options of each registered kind, the default one first."""
    names = sorted(DATASET_KINDS.entries, key=lambda name: name != _DEFAULT_KIND)
    return {name: DATASET_KINDS.entries[name].dataclass for name in names}


def add_kinds(parser: argparse.ArgumentParser) -> None:
    """Declare the options of every registered kind in a group; a shared one is declared once."""
    kinds = all_kinds()
    added: set[str] = set()
    for name, kind in kinds.items():
        group = parser.add_argument_group(kind.NOUN)
        selectors = kinds.keys() - {name}  # each is declared with its own kind
        add_options(group, kind, without=added | selectors)
        added |= {item.name for item in fields(kind)} - selectors


def choose_kind(arguments: Mapping[str, Any]) -> tuple[Entry[Any], Any]:
    """Return the kind of dataset that command-line arguments ask for, and its options.

    Args:
        arguments: The value of each option; None for one that is not passed.

    Raises:
        UsageError: Two kinds are selected, or an option is of another kind or out of its range.
    """
    kinds = all_kinds()
    items = {}
    for kind, cls in kinds.items():
        items[kind] = {item.name: item for item in fields(cls)}
    passed = {name: value for name, value in arguments.items() if value is not None}
    selected = [name for name in passed if name in kinds]
    # --labelled also names the set of a benchmark.
    for kind in tuple(selected):
        if any(kind in items[other] for other in selected if other != kind):
            selected.remove(kind)
    if len(selected) > 1:
        raise UsageError(f"{' and '.join(map(flag_of, selected))} exclude each other")
    chosen = selected[0] if selected else _DEFAULT_KIND
    for name in passed:
        owners = [kind for kind in kinds if name in items[kind]]
        if not owners or chosen in owners:
            continue
        selectors = [items[kind][kind] for kind in owners if kind in items[kind]]
        flags = []
        for item in selectors:
            flags.append(f"{flag_of(item.name)} {item.metadata.get('metavar', '')}".rstrip())
        nouns = _enumerated([kinds[kind].NOUN for kind in owners], "and")
        option, remedy = flag_of(name), _enumerated(flags, "or")
        if not selected:
            raise UsageError(f"{option} only applies to {nouns}; give {remedy} as well")
        if remedy:
            nouns += f" ({remedy})"
        raise UsageError(f"{option} does not apply to {kinds[chosen].NOUN}, only to {nouns}")
    values = {name: value for name, value in passed.items() if name in items[chosen]}
    for other, names in getattr(kinds[chosen], "UNUSED_WITH", {}).items():
        unused = [name for name in names.split() if {name, other} <= values.keys()]
        for name in unused:
            raise UsageError(f"{flag_of(name)} and {flag_of(other)} exclude each other")
    return DATASET_KINDS.entries[chosen], read_options(kinds[chosen], values)


def _enumerated(words: list[str], conjunction: str) -> str:
    return f" {conjunction} ".join(part for part in (", ".join(words[:-1]), *words[-1:]) if part)
