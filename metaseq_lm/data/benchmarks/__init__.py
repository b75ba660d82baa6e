"""GLUE, SuperGLUE and CLOTH: official files, columns, labels, metrics, leaderboard files.

Sources: Wang et al. 2019, "GLUE" and "SuperGLUE", Xie et al. 2018, and the files these benchmarks
distribute. The order of the labels is the alphabetical one of ELECTRA's fine-tuning code.

"babylm/..." are the seven tasks that the BabyLM challenge takes from GLUE and SuperGLUE, each a
pair of texts as in its evaluation pipeline of 2025, scored by accuracy.
"""

from dataclasses import dataclass, field, replace

from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.registry import nearest

_SINGLE_FILES = {"train": "train.tsv", "valid": "dev.tsv", "test": "test.tsv"}
_JSON_FILES = {"train": "train.jsonl", "valid": "val.jsonl", "test": "test.jsonl"}
_BINARY = ("0", "1")
_TRUTH = ("false", "true")
_TWO_WAY = ("entailment", "not_entailment")
_THREE_WAY = ("contradiction", "entailment", "neutral")
_MAIN_TWO = ("mean", "f1", "accuracy")


@dataclass(frozen=True)
class Benchmark:
    """One task.

    `labels` are in order, none for numbers. `metrics` are from evaluation.benchmarks, the main one
    first. `files` and `leaderboard` map splits to file names. `texts`, `label` and `index` are
    columns of GLUE's TSV files; train and dev files without a header row have the columns `header`.
    `doubled` repeats train rows with their texts swapped. `skip_malformed` counts and leaves out
    rows with a wrong number of fields. `original` is the task that the files are from, if
    another.
    """

    labels: tuple[str, ...]
    metrics: tuple[str, ...] = ("accuracy",)
    files: dict[str, str] = field(default_factory=lambda: _SINGLE_FILES)
    leaderboard: dict[str, str] = field(default_factory=dict)
    texts: tuple[str, ...] = ()
    label: str = "label"
    header: tuple[str, ...] | None = None
    index: str = "index"
    form: str = "pair"
    doubled: bool = False
    skip_malformed: bool = False
    original: str = ""


_MNLI_FILES = {
    "train": "train.tsv",
    "valid": "dev_matched.tsv",
    "valid_mismatched": "dev_mismatched.tsv",
    "test": "test_matched.tsv",
    "test_mismatched": "test_mismatched.tsv",
    "diagnostic": "diagnostic.tsv",
}
# Not in the folder of the task in GLUE's own download, so its absence is not reported.
OPTIONAL_SPLITS = ("diagnostic",)

PAIR = ("sentence1", "sentence2")
_COLA_COLUMNS = ("source", "label", "mark", "sentence")
_MNLI_LEADERBOARD = {"test": "MNLI-m.tsv", "test_mismatched": "MNLI-mm.tsv", "diagnostic": "AX.tsv"}
_MRPC_TEXTS = ("#1 String", "#2 String")
_QQP_TEXTS = ("question1", "question2")
_STS_METRICS = ("mean", "pearson", "spearman")

GLUE = {
    "CoLA": Benchmark(
        _BINARY, ("matthews",), texts=("sentence",), header=_COLA_COLUMNS, form="single"
    ),
    "SST-2": Benchmark(_BINARY, texts=("sentence",), form="single"),
    "MRPC": Benchmark(_BINARY, _MAIN_TWO, texts=_MRPC_TEXTS, label="Quality", doubled=True),
    "STS-B": Benchmark((), _STS_METRICS, texts=PAIR, label="score", doubled=True),
    "QQP": Benchmark(
        _BINARY, _MAIN_TWO, texts=_QQP_TEXTS, label="is_duplicate", index="id", skip_malformed=True
    ),
    "MNLI": Benchmark(
        _THREE_WAY, files=_MNLI_FILES, leaderboard=_MNLI_LEADERBOARD, texts=PAIR, label="gold_label"
    ),
    "QNLI": Benchmark(_TWO_WAY, texts=("question", "sentence")),
    "RTE": Benchmark(_TWO_WAY, texts=PAIR),
    "WNLI": Benchmark(_BINARY, texts=PAIR),
    "AX": Benchmark(_THREE_WAY, ("matthews",), files={"test": "diagnostic.tsv"}, texts=PAIR),
}

SUPERGLUE = {
    "BoolQ": Benchmark(_TRUTH, files=_JSON_FILES),
    "CB": Benchmark(_THREE_WAY, _MAIN_TWO, files=_JSON_FILES),
    "COPA": Benchmark(_BINARY, files=_JSON_FILES, form="choices"),
    "MultiRC": Benchmark(_BINARY, ("mean", "f1a", "em"), files=_JSON_FILES),
    "ReCoRD": Benchmark(_BINARY, ("mean", "f1", "em"), files=_JSON_FILES),
    "RTE": Benchmark(_TWO_WAY, files=_JSON_FILES),
    "WiC": Benchmark(_TRUTH, files=_JSON_FILES, form="spans"),
    "WSC": Benchmark(_TRUTH, files=_JSON_FILES, form="spans"),
    "AX-b": Benchmark(_TWO_WAY, ("matthews",), files={"test": "AX-b.jsonl"}),
    "AX-g": Benchmark(_TWO_WAY, ("accuracy", "gender_parity"), files={"test": "AX-g.jsonl"}),
}

_CLOTH_FILES = {"train": "train.jsonl", "valid": "valid.jsonl", "test": "test.jsonl"}
LETTERS = ("A", "B", "C", "D")
_LEVEL_METRICS = ("accuracy", "accuracy_middle", "accuracy_high")

CLOTH = {
    "CLOTH": Benchmark(LETTERS, _LEVEL_METRICS, files=_CLOTH_FILES, form="cloze"),
    "CLOTH-M": Benchmark(LETTERS, files=_CLOTH_FILES, form="cloze"),
    "CLOTH-H": Benchmark(LETTERS, files=_CLOTH_FILES, form="cloze"),
}

_BABYLM_METRICS = {"MRPC": ("accuracy", "f1"), "QQP": ("accuracy", "f1")}
BABYLM = {
    task: replace(
        tasks[task],
        metrics=_BABYLM_METRICS.get(task, ("accuracy",)),
        files={split: tasks[task].files[split] for split in ("train", "valid")},
        form="pair",
        doubled=False,
        original=f"{benchmark}/{task}",
    )
    for benchmark, tasks, names in (
        ("superglue", SUPERGLUE, ("BoolQ", "MultiRC", "WSC")),
        ("glue", GLUE, ("RTE", "MRPC", "QQP", "MNLI")),
    )
    for task in names
}

BENCHMARKS = {
    **{f"glue/{name}": task for name, task in GLUE.items()},
    **{f"superglue/{name}": task for name, task in SUPERGLUE.items()},
    **{f"cloth/{name}": task for name, task in CLOTH.items()},
    **{f"babylm/{name}": task for name, task in BABYLM.items()},
}


# Sets of questions, which data/squad reads; the values are the name of the set and the version.
SQUAD = {
    "squad/v1.1": ("SQuAD-1", "v1.1"),
    "squad/v2.0": ("SQuAD-2", "v2.0"),
    "squad/mrqa": ("MRQA", "mrqa"),
}


def find_benchmark(name: str) -> Benchmark:
    """Return the task of a name such as "glue/CoLA"; an unknown one is a UsageError."""
    if name not in BENCHMARKS:
        raise UsageError(
            f"no benchmark '{name}'.{nearest(name, [*BENCHMARKS, *SQUAD])} There are: "
            f"{', '.join([*BENCHMARKS, *SQUAD])}"
        )
    return BENCHMARKS[name]


def leaderboard_file(name: str, split: str) -> str:
    """Return the leaderboard's name for the predictions of a split, such as "MNLI-mm.tsv"."""
    suite, _, task = name.partition("/")
    files = find_benchmark(name).leaderboard
    default = f"{task}.{'tsv' if suite == 'glue' else 'jsonl'}"
    return files.get(split.replace("valid", "test", 1), files.get("test", default))
