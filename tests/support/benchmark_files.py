"""Small generated files in the official forms of GLUE and SuperGLUE."""

import json

from metaseq_lm.data.benchmarks import benchmark_names, find_benchmark
from metaseq_lm.data.tokenizers.loading import load_tokenizer

BENCHMARKS = {name: find_benchmark(name) for name in benchmark_names()}
GLUE = {task.task: task for name, task in BENCHMARKS.items() if name.startswith("glue/")}
# Header rows of the official files, and the columns given in the fact sheet.
HEADERS = {
    "CoLA": ("source label mark sentence", "index sentence", (3,), 1, (1,)),
    "SST-2": ("sentence label", "index sentence", (0,), 1, (1,)),
    "MRPC": (
        "Quality,#1 ID,#2 ID,#1 String,#2 String",
        "index,#1 ID,#2 ID,#1 String,#2 String",
        (3, 4),
        0,
        (3, 4),
    ),
    "STS-B": (
        "index genre filename year old_index source1 source2 sentence1 sentence2 score",
        "index genre filename year old_index source1 source2 sentence1 sentence2",
        (-3, -2),
        -1,
        (-2, -1),
    ),
    "QQP": (
        "id qid1 qid2 question1 question2 is_duplicate",
        "id question1 question2",
        (3, 4),
        5,
        (1, 2),
    ),
    "MNLI": (
        "index promptID pairID genre sentence1_binary_parse sentence2_binary_parse sentence1_parse "
        "sentence2_parse sentence1 sentence2 label1 gold_label",
        "index promptID pairID genre sentence1_binary_parse sentence2_binary_parse sentence1_parse "
        "sentence2_parse sentence1 sentence2",
        (8, 9),
        -1,
        (8, 9),
    ),
    "QNLI": ("index question sentence label", "index question sentence", (1, 2), 3, (1, 2)),
    "RTE": ("index sentence1 sentence2 label", "index sentence1 sentence2", (1, 2), 3, (1, 2)),
    "WNLI": ("index sentence1 sentence2 label", "index sentence1 sentence2", (1, 2), 3, (1, 2)),
}


def names_of(header):
    return header.split("," if "," in header else " ")


def glue_files(task, rows=3):
    """Return the files of a task by name, with texts t0a, t0b, t1a ... and alternating labels."""
    train, test, texts, label, test_texts = HEADERS[task]
    labels = GLUE[task].labels or ("0.5", "5.000", "2")

    def row(header, split, i):
        names = names_of(header)
        fields = [f"x{i}"] * len(names)
        for place, word in zip(texts if split != "test" else test_texts, "ab"):
            fields[place] = f'{split} "{i}{word}'
        if split != "test":
            fields[label] = labels[i % len(labels)]
        for place, name in enumerate(names):
            if name in ("index", "id"):
                fields[place] = str(10 + i)
        return "\t".join(fields)

    files = {}
    for split, name in GLUE[task].files.items():
        kind = "test" if split.startswith("test") else split
        if split == "diagnostic":
            continue
        header = test if kind == "test" else train
        lines = [] if task == "CoLA" and kind != "test" else ["\t".join(names_of(header))]
        lines += [row(header, kind, i) for i in range(rows)]
        files[name] = "\n".join(lines) + "\n"
    return files


def lines(*objects):
    return "".join(json.dumps(o) + "\n" for o in objects)


PASSAGE = {
    "text": "Ann and Bob met Ann.",
    "entities": [{"start": 0, "end": 2}, {"start": 8, "end": 10}, {"start": 16, "end": 18}],
}
QUERY = {
    "idx": 7,
    "query": "@placeholder met Bob",
    "answers": [{"start": 0, "end": 2, "text": "Ann"}],
}
ANSWERS = [{"idx": 4, "text": "yes", "label": 1}, {"idx": 5, "text": "no", "label": 0}]
SUPERGLUE = {
    "BoolQ": {"idx": 3, "passage": "a -- b", "question": "is it", "label": True},
    "CB": {"idx": 3, "premise": "a", "hypothesis": "b", "label": "neutral"},
    "COPA": {
        "idx": 3,
        "premise": "It fell.",
        "choice1": "a",
        "choice2": "b",
        "question": "effect",
        "label": 1,
    },
    "MultiRC": {
        "idx": 3,
        "passage": {"text": "p", "questions": [{"idx": 9, "question": "q?", "answers": ANSWERS}]},
    },
    "ReCoRD": {"idx": 3, "passage": PASSAGE, "qas": [QUERY]},
    "RTE": {"idx": 3, "premise": "a", "hypothesis": "b", "label": "not_entailment"},
    "WiC": {
        "idx": 3,
        "word": "run",
        "sentence1": "I ran.",
        "sentence2": "He runs it",
        "start1": 2,
        "end1": 5,
        "start2": 3,
        "end2": 7,
        "label": False,
    },
    "WSC": {
        "idx": 3,
        "text": "Ann's dog barked; she fed it.",
        "label": True,
        "target": {"span1_text": "Ann", "span1_index": 0, "span2_text": "she", "span2_index": 3},
    },
    "AX-b": {"idx": 3, "sentence1": "a", "sentence2": "b", "label": "entailment", "logic": "x"},
    "AX-g": {"idx": 3, "premise": "a", "hypothesis": "b", "label": "entailment", "pair_id": 5},
}


def changed(task, **fields):
    return {**SUPERGLUE[task], **fields}


def without(task, *names):
    return {k: v for k, v in SUPERGLUE[task].items() if k not in names}


def texts(data, corpus):
    tokenizer = load_tokenizer(corpus)
    return [[tokenizer.decode(column[i]) for column in data.inputs] for i in range(len(data))]
