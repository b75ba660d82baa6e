"""GLUE, SuperGLUE and CLOTH: official files, columns, labels, metrics, leaderboard files.

Sources: Wang et al. 2019, "GLUE" and "SuperGLUE", Xie et al. 2018, and the files these benchmarks
distribute. The order of the labels is the alphabetical one of ELECTRA's fine-tuning code.

"babylm/..." are the seven tasks that the BabyLM challenge takes from GLUE and SuperGLUE, each a
pair of texts as its evaluation pipeline of 2025 puts them, scored by accuracy.
"""

from dataclasses import dataclass, field, replace

from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.registry import nearest

SINGLE_FILES = {"train": "train.tsv", "valid": "dev.tsv", "test": "test.tsv"}
JSON_FILES = {"train": "train.jsonl", "valid": "val.jsonl", "test": "test.jsonl"}
BINARY = ("0", "1")
TRUTH = ("false", "true")
TWO_WAY = ("entailment", "not_entailment")
THREE_WAY = ("contradiction", "entailment", "neutral")
MAIN_TWO = ("mean", "f1", "accuracy")


@dataclass(frozen=True)
class Benchmark:
    """One task.

    `labels` are in order, none for numbers. `metrics` are those of evaluation.benchmarks, the main
    one first. `files` and `leaderboard` map splits to file names. `texts`, `label` and `index` are
    columns of GLUE's TSV files; train and dev files without a header row have the columns `header`.
    `doubled` repeats train rows with their texts swapped. `skip_malformed` counts and leaves out
    rows with a wrong number of fields. `original` is the task whose files are read, if that is
    another one.
    """

    labels: tuple[str, ...]
    metrics: tuple[str, ...] = ("accuracy",)
    files: dict[str, str] = field(default_factory=lambda: SINGLE_FILES)
    leaderboard: dict[str, str] = field(default_factory=dict)
    texts: tuple[str, ...] = ()
    label: str = "label"
    header: tuple[str, ...] | None = None
    index: str = "index"
    form: str = "pair"
    doubled: bool = False
    skip_malformed: bool = False
    original: str = ""


MNLI_FILES = {
    "train": "train.tsv",
    "valid": "dev_matched.tsv",
    "valid_mismatched": "dev_mismatched.tsv",
    "test": "test_matched.tsv",
    "test_mismatched": "test_mismatched.tsv",
    "diagnostic": "diagnostic.tsv",
}
# Not in the folder of the task in GLUE's own download, so that its absence is no news.
OPTIONAL_SPLITS = ("diagnostic",)

PAIR = ("sentence1", "sentence2")
COLA_COLUMNS = ("source", "label", "mark", "sentence")
MNLI_LEADERBOARD = {"test": "MNLI-m.tsv", "test_mismatched": "MNLI-mm.tsv", "diagnostic": "AX.tsv"}
MRPC_TEXTS = ("#1 String", "#2 String")
QQP_TEXTS = ("question1", "question2")
STS_METRICS = ("mean", "pearson", "spearman")

GLUE = {
    "CoLA": Benchmark(
        BINARY, ("matthews",), texts=("sentence",), header=COLA_COLUMNS, form="single"
    ),
    "SST-2": Benchmark(BINARY, texts=("sentence",), form="single"),
    "MRPC": Benchmark(BINARY, MAIN_TWO, texts=MRPC_TEXTS, label="Quality", doubled=True),
    "STS-B": Benchmark((), STS_METRICS, texts=PAIR, label="score", doubled=True),
    "QQP": Benchmark(
        BINARY, MAIN_TWO, texts=QQP_TEXTS, label="is_duplicate", index="id", skip_malformed=True
    ),
    "MNLI": Benchmark(
        THREE_WAY, files=MNLI_FILES, leaderboard=MNLI_LEADERBOARD, texts=PAIR, label="gold_label"
    ),
    "QNLI": Benchmark(TWO_WAY, texts=("question", "sentence")),
    "RTE": Benchmark(TWO_WAY, texts=PAIR),
    "WNLI": Benchmark(BINARY, texts=PAIR),
    "AX": Benchmark(THREE_WAY, ("matthews",), files={"test": "diagnostic.tsv"}, texts=PAIR),
}

SUPERGLUE = {
    "BoolQ": Benchmark(TRUTH, files=JSON_FILES),
    "CB": Benchmark(THREE_WAY, MAIN_TWO, files=JSON_FILES),
    "COPA": Benchmark(BINARY, files=JSON_FILES, form="choices"),
    "MultiRC": Benchmark(BINARY, ("mean", "f1a", "em"), files=JSON_FILES),
    "ReCoRD": Benchmark(BINARY, ("mean", "f1", "em"), files=JSON_FILES),
    "RTE": Benchmark(TWO_WAY, files=JSON_FILES),
    "WiC": Benchmark(TRUTH, files=JSON_FILES, form="spans"),
    "WSC": Benchmark(TRUTH, files=JSON_FILES, form="spans"),
    "AX-b": Benchmark(TWO_WAY, ("matthews",), files={"test": "AX-b.jsonl"}),
    "AX-g": Benchmark(TWO_WAY, ("accuracy", "gender_parity"), files={"test": "AX-g.jsonl"}),
}

CLOTH_FILES = {"train": "train.jsonl", "valid": "valid.jsonl", "test": "test.jsonl"}
LETTERS = ("A", "B", "C", "D")
LEVEL_METRICS = ("accuracy", "accuracy_middle", "accuracy_high")

CLOTH = {
    "CLOTH": Benchmark(LETTERS, LEVEL_METRICS, files=CLOTH_FILES, form="cloze"),
    "CLOTH-M": Benchmark(LETTERS, files=CLOTH_FILES, form="cloze"),
    "CLOTH-H": Benchmark(LETTERS, files=CLOTH_FILES, form="cloze"),
}

BABYLM_METRICS = {"MRPC": ("accuracy", "f1"), "QQP": ("accuracy", "f1")}
BABYLM = {
    task: replace(
        tasks[task],
        metrics=BABYLM_METRICS.get(task, ("accuracy",)),
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
    """Return the name the leaderboard wants for the predictions of a split, as "MNLI-mm.tsv"."""
    suite, _, task = name.partition("/")
    files = find_benchmark(name).leaderboard
    default = f"{task}.{'tsv' if suite == 'glue' else 'jsonl'}"
    return files.get(split.replace("valid", "test", 1), files.get("test", default))
