"""`score --suite`: what is printed and kept, what `report` makes of it, users' mistakes."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from agreement import make_data, make_pairs, make_run
from outcomes import expect_facts

from metaseq_lm.cli import main
from metaseq_lm.cli.score import _reference_columns
from metaseq_lm.core.errors import MetaseqError
from metaseq_lm.data.labelled.files import SourceSentence
from metaseq_lm.evaluation.ngram_probabilities import ngrams_of
from metaseq_lm.evaluation.suites import build_suite
from metaseq_lm.reporting import archive
from metaseq_lm.reporting.folders import read_run
from metaseq_lm.runs import manifests, suite_results
from metaseq_lm.runs.suite_results import SuiteResults
from metaseq_lm.training.scoring import SentenceScorer


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of two checkpoints, and minimal pairs of two kinds."""
    folder = tmp_path_factory.mktemp("suites")
    make_run(make_data(folder), folder / "run", 60, "trainer.save_interval_updates=30")
    (folder / "pairs").mkdir()
    for name, seed in (("near", 7), ("far", 8)):
        make_pairs(folder / "pairs" / f"{name}.jsonl", 30, seed)
    return folder


@pytest.fixture
def place(trained: Path, tmp_path: Path) -> Path:
    """A copy of the folder that a test may change."""
    return shutil.copytree(trained, tmp_path / "copy", symlinks=True)


def score(place: Path, *words: str, run: str = "run") -> int:
    return main(["score", str(place / run), "--suite", "pairs", "--data", f"{place}/pairs", *words])


def test_results_are_printed_kept_and_reported(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = place / "out.json"
    assert score(place, "--out", str(out)) == 0
    shown, err = capsys.readouterr()
    lines = [line.split() for line in shown.splitlines() if line]
    assert [row[:2] for row in lines[3:]] == [["overall", "60"], ["far", "30"], ["near", "30"]]
    file = place / "run" / "suites" / "pairs" / "update_000000060.json"
    assert file.is_file() and "update_000000060.json" in err
    record = json.loads(file.read_text())
    assert record == json.loads(out.read_text()) | {"checksum": record["checksum"]}
    manifest = manifests.read_manifest(manifests.resolve(str(place / "run")))
    assert record["update"] == 60 and record["weights"] == manifests.hash_of_weights(manifest)
    assert record["options"]["precision"] == "fp32" and record["options"]["too_long"] == "fail"
    # The metrics are those of --pairs.
    files = [str(place / "pairs" / f"{name}.jsonl") for name in ("near", "far")]
    assert main(["score", str(place / "run"), "--pairs", "--input", *files]) == 0
    printed = json.loads(capsys.readouterr().out)
    groups = record["groups"]
    assert printed["overall"]["accuracy"] == groups["overall"]["metrics"]["accuracy"]
    assert printed["files"][files[1]]["accuracy"] == groups["far"]["metrics"]["accuracy"]
    run = read_run(place / "run")
    assert run.metrics["pairs.accuracy"] == printed["overall"]["accuracy"]
    assert run.metrics["pairs.far.n"] == 30 and not run.notes
    capsys.readouterr()
    archived = place / "runs.jsonl"
    command = ["report", str(place / "run"), "--metric", "pairs.accuracy"]
    assert main([*command, "--archive", str(archived)]) == 0
    assert "pairs.accuracy (%)" in capsys.readouterr().out
    (again,) = archive.read(archived)
    assert again.metrics == run.metrics and again.suites == run.suites


def test_a_run_in_bf16_is_scored_in_float32_by_every_command(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, file = place / "low", place / "pairs" / "near.jsonl"
    make_run(place / "data", run, 5, "engine.precision=bf16")
    assert score(place, run="low") == 0
    (results,) = read_run(run).suites
    near = results.groups["near"]["metrics"]

    def pairs_scored(*words: str) -> dict[str, float]:
        capsys.readouterr()
        assert main(["score", str(run), "--pairs", "--input", str(file), *words]) == 0
        metrics = json.loads(capsys.readouterr().out)["overall"]
        return {name: metrics[name] for name in near}

    assert pairs_scored() == near != pairs_scored("engine.precision=bf16")
    (place / "text").write_text("the cat sleeps here\n")
    lists = {"u": {"ref": "the cat", "hyp_1": {"score": 0.0, "text": "the cat sleeps here"}}}
    (place / "lists.json").write_text(json.dumps(lists))
    plls = [tmp_path / name / "1" / "plls.tsv" for name in ("own", "low")]
    for out, words in zip(plls, ([], ["engine.precision=bf16"])):
        files = [f"--{split}={place}/lists.json" for split in ("dev", "test")]
        assert main(["rerank", str(run), *files, "--out", str(out.parents[1]), *words]) == 0
    capsys.readouterr()
    assert main(["score", str(run), "--input", str(place / "text"), "engine.precision=fp32"]) == 0
    assert plls[0].read_text() == capsys.readouterr().out != plls[1].read_text()


def test_references_are_kept_and_old_results_have_none(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert score(place) == 0
    assert "chance" in capsys.readouterr().out
    file = place / "run" / "suites" / "pairs" / "update_000000060.json"
    (results,) = read_run(place / "run").suites
    kinds = ("accuracy", "soft_accuracy")
    names = [f"{group}{kind}" for group in ("", "near.", "far.") for kind in kinds]
    assert results.facts["reach"] == "both"
    assert results.references.keys() == {*names, "accuracy_macro"}
    for levels in results.references.values():
        assert levels["chance"] == 0.5 and levels.keys() == {"chance", "unigram", "ngram"}
    # Of the corpus of the run, by the suite's own rule.
    suite = build_suite("pairs")
    pairs = suite.read(place / "pairs")
    expected = suite.score(pairs, ngrams_of(place / "data")["ngram"])
    for name in results.references:
        group, _, metric = name.rpartition(".")
        level = expected[group or "overall"].metrics[metric]
        assert results.references[name]["ngram"] == level
    archive.write(place / "runs.jsonl", [read_run(place / "run")])
    assert archive.read(place / "runs.jsonl")[0].suites[0].references == results.references
    record = json.loads(file.read_text())
    del record["references"], record["checksum"]
    file.write_text(json.dumps(record))
    (old,) = read_run(place / "run").suites
    assert old.references == {} and old.groups == results.groups
    file.write_text(json.dumps(record | {"references": {"accuracy": {"chance": "high"}}}))
    with pytest.raises(MetaseqError, match="chance"):
        read_run(place / "run")


def test_a_reference_has_a_column_for_each_value_but_not_for_rounding() -> None:
    def columns(of_mean: float) -> list[str]:
        groups = {"overall": {"n": 3, "metrics": {"accuracy": 0.5, "accuracy_macro": 0.5}}}
        references = {"accuracy": {"ngram": 0.6}, "accuracy_macro": {"ngram": of_mean}}
        results = SuiteResults("x", "pairs", 1, "w", "d", {}, groups, {}, references)
        return list(_reference_columns(results))

    assert columns(0.6 + 1e-16) == ["ngram"]
    assert columns(0.7) == ["ngram", "ngram accuracy_macro"]


def test_a_run_without_suites_is_archived_as_before(place: Path) -> None:
    archive.write(place / "runs.jsonl", [read_run(place / "run")])
    assert "suites" not in json.loads((place / "runs.jsonl").read_text().splitlines()[1])


def test_results_of_another_checkpoint_are_not_shown(place: Path) -> None:
    assert score(place, run="run/checkpoints/update_000000030") == 0
    run = read_run(place / "run")
    assert "pairs.accuracy" not in run.metrics
    assert any("update 30" in note and "update 60" in note for note in run.notes)
    assert score(place) == 0
    run = read_run(place / "run")
    assert run.suites[0].update == 60 and not run.notes
    # Another training of the same folder: the update is the same, the weights are not.
    file = place / "run" / "suites" / "pairs" / "update_000000060.json"
    record = json.loads(file.read_text()) | {"weights": "other"}
    record.pop("checksum")
    file.write_text(json.dumps(record))
    assert "pairs.accuracy" not in read_run(place / "run").metrics


def test_results_whose_checkpoint_is_gone_are_named(place: Path) -> None:
    assert score(place) == 0
    shutil.rmtree(place / "run" / "checkpoints")
    run = read_run(place / "run")
    assert "pairs.accuracy" in run.metrics
    assert any("pairs" in note and "update 60" in note for note in run.notes)


def test_changed_and_damaged_results(place: Path) -> None:
    assert score(place) == 0
    file = place / "run" / "suites" / "pairs" / "update_000000060.json"
    text = file.read_text()
    file.write_text(text.replace('"n": 60', '"n": 61'))
    assert any("was changed" in note for note in read_run(place / "run").notes)
    for damaged in ("{", text.replace('"groups"', '"groops"'), text.replace(": 60", ': "60"')):
        file.write_text(damaged)
        with pytest.raises(MetaseqError, match=r"update_000000060.json.*score the"):
            read_run(place / "run")


def test_results_of_other_code_are_named_below_the_table(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(place / "data", place / "second", 30, "label=second", "seed=2")
    assert score(place) == score(place, run="second") == 0
    command = ["report", str(place / "run"), str(place / "second"), "--metric", "pairs.accuracy"]
    capsys.readouterr()
    assert main(command) == 0
    same = capsys.readouterr().out
    assert "other code" not in same
    (file,) = (place / "second" / "suites" / "pairs").iterdir()
    record = json.loads(file.read_text())
    record.pop("checksum")
    code = record["facts"]["code"]
    record["facts"]["code"] = "0123"
    file.write_text(json.dumps(record))
    assert main(command) == 0
    shown = capsys.readouterr().out
    start = "pairs.accuracy was scored by other code in some of these (suites.pairs.code: "
    assert set(shown.partition(start)[2].partition(")")[0].split(", ")) == {code, "0123"}
    # Other code may compute the same: the table is as before.
    assert shown.startswith(same.partition("\n\n")[0])
    # Unlike other options, a result that does not record its code is not told apart.
    del record["facts"]["code"]
    file.write_text(json.dumps(record))
    assert main(command) == 0
    assert "other code" not in capsys.readouterr().out


def test_no_best_is_marked_between_other_data_or_options(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(place / "data", place / "second", 30, "label=second", "seed=2")
    assert score(place) == 0
    assert score(place, "first=10", run="second") == 0
    capsys.readouterr()
    command = ["report", str(place / "run"), str(place / "second"), "--metric", "pairs.accuracy"]
    assert main(command) == 0
    shown = capsys.readouterr().out
    expect_facts(shown, "suites.pairs.first: 0, 10", "the same")
    assert score(place, run="second") == 0
    capsys.readouterr()
    assert main(command) == 0
    assert "suites.pairs" not in capsys.readouterr().out


def test_several_results_of_a_suite_have_names(place: Path) -> None:
    assert score(place, "--name", "agreement", "first=5") == 0
    assert score(place) == 0
    metrics = read_run(place / "run").metrics
    assert metrics["agreement.n"] == 10 and metrics["pairs.n"] == 60


def test_a_final_metric_is_not_replaced(place: Path) -> None:
    assert score(place, "--name", "mlm") == 0
    results = place / "run" / "results.json"
    content = json.loads(results.read_text())
    content["metrics"] = {"mlm": {"accuracy": 0.25}}
    results.write_text(json.dumps(content))
    assert read_run(place / "run").metrics["mlm.accuracy"] == 0.25


def test_what_was_scored_is_not_scored_again(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the data, an option, the checkpoint or the code is another."""
    assert score(place) == 0
    shown = capsys.readouterr().out
    scored: list[object] = []
    whole = SentenceScorer.score

    def counted(self: SentenceScorer, sentences: Sequence[SourceSentence]) -> object:
        scored.append(self)
        return whole(self, sentences)

    monkeypatch.setattr(SentenceScorer, "score", counted)
    assert score(place) == 0
    again = capsys.readouterr()
    assert again.out == shown and "delete" in again.err and not scored
    changes = (
        ["first=10"],
        ["--pll", "within_word_l2r"],
        ["--too-long", "skip"],
        ["engine.precision=fp64"],
        ["task.tokens_per_sample=11"],
        [],
    )
    for words in changes:
        scored.clear()
        assert score(place, *words) == 0 and scored, words
    file = place / "run" / "suites" / "pairs" / "update_000000060.json"
    record = json.loads(file.read_text())
    assert record["options"]["pll"] == "original" and "overrides" not in record["options"]
    with open(place / "pairs" / "near.jsonl", "a") as more:
        more.write('{"sentence_good": "cats run", "sentence_bad": "cats runs"}\n')
    scored.clear()
    assert score(place) == 0 and scored
    record["facts"]["code"] = "other"
    record.pop("checksum")
    file.write_text(json.dumps(record))
    scored.clear()
    assert score(place) == 0 and scored


def make_set(place: Path) -> Path:
    """Make a labelled set in the data folder of the run; return its folder."""
    (place / "set.tsv").write_text("label\ttext\n" + "yes\tcats run\nno\tcat run\n" * 4)
    command = ["preprocess", "--labelled", "set", "--destdir", str(place / "data")]
    splits = ["--trainpref", f"{place}/set.tsv", "--validpref", f"{place}/set.tsv"]
    assert main([*command, *splits]) == 0
    return place / "data" / "set"


def test_a_labelled_set_is_a_suite(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its numbers are those of `evaluate`."""
    folder = make_set(place)
    tuned, options = str(place / "tuned"), ["task.tokens_per_sample=12", "--max-update", "3"]
    command = ["train", str(place / "data"), "--task", "sentence_prediction", "--model", "inherit"]
    more = ["--criterion", "sentence_prediction", "--init-from", str(place / "run")]
    assert main([*command, *more, "task.labelled=set", "--save-dir", tuned, *options]) == 0
    capsys.readouterr()
    assert main(["evaluate", tuned, "--split", "valid"]) == 0
    evaluated = json.loads(capsys.readouterr().out)
    assert main(["score", tuned, "--suite", "labelled", "--data", str(folder)]) == 0
    capsys.readouterr()
    metrics = read_run(place / "tuned").metrics
    for name in ("accuracy", "f1_macro"):
        assert metrics[f"labelled.{name}"] == evaluated[name]
    assert metrics["labelled.n"] == 8
    for words, part in (
        (["--suite", "glue/RTE", "--data", str(folder)], "score it with --suite labelled"),
        (["--suite", "labelled", "--data", str(folder), "split=test"], "test"),
        (["--suite", "labelled", "--data", str(place / "data")], "a corpus, not"),
    ):
        assert main(["score", tuned, *words]) == 2
        assert part in capsys.readouterr().err


MISTAKES = {
    "no such suite": (["--suite", "blmp"], ["blmp", "Did you mean 'blimp'"]),
    "no folder given": (["--data"], ["--data"]),
    "no such folder": (["--data", "{p}/none"], ["none: no such folder"]),
    "nothing in it": (
        ["--data", "{p}/run/checkpoints"],
        ["no file of suite pairs", "*.jsonl"],
    ),
    "no JSON": (["--data", "{p}/text.jsonl"], ["text.jsonl:1", "not valid JSON"]),
    "no pairs": (["--data", "{p}/half.jsonl"], ["half.jsonl:1", "'sentence_bad'"]),
    "no UTF-8": (["--data", "{p}/bytes.jsonl"], ["bytes.jsonl:1", "0xff", "--on-bad-utf8"]),
    "not BLiMP": (["--suite", "blimp"], ["far.jsonl:1", "linguistics_term", "groups=[]"]),
    "an empty group": (
        ["--data", "{p}/long.jsonl", "--too-long", "skip"],
        ["'long' is empty", "--too-long cut"],
    ),
    "option of the suite": (["firsst=3"], ["firsst", "Did you mean 'first'"]),
    "option of the run": (["engine.devcie=cpu"], ["engine.devcie", "engine.device"]),
    "a split's name": (["--name", "test"], ["--name test"]),
    "no name": (["--name", "a/b"], ["--name"]),
    "with --pairs": (["--pairs"], ["--pairs"]),
    "not fine-tuned": (
        ["--suite", "labelled", "--data", "{p}/data/set"],
        ["masked_lm", "fine-tuned", "sentence_prediction"],
    ),
}


@pytest.mark.parametrize("name", list(MISTAKES))
def test_mistakes(place: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    long = {"sentence_good": "cats " * 20, "sentence_bad": "cats run"}
    (place / "text.jsonl").write_text("text\n")
    (place / "half.jsonl").write_text('{"sentence_good": "a"}\n')
    (place / "bytes.jsonl").write_bytes(b'{"sentence_good": "\xff", "sentence_bad": "b"}\n')
    (place / "long.jsonl").write_text(json.dumps(long) + "\n")
    make_set(place)
    capsys.readouterr()
    words, parts = MISTAKES[name]
    assert score(place, *(word.format(p=place) for word in words)) == 2
    out, err = capsys.readouterr()
    assert not [part for part in parts if part not in err], err
    assert err.count("metaseq-lm:") == 1 and "Traceback" not in err and not out
    assert not (place / "run" / suite_results.FOLDER).exists()


def test_neither_input_nor_suite(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["score", str(place / "run")]) == 2
    assert "--suite" in capsys.readouterr().err
    assert main(["score", str(place / "run"), "--suite", "pairs"]) == 2
    assert "--data FOLDER" in capsys.readouterr().err
