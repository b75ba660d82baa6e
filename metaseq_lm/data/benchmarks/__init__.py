"""Benchmarks: each task is a file BENCHMARK/TASK.yaml with its columns, labels and metric.

The files in this folder describe GLUE and SuperGLUE (Wang et al. 2019), CLOTH (Xie et al. 2018),
and the seven tasks that the BabyLM challenge takes from the first two. The order of the labels is
the alphabetical one of ELECTRA's fine-tuning code. A user's own file has the same keys.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from metaseq_lm.config.suites import SplitConfig
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.options import option
from metaseq_lm.core.plain_yaml import naming_place, read_yaml
from metaseq_lm.core.registry import METRICS, SUITES, NoOptions, nearest
from metaseq_lm.core.structured import read_structured

_FOLDER = Path(__file__).parent
_SUFFIX = ".yaml"
TABLE, SUPERGLUE, BABYLM, CLOTH = "table", "superglue", "babylm", "cloth"
SWAPPED, COREFERENCE = "swapped", "coreference"
_CORRELATIONS = "correlations"
_METRICS = (
    *("accuracy", "matthews", "f1_accuracy", "accuracy_f1", "macro_f1_accuracy", _CORRELATIONS),
    *("multirc", "record", "gender_parity", "accuracy_by_level"),
)
_TSV_FILES = {"train": "train.tsv", "valid": "dev.tsv", "test": "test.tsv"}
# Sets of questions, which data/squad reads; the values are the name of the set and the version.
SQUAD = {
    "squad/v1.1": ("SQuAD-1", "v1.1"),
    "squad/v2.0": ("SQuAD-2", "v2.0"),
    "squad/mrqa": ("MRQA", "mrqa"),
}


@dataclass(frozen=True)
class Recipe:
    """The settings of the suite `finetune` that differ between sets."""

    batch_size: int = option(32, "rows of a batch", at_least=1)
    epochs: float = option(10.0, "training epochs", above=0)
    train: int = option(0, "only the first rows of train (0 = all)", at_least=0)
    metric: str = option("score", "what chooses the epoch: the main metric (score) or another")


@dataclass(frozen=True)
class Benchmark:
    """One task. Except for `name` and `definition`, the fields are the keys of its file."""

    name: str
    labels: tuple[str, ...]  # the classes in order; none for numbers
    metric: str = option("accuracy", "the official metric", choices=METRICS)
    reader: str = option(TABLE, "what reads the files", choices=(TABLE, SUPERGLUE, BABYLM, CLOTH))
    files: dict[str, str] = option(_TSV_FILES, "the name of the file of each split")
    texts: tuple[str, ...] = option((), "table: the columns of the texts")
    label: str = option("label", "table: the column of the labels")
    index: str = option("index", "table: the column of the rows' numbers, if there is one")
    header: tuple[str, ...] = option(
        (), "table: the columns of files of train and valid, where these have no header row"
    )
    skip_malformed: bool = option(
        False, "table: leave out rows with a wrong number of fields, and count them"
    )
    expand: str = option(
        "",
        "table: more rows of train, with swapped texts; or the candidates of coreference",
        choices=("", SWAPPED, COREFERENCE),
    )
    levels: tuple[str, ...] = option((), "cloth: the levels of the exams")
    form: str = option(
        "",
        "form of the set (default: single or pair, by the number of texts)",
        choices=("", "pair", "choices", "spans", "cloze"),
    )
    group: str = option("", "the fact of rows by which accuracies are grouped")
    original: str = option("", "the task that the files are from; has the keys that are missing")
    exported_texts: tuple[str, ...] = option((), "texts in exports of datasets, if others")
    exported_labels: tuple[str, ...] = option((), "names of the labels 0, 1, ... in exports")
    leaderboard: dict[str, str] = option(
        {}, "the leaderboard's names for predictions of splits (default: TASK.tsv or TASK.jsonl)"
    )
    fine_tuning: dict[str, Any] = option({}, "settings of Recipe that differ from the usual ones")
    definition: dict[str, Any] | None = None  # all keys, of a file that is not the package's

    def __post_init__(self) -> None:
        _ = self.recipe
        if self.metric in _METRICS and bool(self.labels) == (self.metric == _CORRELATIONS):
            raise UsageError(
                f"metric: {_CORRELATIONS} are of numbers, without labels; the others of classes"
            )

    @property
    def recipe(self) -> Recipe:
        """The recipe of the suite `finetune`."""
        return read_structured(Recipe, dict(self.fine_tuning), "fine_tuning")

    @property
    def task(self) -> str:
        """The name without the benchmark's, such as "CoLA"."""
        return self.name.partition("/")[2]

    def leaderboard_file(self, split: str) -> str:
        """Return the leaderboard's name for the predictions of a split, such as "MNLI-mm.tsv"."""
        files, suffix = self.leaderboard, "tsv" if self.reader == TABLE else "jsonl"
        default = files.get("test", f"{self.task}.{suffix}")
        return files.get(split.replace("valid", "test", 1), default)


def benchmark_names() -> list[str]:
    """Return the names of the package's tasks, such as "glue/CoLA"."""
    paths = sorted(_FOLDER.glob(f"*/*{_SUFFIX}"))
    return [f"{path.parent.name}/{path.stem}" for path in paths]


def find_benchmark(name: str) -> Benchmark:
    """Return the task of a name such as "glue/CoLA", or of a file BENCHMARK/TASK.yaml.

    Raises:
        UsageError: There is none; or the file is wrong, with file, line and key.
    """
    if name.endswith(_SUFFIX):
        path = Path(name).resolve()
        content = _content_of(path)
        return _read(f"{path.parent.name}/{path.stem}", path, content, content)
    return _find_official(name)


@cache
def _find_official(name: str) -> Benchmark:
    names = benchmark_names()
    if name not in names:
        names += SQUAD
        raise UsageError(
            f"no benchmark '{name}'.{nearest(name, names)} There are: {', '.join(names)}; or give "
            f"a file of your own, NAME/TASK{_SUFFIX}"
        )
    path = _FOLDER / f"{name}{_SUFFIX}"
    return _read(name, path, _content_of(path))


def benchmark_of(details: Mapping[str, Any]) -> Benchmark | None:
    """Return the task of a labelled set from the details of its manifest; None if it has none."""
    name, definition = details["benchmark"], details.get("definition")
    if definition is not None:
        return _read(name, None, definition, definition)
    return find_benchmark(name) if name else None


def _content_of(path: Path) -> dict[str, Any]:
    """Return the keys of a file, with those of the task that it names as `original`."""
    try:
        content = read_yaml(path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"{path}: {reason}") from error
    if not isinstance(content, dict):
        raise UsageError(f"{path}: is no mapping of keys, such as labels, to values")
    original = content.get("original")
    if not original:
        return content
    with naming_place(path):
        if original not in benchmark_names():
            raise UsageError(f"original: no benchmark '{original}'")
    return {**_content_of(_FOLDER / f"{original}{_SUFFIX}"), **content}


def _read(
    name: str,
    path: Path | None,
    content: Mapping[str, Any],
    definition: dict[str, Any] | None = None,
) -> Benchmark:
    with naming_place(path, always=True):
        return read_structured(Benchmark, dict(content), name=name, definition=definition)


for _name in _METRICS:
    METRICS.declare(_name, NoOptions, f"metaseq_lm.evaluation.official.{_name}")
for _name in ("labelled", *benchmark_names()):
    SUITES.declare(_name, SplitConfig, "metaseq_lm.evaluation.benchmarks.LabelledSuite")
