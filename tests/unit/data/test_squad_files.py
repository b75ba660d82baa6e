"""Reading official files: what is kept, where the gold answers are, one message for
what is wrong.
"""

import json
import lzma
import os
import re
from pathlib import Path
from typing import Any

import pytest
import squad_data

from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.data.doctor.examine import examine
from metaseq_lm.data.preprocess.pipeline import Request, preprocess
from metaseq_lm.data.preprocess.squad import SquadPipeline, _find_answer
from metaseq_lm.data.records.text_files import TextFile
from metaseq_lm.data.squad.files import SquadReader
from metaseq_lm.data.squad.sets import SquadSet
from metaseq_lm.data.tokenizers.base import Tokenizer
from metaseq_lm.data.tokenizers.loading import tokenizer_class
from metaseq_lm.evaluation.squad import _squad_v1, _squad_v2

CONTEXT = "The café's Owner, Zoë  Ray, paid $3.50 (in 1998) — naïve?"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Byte-level BPE of a little text."""
    return tokenizer_class("byte_bpe").train([CONTEXT, "who paid what in 1998"] * 3, 320, 2)


def one(question: dict[str, Any]) -> dict[str, Any]:
    """An official file with one question on CONTEXT."""
    node = {"id": "q", "question": "Who?", **question}
    return {"data": [{"title": "T", "paragraphs": [{"context": CONTEXT, "qas": [node]}]}]}


def gold(text: str, start: int) -> dict[str, Any]:
    return {"answers": [{"text": text, "answer_start": start}]}


def run(tmp_path: Path, tokenizer: Tokenizer, content: Any, version: str = "v1.1") -> SquadSet:
    """Preprocess one file as the split train and open it."""
    path = tmp_path / "in.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    preprocess(
        SquadPipeline(
            Request(tmp_path / "out", {"train": [path]}, overwrite=True), version, tokenizer
        )
    )
    return SquadSet(tmp_path / "out", "train")


@pytest.mark.parametrize(
    ("answer", "start", "found"),
    [
        ("Owner", 11, "Owner"),
        ("Zoë  Ray", 18, "Zoë  Ray"),
        ("Zoë Ray", 18, "Zoë  Ray"),  # white space runs are equal
        ("Owner", 10, "Owner"),  # the start is a little off
        ("Owner", 9, "Owner"),
        ("Owner", 6, None),  # the place ends at the space before it
        ("3.50", 34, "3.50"),
        ("1998", 41, "1998"),
        ("naïve", 51, "naïve"),
        ("Owner", 18, None),
        ("café", 4, "café"),
        ("afé", 5, "afé"),
        ("none", -1, None),
        ("none", 55, None),
        (" ", 3, None),
        ("", 3, None),
    ],
)
def test_answers_have_offsets_in_the_context(answer, start, found):
    place = _find_answer(CONTEXT, answer, start)
    assert place == (
        None if found is None else (CONTEXT.index(found), CONTEXT.index(found) + len(found))
    )


def test_gold_tokens_spell_the_answer(tmp_path, tokenizer):
    """The span ends at the tokens of the answer's ends, and has no other words."""
    words = CONTEXT.replace("(", " ").replace(")", " ").replace("$", " ").split()
    for word in words:
        data = run(tmp_path, tokenizer, one(gold(word, CONTEXT.index(word))))
        first, last = int(data.first[0]), int(data.last[0])
        text = data.text(0, first, last)
        assert word in text and len(text.split()) == 1
        assert word not in data.text(0, first + 1, last) or first == last
        assert word not in data.text(0, first, last - 1) or first == last
        assert tokenizer.decode(data.contexts[0][first : last + 1].tolist()).strip() == text


def test_squad_data_folder_has_rows_and_facts(tmp_path, tokenizer):
    """Counts, flags, golds and texts of a version 2.0 file; half characters become U+FFFD."""
    content = one({"answers": [], "is_impossible": True})
    content["data"][0]["paragraphs"] *= 2
    content = json.loads(json.dumps(content))
    second = content["data"][0]["paragraphs"][1]
    second["context"] = "x \ud800 y"
    second["qas"] = [
        {"id": "r", "question": "\udfff?", "is_impossible": False, **gold("y", 4)},
        {"id": "s", "question": "", "is_impossible": False, **gold("zz", 4)},
    ]
    data = run(tmp_path, tokenizer, content, "v2.0")
    assert data.impossible.tolist() == [True, False, False]
    assert data.paragraph.tolist() == [0, 1, 1]
    assert (data.first[[0, 2]] == -1).all() and data.text(1, data.first[1], data.last[1]) == "y"
    assert data.golds() == {"q": [], "r": ["y"], "s": ["zz"]}
    assert data.texts[0] == [CONTEXT, "x \ufffd y"] and data.texts[1][1]["question"] == "\ufffd?"
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    counts = {"questions": 3, "impossible": 1, "unrecoverable": 1, "paragraphs": 2}
    assert manifest["splits"]["train"].items() >= counts.items()
    assert manifest["details"] == {"version": "v2.0"}


def test_answers_beside_their_offset_are_counted(tmp_path, tokenizer, capsys):
    word = CONTEXT.split()[2]
    data = run(tmp_path, tokenizer, one(gold(word, CONTEXT.index(word) + 1)))
    assert word in data.text(0, int(data.first[0]), int(data.last[0]))
    assert "1 answers found" in capsys.readouterr().out


def test_mrqa(tmp_path, tokenizer):
    """A header, then one paragraph a line; the first detected span is the one to learn."""
    start = CONTEXT.index("Zoë")
    spans = [[start, start + 7], [0, 2]]
    detected = [{"text": "zoë ray", "char_spans": spans}, {"text": "x", "char_spans": [[0, 0]]}]
    question = {"qid": "m", "id": "no", "question": "Who?", "answers": ["Ray"]}
    line = {"context": CONTEXT, "qas": [question | {"detected_answers": detected}]}
    text = f'{{"header": {{"dataset": "X"}}}}\n{json.dumps(line)}\n\n'
    data = run(tmp_path, tokenizer, text, "mrqa")
    assert data.text(0, data.first[0], data.last[0]) == "Zoë  Ray"
    assert data.golds() == {"m": ["Zoë  Ray", "Ray"]} and data.answerable_only
    line["qas"][0]["detected_answers"] = []  # type: ignore[index]
    with pytest.raises(MetaseqError, match="in.json:2, question 'm'"):
        run(tmp_path, tokenizer, text.split("\n")[0] + "\n" + json.dumps(line), "mrqa")


PLACE = "in.json:1, question 'q': "


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"data": [\n{]}', "in.json:2: not valid JSON: Expecting property name"),
        ("[" * 100_000, "in.json:1: not valid JSON"),
        ("[]", "in.json: no questions in 0 paragraphs"),
        ("{}", "in.json:1: no field 'context'; there are none"),
        ({"data": {}}, "field 'data' is not a list"),
        ({"data": [{"title": "T"}]}, "in.json:1: no field 'context'; there are title."),
        ({"data": [7]}, "field 'data' .*objects only"),
        (
            {"data": [{"paragraphs": [{"qas": []}]}]},
            r"no field 'paragraphs\[0\].context'; there are qas.",
        ),
        ({"data": [{"paragraphs": [{"context": 3, "qas": []}]}]}, "context' is not a text"),
        ({"data": []}, "no questions in 0 paragraphs"),
        (one({"id": [3]}), r"paragraphs\[0\].qas\[0\].id' is not a text"),
        (one({"answers": []}), PLACE + "has no answer .*SQuAD 2.0"),
        (one({}), PLACE + "no field .*answers'"),
        (one(gold("x", True)), PLACE + r"field .*answers\[0\].answer_start' .*whole number"),
        (one({"answers": ["x"]}), PLACE + "field .*answers' .*objects only"),
    ],
)
def test_malformed_files(tmp_path, tokenizer, content, message):
    """One MetaseqError that names the place; the folder stays as it was."""
    with pytest.raises(MetaseqError, match=message):
        run(tmp_path, tokenizer, content)
    assert not (tmp_path / "out").exists()


def test_malformed_version_2(tmp_path, tokenizer):
    for question, message in [
        ({"is_impossible": 1, "answers": []}, "is_impossible' is not true or false"),
        ({"is_impossible": True, **gold("x", 1)}, "impossible, but has answers"),
        ({"is_impossible": False, "answers": []}, "no answer .*not marked"),
    ]:
        with pytest.raises(MetaseqError, match=message):
            run(tmp_path, tokenizer, one(question), "v2.0")
    twice = one(gold("The", 0))
    twice["data"] *= 2
    with pytest.raises(MetaseqError, match="in.json:.*'q'.*twice.*'train'"):
        run(tmp_path, tokenizer, twice)
    with pytest.raises(UsageError, match="v1.1, v2.0, mrqa"):
        run(tmp_path, tokenizer, twice, "2.0")


def test_damaged_folders(tmp_path, tokenizer):
    """Files of different sets are refused on opening or when the texts are read."""
    run(tmp_path, tokenizer, squad_data.official("a", 3), "v2.0")
    other = tmp_path / "other"
    other.mkdir()
    run(other, tokenizer, squad_data.official("b", 2), "v2.0")
    for part in ("question", "spans", "context_start"):
        for end in ("bin", "idx"):
            name = f"train.{part}.{end}"
            (tmp_path / "out" / f"kept.{end}").write_bytes((tmp_path / "out" / name).read_bytes())
            (tmp_path / "out" / name).write_bytes((other / "out" / name).read_bytes())
        with pytest.raises(MetaseqError, match="preprocess again"):
            SquadSet(tmp_path / "out", "train")
        for end in ("bin", "idx"):
            (tmp_path / "out" / f"kept.{end}").replace(tmp_path / "out" / f"train.{part}.{end}")
    rows = tmp_path / "out" / "train.rows.jsonl"
    data, text = SquadSet(tmp_path / "out", "train"), rows.read_text()
    rows.write_text(text.replace('"questions"', '"question"', 1))
    with pytest.raises(MetaseqError, match="train.rows.jsonl:1: damaged"):
        data.texts
    rows.write_text("".join(text.splitlines(keepends=True)[:-1]))
    with pytest.raises(MetaseqError, match="2 lines but 3 rows"):
        data.texts
    with pytest.raises(MetaseqError, match="'test'.*train"):
        SquadSet(tmp_path / "out", "test")


def test_doctor(tmp_path, tokenizer):
    """Sizes, answers that were not found, contexts in two splits, and damage."""
    content = squad_data.official("a", 4)
    node = content["data"][0]["paragraphs"][0]["qas"][0]
    node["answers"] = [{"text": "not there", "answer_start": 0}]
    path = squad_data.write(tmp_path / "in.json", content)
    request = Request(tmp_path / "out", {"train": [path], "valid": [path]})
    preprocess(SquadPipeline(request, "v2.0", tokenizer))
    found = [f"{f.level} {f.text}" for f in examine(tmp_path / "out", full=True)]
    text = "\n".join(found)
    assert re.search("ok .*out: train.*12 questions.*4 paragraphs;.*33", text)
    assert re.search("warning.*valid: 1 answers", text)
    assert re.search(r"4 of 4.*100\.0.*in.train", text)
    assert "error" not in text
    (tmp_path / "out" / "valid.rows.jsonl").write_text("{}\n")
    found = [f"{f.level} {f.text}" for f in examine(tmp_path / "out", full=False)]
    assert any(line.startswith("error") and "valid.rows.jsonl" in line for line in found)


REAL = Path(os.environ.get("METASEQ_LM_DATA", "")) / "squad"
real = pytest.mark.skipif(
    not os.environ.get("METASEQ_LM_DATA") or not REAL.is_dir(),
    reason="METASEQ_LM_DATA has no squad",
)


@real
@pytest.mark.parametrize(
    ("name", "version", "questions", "impossible"),
    [
        ("dev-v1.1.json.xz", "v1.1", 10570, 0),
        ("squad2-cs224n-dev-v2.0.json.xz", "v2.0", 6078, 3168),
    ],
)
def test_real_files(tmp_path, name, version, questions, impossible):
    """Published counts; every gold answer is found and, as its tokens spell it, scores 100."""
    paragraphs = list(SquadReader(TextFile(REAL / name, "fail"), version))
    text = [p.context for p in paragraphs]
    tokenizer = tokenizer_class("byte_bpe").train(text[:300], 2000, 2)
    preprocess(
        SquadPipeline(Request(tmp_path / "out", {"valid": [REAL / name]}), version, tokenizer)
    )
    data = SquadSet(tmp_path / "out", "valid")
    assert len(data) == questions and data.impossible.sum() == impossible
    assert ((data.first >= 0) == ~data.impossible).all()
    golds, about = data.golds(), data.texts[1]
    first = {row["id"]: (row["answers"] or [""])[0] for row in about}
    spelled = {
        about[q]["id"]: data.text(q, data.first[q], data.last[q]) if data.first[q] >= 0 else ""
        for q in range(questions)
    }
    # A token may hold a little more than the answer; the answer is in it, and nearly always all.
    assert all(first[q] in spelled[q] for q in first)
    assert sum(first[q] == spelled[q] for q in first) > 0.97 * questions
    if version == "v1.1":
        assert _squad_v1(golds, first)["exact"] == _squad_v1(golds, first)["f1"] == 100
    else:
        odds = {q: 1.0 if not answers else -9.0 for q, answers in golds.items()}
        scores = _squad_v2(golds, first, odds, -2.75)
        assert {scores[n] for n in ("exact", "f1", "best_exact", "best_f1")} == {100}
        assert (scores["HasAns_total"], scores["NoAns_total"]) == (
            questions - impossible,
            impossible,
        )
    with lzma.open(REAL / name) as file:
        raw = json.load(file)["data"]
    assert [p["context"] for a in raw for p in a["paragraphs"]] == data.texts[0]
