"""Official files of benchmarks: GLUE, SuperGLUE, CLOTH (labelled sets), SQuAD and MRQA."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

from metaseq_lm.core.errors import MetaseqError, MissingError, UsageError
from metaseq_lm.core.options import flag_of, option
from metaseq_lm.core.output import show
from metaseq_lm.core.registry import abbreviated
from metaseq_lm.data.benchmarks import (
    BABYLM,
    CLOTH,
    COREFERENCE,
    SQUAD,
    SWAPPED,
    TABLE,
    Benchmark,
    as_text,
    benchmark_names,
    cloth,
    find_benchmark,
    hub_forms,
    superglue,
)
from metaseq_lm.data.benchmarks.examples import Examples, example_rows
from metaseq_lm.data.benchmarks.wnli import facts_of
from metaseq_lm.data.labelled.files import LabelledRow, RowReader, TableColumns, may_lack_labels
from metaseq_lm.data.preprocess.labelled import LabelledForm, LabelledPipeline
from metaseq_lm.data.preprocess.options import TokenizerFromOptions
from metaseq_lm.data.preprocess.pipeline import (
    TRAIN,
    Pipeline,
    Request,
    find_packed,
    register_dataset_kind,
)
from metaseq_lm.data.preprocess.squad import SquadPipeline
from metaseq_lm.data.preprocess.tokenizer import tokenizer_for_set
from metaseq_lm.data.records.file_kinds import JSON_SUFFIXES
from metaseq_lm.data.records.reading import column_names
from metaseq_lm.data.records.record import Reading
from metaseq_lm.data.records.tables import table_delimiter
from metaseq_lm.data.records.text_files import OPENERS, TextFile, format_suffix, text_files

_RECORD_SUFFIXES = (*JSON_SUFFIXES, ".csv", ".tsv", ".parquet", ".arrow")
_SHARD = re.compile(r"(?P<stem>.*?)([-_.]?\d+)?([-_.]of[-_.](?P<count>\d+))?")
# Not in the folder of the task in GLUE's own download, so its absence is not reported.
_OPTIONAL_SPLITS = ("diagnostic",)
_HUB_INDEX = "idx"  # the row numbers in exports of the `datasets` library


@dataclass(frozen=True)
class _BenchmarkOptions(TokenizerFromOptions):
    NOUN: ClassVar[str] = "benchmarks"

    benchmark: str = option(
        "",
        "glue/CoLA, superglue/WiC, babylm/WSC, cloth/CLOTH, squad/v2.0 and so on: official files, "
        "written to D/CoLA or D/NAME of --labelled; or a file of your own, MINE/TASK.yaml",
        metavar="NAME",
    )
    source: Path | None = option(
        None,
        "folder with the official files, packed or not, or those that datasets exported or saved; "
        "--trainpref and the like name others",
        metavar="DIR",
    )
    no_double: bool = option(
        False, "MRPC, STS-B: no second copy of the train rows with the texts swapped"
    )
    as_text: str | None = option(
        None,
        "SuperGLUE: one or two plain texts per row, as meta_pseudo_label and token_labels want "
        "them (choices in one text, *words* between asterisks); author: WSC's words are looked "
        "for, and equal spans of ReCoRD marked more than once, as in the code of Shen 2021 "
        "(default: own)",
        nargs="?",
        const="own",
        choices=("own", "author"),
    )
    labelled: str | None = option(None, "name of the set in D (default: the benchmark's)")


@register_dataset_kind("benchmark", _BenchmarkOptions)
def _benchmark_set(options: _BenchmarkOptions, request: Request) -> Pipeline[Any, Any]:
    """Return what makes the labelled set, or the set of questions, of a benchmark."""
    name = options.benchmark
    if name in SQUAD:
        return _questions(options, request)
    benchmark = as_text.find_text_form(name) if options.as_text else find_benchmark(name)
    labels, is_doubled = list(benchmark.labels), benchmark.expand == SWAPPED
    if options.no_double and not is_doubled:
        raise UsageError(f"--no-double does not apply to {name}: it is not doubled")
    is_doubled &= not options.no_double
    target = request.inside(options.labelled or benchmark.task)
    if options.source is not None:
        files = _official_files(benchmark, options.source)
        # Files that are named take the place of those of the folder.
        target = replace(target, splits={**files, **request.splits})
    elif not request.splits:
        raise UsageError("--benchmark needs --source DIR, or files with --trainpref and the like")

    def open_rows(split: str, path: Path, reading: Reading) -> Iterator[LabelledRow]:
        file, required = request.text_file(path), not may_lack_labels(split)
        if benchmark.reader == TABLE:
            swaps = is_doubled and split == TRAIN
            return _table_rows(benchmark, split, file, swaps, reading)
        if benchmark.reader == CLOTH:
            passages = cloth.passages_of(benchmark.levels)
            return example_rows(passages, file, True, "Is this a file of CLOTH?", reading)
        examples = _superglue_examples(benchmark, options.as_text)
        remedy = (
            f"Is this a file of {benchmark.name}, official or written by datasets? Of others a "
            "labelled set is made with --labelled NAME and --text-columns"
        )
        return example_rows(examples, file, required, remedy, reading)

    details: dict[str, Any] = {"doubled": is_doubled, "text_columns": list(benchmark.texts)}
    details["as_text"] = bool(options.as_text)
    if options.as_text:
        details["spans"] = options.as_text
    if benchmark.definition is not None:
        details["definition"] = benchmark.definition
    return LabelledPipeline(
        target,
        LabelledForm(labels or None, not labels, benchmark.form, benchmark.name, details),
        open_rows,
        tokenizer_for_set(request.destdir, options.tokenizer_from),
    )


def _superglue_examples(benchmark: Benchmark, as_text_form: str | None) -> Examples:
    task = (benchmark.original or benchmark.name).rpartition("/")[2]
    forms = superglue.EXAMPLES
    if benchmark.reader == BABYLM:
        forms = as_text.BABYLM
    elif as_text_form:
        forms = as_text.FORMS[as_text_form]
    if task not in forms:
        raise UsageError(
            f"{benchmark.name}: reader {benchmark.reader} knows the objects of {', '.join(forms)}; "
            "name the task whose they are as original"
        )
    return hub_forms.accepts_both(benchmark, task, forms[task])


def _questions(options: _BenchmarkOptions, request: Request) -> SquadPipeline:
    name, version = SQUAD[options.benchmark]
    for field_name in ("source", "no_double", "as_text"):
        if getattr(options, field_name):
            option = flag_of(field_name)
            raise UsageError(f"{option} does not apply to {options.benchmark}; give --trainpref F")
    if request.on_bad_utf8 == "skip":
        raise UsageError(
            f"--on-bad-utf8 skip does not apply to {options.benchmark}; choose replace or fail"
        )
    tokenizer = tokenizer_for_set(request.destdir, options.tokenizer_from)
    return SquadPipeline(request.inside(options.labelled or name), version, tokenizer)


def _official_files(benchmark: Benchmark, source: Path) -> dict[str, list[Path]]:
    """Return the official files in a folder by split, packed ones (.xz, .gz, .bz2) included.

    Missing files are left out with a message; MetaseqError if all are missing.
    """
    name, names = benchmark.name, dict(benchmark.files)
    if not source.is_dir():
        raise MissingError(f"{source}: no such folder; --source is the folder of {name}'s files")
    tasks = [task.partition("/")[2] for task in benchmark_names() if task.startswith("babylm/")]
    # The challenge has the files of all its tasks in one folder.
    is_challenge = name.startswith("babylm/") and any(
        find_packed(source / f"{task.lower()}.train.jsonl") for task in tasks
    )
    if is_challenge:
        names = {split: f"{benchmark.task.lower()}.{split}.jsonl" for split in names}
    files: dict[str, list[Path]] = {}
    for split, file in names.items():
        published = source / split  # as CLOTH is published
        articles = []
        # A split that `datasets` saved is a folder of JSON files as well.
        if benchmark.reader == CLOTH and not (published / "state.json").is_file():
            articles = sorted(published.rglob("*.json"))
        if articles:
            files[split] = articles
        elif official := find_packed(source / file):
            files[split] = [official]
        elif not is_challenge and (paths := _exported_files(source, split)):
            files[split] = paths
        elif split not in _OPTIONAL_SPLITS:
            show(f"{source}: no {file}, so there will be no {split} split")
    if not files:
        inside = []
        for folder in sorted(filter(Path.is_dir, source.iterdir())):
            has_official = any(find_packed(folder / file) for file in names.values())
            if has_official or any(_exported_files(folder, split) for split in names):
                inside.append(folder)
        # "sst2" is the name on the Hub.
        task = _letters(benchmark.task)
        inside.sort(key=lambda folder: task not in _letters(folder.name))
        hint = f"; they are in {inside[0]}: give it as --source" if inside else ""
        stems = ", ".join(hub_forms.SPLITS.get(split, (split,))[0] for split in names)
        raise MetaseqError(
            f"{source}: holds none of the files of {name}: {', '.join(names.values())} (or packed, "
            f"with {', '.join(OPENERS)}), and none that datasets wrote ({stems} with "
            f"{', '.join(_RECORD_SUFFIXES)}){hint}"
        )
    return files


def _exported_files(source: Path, split: str) -> list[Path]:
    """Return the files of a split that the library `datasets` exported or saved, or [].

    A file is named after the split, perhaps after other words and before the number of a part, such
    as "glue-train-00000-of-00002.arrow"; or the files are in a folder named after it.
    """
    stems = hub_forms.SPLITS.get(split, (split,))
    groups: dict[tuple[Path, str, str], list[Path]] = {}
    for path in chain(*(sorted(f.iterdir()) for f in (source, source / "data") if f.is_dir())):
        if path.is_dir() and path.name.casefold() in stems:
            if inside := list(filter(_holds_records, text_files([path]))):
                groups[path, "", ""] = inside
        elif path.is_file() and _holds_records(path) and path.name[0] not in "._":
            name = path.name.casefold().partition(format_suffix(path))[0]
            match = _SHARD.fullmatch(name)
            assert match is not None
            if any(re.fullmatch(rf"(.*[-_. ])?{stem}", match["stem"]) for stem in stems):
                group = path.parent / match["stem"], match["count"] or "", format_suffix(path)
                groups.setdefault(group, []).append(path)
    if len(groups) > 1:
        listed = abbreviated(str(files[0]) for files in groups.values())
        raise MetaseqError(
            f"{source}: several files could be the {split} split: {listed}; name the right ones, "
            "for example with --trainpref"
        )
    for (_, count, _), files in groups.items():
        if count and len(files) != int(count):
            raise MetaseqError(
                f"{files[0]}: is one of {int(count)} parts, but there are {len(files)}; copy the "
                "others, or name the files, for example with --trainpref"
            )
        return files
    return []


def _holds_records(path: Path) -> bool:
    return format_suffix(path) in _RECORD_SUFFIXES


def _table_rows(
    benchmark: Benchmark, split: str, file: TextFile, swaps: bool, reading: Reading
) -> Iterator[LabelledRow]:
    """Yield the rows of a file of GLUE with the labels of the official file, doubled if `swaps`."""
    words, columns = hub_forms.label_words(benchmark), _columns(benchmark, split, file)
    for row in RowReader(file, columns, not may_lack_labels(split), reading=reading):
        row = hub_forms.with_official_label(row, words)
        facts = row.facts or {}
        if benchmark.expand == COREFERENCE:
            row = replace(row, facts={**facts, **facts_of(*row.texts)})
        yield row
        # ELECTRA's fine-tuning doubles the train rows of these tasks so.
        if swaps:
            yield replace(row, texts=row.texts[::-1], facts={**facts, "swapped": True})


def _columns(benchmark: Benchmark, split: str, file: TextFile) -> TableColumns:
    """Return the columns of a file of GLUE, official or exported, told apart by their names.

    Raises MetaseqError, with the names of the columns, for any other file.
    """
    names, name = column_names(file), benchmark.original or benchmark.name
    present = {column.casefold() for column in names}

    def has(*columns: str) -> bool:
        return present.issuperset(column.casefold() for column in columns)

    exported = benchmark.exported_texts or benchmark.texts
    official_names = {benchmark.index, benchmark.label} - {"label"}
    is_official = has(*benchmark.texts) and (
        benchmark.texts != exported or any(map(has, official_names))
    )
    label = benchmark.label if has(benchmark.label) else "label"
    columns = TableColumns(label=label, regression=not benchmark.labels, index=benchmark.index)
    may_lack = may_lack_labels(split)
    if may_lack or has(label):
        if is_official:
            return replace(
                columns,
                texts=benchmark.texts,
                quoting="none" if table_delimiter(file) == "\t" else "auto",
                skip_malformed=benchmark.skip_malformed,
            )
        if has(*exported):
            return replace(columns, texts=exported, index=_HUB_INDEX)
        if has("text_a", "text_b"):  # a subset that somebody exported
            return columns
    if not may_lack and benchmark.header and len(names) == len(benchmark.header):
        return replace(columns, names=benchmark.header, texts=benchmark.texts, quoting="none")
    forms = [", ".join(benchmark.header or (*benchmark.texts, benchmark.label))]
    if benchmark.header:
        forms[0] += ", without a header row"
    if (*exported, "label") != (*benchmark.texts, benchmark.label) or benchmark.header:
        forms.append(f"{', '.join(exported)}, label where datasets wrote it")
    raise MetaseqError(
        f"{file}: its columns are {abbreviated(names)}; {name} has {', or '.join(forms)}. Rename "
        "them, or make a labelled set with --labelled NAME and --text-columns"
    )


def _letters(name: str) -> str:
    return re.sub(r"\W|_", "", name).casefold()
