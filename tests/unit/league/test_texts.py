"""The data of the text arm: a corpus with held-out lines, and the sets of its probe."""

from dataclasses import replace
from pathlib import Path

import pytest

from metaseq_lm.core.errors import UsageError
from metaseq_lm.data.storage.indexed import IndexedDataset
from metaseq_lm.data.storage.manifest import Manifest
from metaseq_lm.data.tokenizers.loading import load_tokenizer
from metaseq_lm.league.data import HELD_OUT, _has_sets, _make_text
from metaseq_lm.league.plan_files import TEXT_ARM, probe_sets, read_plan

SENTENCE = """1\tthe\t_\tDET\t_\t_\t2\tdet\t_\t_
2\tcat\t_\tNOUN\t_\t_\t3\tnsubj\t_\t_
3\tsees\t_\tVERB\t_\t_\t0\troot\t_\t_

"""


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """A text of 125 lines with a blank one, and a probe in CoNLL-U."""
    lines = [f"the cat sees line {number}" for number in range(125)]
    (tmp_path / "corpus.txt").write_text("\n".join([*lines[:60], "", *lines[60:]]) + "\n")
    for name in ("train", "test"):
        (tmp_path / f"{name}.conllu").write_text(SENTENCE * 3)
    names = {"text": "corpus.txt", "probe": "train.conllu", "probe_test": "test.conllu"}
    return {key: str(tmp_path / name) for key, name in names.items()}


def test_every_fiftieth_line_is_held_out_and_the_probe_has_two_sets(
    files: dict[str, str], tmp_path: Path
) -> None:
    data, folder = {**files, "vocab_size": 300, "task_tokens": 1}, tmp_path / "L" / "data"
    _make_text(data, folder)
    assert _has_sets(data, folder)
    valid, tokenizer = IndexedDataset(folder / "valid"), load_tokenizer(folder)
    held_out = [tokenizer.decode(valid[row].tolist()) for row in range(len(valid))]
    assert held_out == ["the cat sees line 49", "the cat sees line 99"]
    splits = Manifest.load(folder).splits
    assert (splits["train"]["documents"], splits["valid"]["documents"]) == (123, 2)
    sets = {name: Manifest.load(folder / name) for name in ("upos", "relation")}
    assert all(len(manifest.splits) == 2 for manifest in sets.values())
    assert {m.tokenizer["hash"] for m in sets.values()} == {Manifest.load(folder).tokenizer["hash"]}


def test_what_is_there_is_not_made_again(files: dict[str, str], tmp_path: Path) -> None:
    data, folder = {**files, "vocab_size": 300, "task_tokens": 1}, tmp_path / "data"
    _make_text(data, folder)
    corpus, relation = (folder / name / "manifest.json" for name in ("", "relation"))
    before = corpus.stat().st_mtime_ns
    relation.unlink()
    for file in relation.parent.iterdir():
        file.unlink()
    assert not _has_sets(data, folder)
    _make_text(data, folder)
    assert _has_sets(data, folder) and corpus.stat().st_mtime_ns == before


def test_a_table_is_a_labelled_set_and_its_accuracy_the_metric(
    files: dict[str, str], tmp_path: Path
) -> None:
    table = tmp_path / "labels.tsv"
    table.write_text("text\tlabel\nthe cat\tgood\nline 4\tbad\n")
    files |= {"probe": str(table), "probe_test": str(table)}
    plan, content = read_plan(TEXT_ARM, files)
    assert plan.metrics == ("end_task", "frozen", "tuned")
    assert [suite.split()[:2] for suite in plan.comparison.suites] == [
        ["probe", "labels"],
        ["finetune", "labels"],
    ]
    assert {key: plan.data[key] for key in files} == files
    _make_text(content["data"] | {"vocab_size": 300, "tokenizer": "byte_bpe"}, tmp_path / "data")
    assert Manifest.load(tmp_path / "data/labels").splits["test"]["rows"] == 2


def test_without_a_file_to_score_every_fifth_row_is_scored_if_the_labels_can_be_learnt(
    files: dict[str, str], tmp_path: Path
) -> None:
    data = {"text": [files["text"]] * 2, "vocab_size": 300, "task_tokens": 1}
    rows = ["a cat,good\n", "line 4,bad\n"] * 100
    table, words = tmp_path / "table.csv", tmp_path / "words.conll"
    table.write_text("".join(["text,label\n", *rows]))
    words.write_text("cat NN\n\n" * 200)
    for file, unit in ((table, "rows"), (words, "sentences")):
        _make_text({**data, "probe": str(file)}, tmp_path / "data")
        (name,) = probe_sets(str(file))
        splits = Manifest.load(tmp_path / "data" / name).splits
        assert {split: of[unit] for split, of in splits.items()} == {"train": 160, "valid": 40}
    with pytest.raises(UsageError, match=r"words.txt: .*\.conll"):
        _make_text({**data, "probe": str(words.rename(tmp_path / "words.txt"))}, tmp_path / "data")
    for changed, message in (
        (sorted(rows), "table.csv: .*good.*shuf"),
        (["a cat,good\n"] * 200, "table.csv: .*'good'"),
        ([f"a cat,{i}\n" for i in range(200)], "table.csv: 160 .*label_column"),
    ):
        table.write_text("".join(["text,label\n", *changed]))
        with pytest.raises(UsageError, match=message):
            _make_text({**data, "probe": str(table)}, tmp_path / "data")
    table.write_text("".join(rows))
    _make_text({**data, "probe": str(table), "columns": ["text", "label"]}, tmp_path / "data")
    assert Manifest.load(tmp_path / "data/labels").splits["train"]["rows"] == 160


def test_the_plan_of_a_text_names_files_but_not_folders(files: dict[str, str]) -> None:
    plan, _ = read_plan(TEXT_ARM, files)
    assert {"end_task", "upos.accuracy", "relation_tuned.accuracy"} <= {*plan.metrics}
    assert plan.comparison.kinds == ("frozen", "tuned")
    elsewhere = {key: file.replace("/tmp", "/other") for key, file in files.items()}
    assert read_plan(TEXT_ARM, elsewhere)[0].hash == plan.hash
    other = files | {"text": files["text"] + "2"}
    assert read_plan(TEXT_ARM, other)[0].hash != plan.hash
    several = files | {"text": [files["text"], other["text"]]}
    assert read_plan(TEXT_ARM, several)[0].hash not in (plan.hash, read_plan(TEXT_ARM, other)[0])
    with pytest.raises(UsageError, match="probe"):
        read_plan(TEXT_ARM, {"text": files["text"]})
    with pytest.raises(UsageError, match=r"data\.text"):
        read_plan(TEXT_ARM, files | {"text": []})


def test_a_text_of_few_lines_is_refused(files: dict[str, str], tmp_path: Path) -> None:
    Path(files["text"]).write_text("a line\n" * (2 * HELD_OUT - 1))
    with pytest.raises(UsageError, match="99 documents"):
        _make_text(files, tmp_path / "data")


@pytest.mark.parametrize("key", ["probe", "probe_test"])
@pytest.mark.parametrize(
    "row, fault",
    [
        ("1\tthe\t_\tDET\n", "4 fields"),
        (SENTENCE.splitlines()[0].replace("1", "7") + "\n", "id '7'"),
        (SENTENCE.splitlines()[0].replace("DET", "") + "\n", "field upos is empty"),
    ],
)
def test_a_probe_that_is_no_conllu_is_refused_with_its_line_before_anything_is_made(
    key: str, row: str, fault: str, files: dict[str, str], tmp_path: Path
) -> None:
    Path(files[key]).write_text(SENTENCE + row)
    with pytest.raises(UsageError, match=f":5: {fault}") as error:
        _make_text(files, tmp_path / "data")
    assert error.value.exit_code == 2 and files[key] in str(error.value)
    assert not (tmp_path / "data").exists() and not (tmp_path / "text").exists()


def test_a_probe_without_sentences_is_refused(files: dict[str, str], tmp_path: Path) -> None:
    Path(files["probe_test"]).write_text("# nothing\n")
    with pytest.raises(UsageError, match="test.conllu: no sentences"):
        _make_text(files, tmp_path / "data")


def test_relations_of_a_probe_may_go_without_their_subtypes(
    files: dict[str, str], tmp_path: Path
) -> None:
    for key in ("probe", "probe_test"):
        Path(files[key]).write_text(SENTENCE + SENTENCE.replace("nsubj", "nsubj:pass"))
    data = {**files, "vocab_size": 300, "task_tokens": 1}
    labels = []
    for name, further in (("kept", {}), ("dropped", {"relation_subtypes": "drop"})):
        _make_text({**data, **further}, tmp_path / name)
        labels.append(Manifest.load(tmp_path / name / "relation").details["labels"])
    assert labels == [["det", "nsubj", "nsubj:pass", "root"], ["det", "nsubj", "root"]]
    plan, _ = read_plan(TEXT_ARM, files)
    dropped = replace(plan, data={**plan.data, "relation_subtypes": "drop"})
    assert dropped.hash != plan.hash
    table = {key: str(tmp_path / "labels.tsv") for key in ("probe", "probe_test")}
    (tmp_path / "labels.tsv").write_text("text\tlabel\nthe cat\tgood\n")
    with pytest.raises(UsageError, match="relation_subtypes"):
        _make_text({**data, **table, "relation_subtypes": "drop"}, tmp_path / "table")
