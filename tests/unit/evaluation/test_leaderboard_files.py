"""The files of the leaderboards, by example."""

import json

import numpy as np
import pytest
from benchmark_files import BENCHMARKS, GLUE, SUPERGLUE

from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.evaluation.benchmarks import format_submission

FIRST, SECOND = [1.0, 0.0], [-2.0, 3.0]
ROWS = [{"idx": 5}, {"idx": 9}]


def written(name, split, scores, rows=ROWS):
    return format_submission(BENCHMARKS[name], split, scores, rows, BENCHMARKS[name].labels)


@pytest.mark.parametrize("task", [t for t in GLUE if len(GLUE[t].labels) == 2])
def test_glue_classes(task):
    name, text = written(f"glue/{task}", "test", [SECOND, FIRST])
    zero, one = GLUE[task].labels
    assert name == f"{task}.tsv"
    assert text == f"index\tprediction\n5\t{one}\n9\t{zero}\n"


def test_glue_words():
    for split, name in (
        ("test", "MNLI-m.tsv"),
        ("valid", "MNLI-m.tsv"),
        ("test_mismatched", "MNLI-mm.tsv"),
        ("valid_mismatched", "MNLI-mm.tsv"),
        ("diagnostic", "AX.tsv"),
    ):
        found = written("glue/MNLI", split, [[0, 0, 1], [0, 1, 0]])
        assert found == (name, "index\tprediction\n5\tneutral\n9\tentailment\n")
    assert written("glue/AX", "test", [[1, 0, 0], [0, 0, 1]])[0] == "AX.tsv"


def test_glue_numbers_are_cut_to_the_scale():
    found = written("glue/STS-B", "test", [[-0.3], [5.7]])
    assert found == ("STS-B.tsv", "index\tprediction\n5\t0.000\n9\t5.000\n")
    assert written("glue/STS-B", "test", [2.34567, 1])[1].split()[3::2] == ["2.346", "1.000"]


@pytest.mark.parametrize(
    "task, labels",
    [
        ("BoolQ", ("true", "false")),
        ("COPA", (1, 0)),
        ("RTE", ("not_entailment", "entailment")),
        ("WiC", ("true", "false")),
        ("WSC", ("True", "False")),
        ("AX-b", ("not_entailment", "entailment")),
        ("AX-g", ("not_entailment", "entailment")),
    ],
)
def test_superglue_labels(task, labels):
    name, text = written(f"superglue/{task}", "test", [SECOND, FIRST])
    assert name == f"{task}.jsonl"
    assert [json.loads(line) for line in text.splitlines()] == [
        {"idx": 5, "label": labels[0]},
        {"idx": 9, "label": labels[1]},
    ]


def test_every_superglue_task_has_a_file():
    for task in SUPERGLUE:
        rows = [{"idx": 0, "passage": 0, "question": 0, "entity": "x"}]
        scores = np.zeros((1, len(BENCHMARKS[f"superglue/{task}"].labels)))
        assert written(f"superglue/{task}", "test", scores, rows)[0] == f"{task}.jsonl"


def test_multirc_is_nested():
    rows = [
        {"passage": p, "question": q, "idx": i}
        for p, q, i in [(0, 0, 0), (0, 0, 1), (0, 1, 2), (1, 2, 3)]
    ]
    name, text = written("superglue/MultiRC", "test", [FIRST, SECOND, SECOND, FIRST], rows)
    answers = [
        [{"idx": 0, "answers": [{"idx": 0, "label": 0}, {"idx": 1, "label": 1}]}],
        [{"idx": 2, "answers": [{"idx": 3, "label": 0}]}],
    ]
    answers[0].append({"idx": 1, "answers": [{"idx": 2, "label": 1}]})
    assert [json.loads(line) for line in text.splitlines()] == [
        {"idx": i, "passage": {"questions": questions}} for i, questions in enumerate(answers)
    ]


def test_record_names_the_best_entity():
    rows = [{"idx": q, "entity": e} for q, e in [(3, "Ann"), (3, "Bob"), (4, "Zoë"), (4, "Eve")]]
    # Of two equal ones the first; not the class but the liking counts.
    scores = [[3.0, 1.0], [2.0, 1.0], [1.0, 1.0], [0.5, 0.5]]
    name, text = written("superglue/ReCoRD", "test", scores, rows)
    assert [json.loads(line) for line in text.splitlines()] == [
        {"idx": 3, "label": "Bob"},
        {"idx": 4, "label": "Zoë"},
    ]


@pytest.mark.parametrize(
    "name, scores, rows, message",
    [
        ("glue/RTE", [[0.0, np.inf], FIRST], ROWS, "scores that are not finite"),
        ("glue/RTE", [FIRST], ROWS, "2 rows of facts for 1 scores"),
        ("glue/RTE", [FIRST], None, "0 rows of facts .* preprocess --benchmark glue/RTE"),
        ("superglue/MultiRC", [FIRST, FIRST], ROWS, "row 1 has no 'passage'"),
        ("superglue/ReCoRD", [FIRST, FIRST], ROWS, "row 1 has no 'entity'"),
    ],
)
def test_wrong_parts(name, scores, rows, message):
    with pytest.raises(MetaseqError, match=message):
        written(name, "test", scores, rows)
