"""Official files of benchmarks: GLUE, SuperGLUE and CLOTH to labelled sets, SQuAD and MRQA to questions."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from metaseq_lm.core.config import option
from metaseq_lm.core.errors import MetaseqError, MissingError, UsageError
from metaseq_lm.core.output import show
from metaseq_lm.data.benchmarks import (
    OPTIONAL_SPLITS,
    SQUAD,
    Benchmark,
    as_text,
    find_benchmark,
    hub_forms,
    superglue,
)
from metaseq_lm.data.benchmarks.cloth import LEVELS, ClothReader
from metaseq_lm.data.benchmarks.wnli import with_coreference
from metaseq_lm.data.labelled.files import (
    Columns,
    Row,
    RowReader,
    Rows,
    json_objects,
    may_lack_labels,
)
from metaseq_lm.data.preprocess.labelled import LabelledForm, LabelledPipeline
from metaseq_lm.data.preprocess.pipeline import (
    TRAIN,
    Pipeline,
    Request,
    find_packed,
    option_name,
    register_dataset_kind,
)
from metaseq_lm.data.preprocess.squad import SquadPipeline
from metaseq_lm.data.preprocess.tokenizer import tokenizer_for_set
from metaseq_lm.data.storage.tables import is_json
from metaseq_lm.data.storage.text_files import OPENERS, TextFile

HUB_INDEX = "idx"  # of a row that the `datasets` library exported


@dataclass(frozen=True)
class BenchmarkOptions:
    """Options of benchmarks."""

    NOUN: ClassVar[str] = "benchmarks"

    benchmark: str = option(
        "",
        "glue/CoLA, superglue/WiC, cloth/CLOTH, squad/v2.0 and so on: official files, written to D/CoLA or D/NAME "
        "of --labelled",
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
        "them (choices in one text, *words* between asterisks); author: WSC's words are looked for, "
        "and equal spans of ReCoRD marked more than once, as in the code of Shen 2021 (default: own)",
        nargs="?",
        const="own",
        choices=("own", "author"),
    )
    labelled: str | None = option(None, "")
    tokenizer_from: Path | None = option(None, "")


@register_dataset_kind("benchmark", BenchmarkOptions)
def benchmark_set(options: BenchmarkOptions, request: Request) -> Pipeline[Any, Any]:
    """Return what makes the labelled set, or the set of questions, of a benchmark."""
    name = options.benchmark
    if name in SQUAD:
        return _questions(options, request)
    benchmark = as_text.find_text_form(name) if options.as_text else find_benchmark(name)
    labels = list(benchmark.labels)
    if options.no_double and not benchmark.doubled:
        raise UsageError(f"--no-double does not apply to {name}: it is not doubled")
    doubled = benchmark.doubled and not options.no_double
    target = request.inside(options.labelled or name.split("/")[1])
    if options.source is not None:
        files = official_files(name, options.source)
        target = replace(target, splits={**files, **request.splits})
    elif not request.splits:
        raise UsageError("--benchmark needs --source DIR, or files with --trainpref and the like")
    suite, _, task = name.partition("/")

    def open_rows(split: str, path: Path) -> Rows:
        file, required = request.record_file(path), not may_lack_labels(split)
        if suite == "cloth":
            return ClothReader(file, LEVELS[name])
        if suite == "superglue":
            variant = options.as_text
            examples = as_text.FORMS[variant][task] if variant else superglue.EXAMPLES[task]
            return superglue.SuperglueReader(hub_forms.accepts_both(name, examples), file, required)
        expand: Callable[[Row], Iterable[Row]] | None = (
            with_coreference if name == "glue/WNLI" else None
        )
        if doubled and split == TRAIN:
            expand = with_swapped
        columns = _columns(name, benchmark, split, file)
        if columns.index == HUB_INDEX:
            expand = _renamed(name, expand)
        return RowReader(file, columns, required, expand=expand)

    details: dict[str, Any] = {"doubled": doubled, "text_columns": list(benchmark.texts)}
    details["as_text"] = bool(options.as_text)
    if options.as_text:
        details["spans"] = options.as_text
    return LabelledPipeline(
        target,
        LabelledForm(labels or None, not labels, benchmark.form, name, details),
        open_rows,
        tokenizer_for_set(request.destdir, options.tokenizer_from),
    )


def _questions(options: BenchmarkOptions, request: Request) -> SquadPipeline:
    name, version = SQUAD[options.benchmark]
    for field_name in ("source", "no_double", "as_text"):
        if getattr(options, field_name):
            option = option_name(field_name)
            raise UsageError(f"{option} does not apply to {options.benchmark}; give --trainpref F")
    if request.on_bad_utf8 == "skip":
        raise UsageError(
            f"--on-bad-utf8 skip does not apply to {options.benchmark}; choose replace or fail"
        )
    tokenizer = tokenizer_for_set(request.destdir, options.tokenizer_from)
    return SquadPipeline(request.inside(options.labelled or name), version, tokenizer)


def official_files(name: str, source: Path) -> dict[str, list[Path]]:
    """Return the official files in a folder by split, packed ones (.xz, .gz, .bz2) included.

    A missing one is left out with a message; MetaseqError if all are.
    """
    if not source.is_dir():
        raise MissingError(f"{source}: no such folder; --source is the folder of {name}'s files")
    names = find_benchmark(name).files
    files: dict[str, list[Path]] = {}
    for split, file in names.items():
        official = find_packed(source / file)
        exported = hub_forms.SPLITS.get(split, (split,))
        choices = ([official] if official else [], *(exports(source, stem) for stem in exported))
        if name in LEVELS and (source / split).is_dir():  # CLOTH as it is published
            files[split] = sorted((source / split).rglob("*.json"))
        elif paths := next(filter(None, choices), None):
            files[split] = paths
        elif split not in OPTIONAL_SPLITS:
            show(f"{source}: no {file}, so there will be no {split} split")
    if not files:
        stems = [stem for split in names for stem in hub_forms.SPLITS.get(split, (split,))]
        inside = [
            folder
            for folder in sorted(filter(Path.is_dir, source.iterdir()))
            if any(find_packed(folder / file) for file in names.values())
            or any(exports(folder, stem) for stem in stems)
        ]
        hint = f"; they are in {inside[0]}: give it as --source" if inside else ""
        raise MetaseqError(
            f"{source}: holds none of the files of {name}: {', '.join(names.values())} (or packed, "
            f"with {', '.join(OPENERS)}){hint}"
        )
    return files


def exports(source: Path, stem: str) -> list[Path]:
    """Return the files of a split that the library `datasets` exported or saved, as JSON lines or Arrow."""
    if path := find_packed(source / f"{stem}.jsonl"):
        return [path]
    shards = sorted(source.glob(f"{stem}-*-of-*.parquet"))
    return [*filter(Path.is_file, [source / f"{stem}.parquet"]), *shards] or sorted(
        source.glob(f"{stem}/data-*.arrow")
    )


def with_swapped(row: Row) -> Iterator[Row]:
    """Yield a row and a copy with its two texts swapped, as ELECTRA's fine-tuning trains on."""
    yield row
    yield replace(row, texts=row.texts[::-1], facts={**(row.facts or {}), "swapped": True})


def _renamed(
    name: str, expand: Callable[[Row], Iterable[Row]] | None
) -> Callable[[Row], Iterable[Row]]:
    """Return `expand` for rows of an export, whose labels become those of the official file."""
    words = hub_forms.label_words(name)

    def renamed(row: Row) -> Iterable[Row]:
        row = hub_forms.with_official_label(row, words)
        return [row] if expand is None else expand(row)

    return renamed


def _columns(name: str, benchmark: Benchmark, split: str, file: TextFile) -> Columns:
    regression = not benchmark.labels
    if is_json(file):
        texts = hub_forms.TEXTS.get(name, benchmark.texts)
        _, fields, _ = next(json_objects(file, Counter()), (0, {}, False))
        if fields.keys() >= {*texts}:
            return Columns(texts=texts, regression=regression, index=HUB_INDEX)
        # A subset that somebody exported: text_a, text_b, label.
        return Columns(regression=regression, index=benchmark.index)
    return Columns(
        names=None if may_lack_labels(split) else benchmark.header,
        texts=benchmark.texts,
        label=benchmark.label,
        regression=regression,
        index=benchmark.index,
        skip_malformed=benchmark.skip_malformed,
    )
