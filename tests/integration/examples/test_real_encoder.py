"""The programs of examples/real_encoder on small files of GLUE and a small random BERT."""

import json
import runpy
import sys
from pathlib import Path

import pytest
from benchmark_files import glue_files
from imported import imported

from metaseq_lm.cli import main

pytest.importorskip("transformers")
from hf_folders import make

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "real_encoder"
SHORT = """
    task.epochs=0 trainer.max_update=4 task.tokens_per_sample=19 engine.tensorboard=false
""".split()


@pytest.fixture(scope="module")
def fine_tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with official files, a BERT of transformers, and runs of two sets."""
    folder = tmp_path_factory.mktemp("real")
    make(folder / "hf", "BertModel")
    start, data = str(folder / "start"), str(folder / "data")
    assert main(["import", str(folder / "hf"), "--out", start]) == 0
    for name in ("RTE", "STS-B"):
        source = folder / f"glue-{name}"
        source.mkdir()
        for file, text in glue_files(name, rows=36).items():
            (source / file).write_text(text)
        words = ["preprocess", "--benchmark", f"glue/{name}", "--source", str(source)]
        words += ["--tokenizer-from", start, "--destdir", data]
        assert main([*words, *["--no-double"] * (name == "STS-B")]) == 0
        config = ["--config-dir", str(EXAMPLE / "config"), "--config-name", "finetune", *SHORT]
        paths = ["--init-from", start, "--save-dir", str(folder / name)]
        assert main(["train", data, *config, *paths, f"task.labelled={name}"]) == 0
    return folder


def test_the_exported_runs_predict_the_same(fine_tuned, monkeypatch, capsys):
    """Classes and real values; transformers reads the official texts itself."""
    exported = imported(EXAMPLE / "exported.py")
    results = fine_tuned / "exported.jsonl"
    words = [str(fine_tuned / name) for name in ("RTE", "STS-B")]
    words += ["--source", str(fine_tuned), "--out", str(fine_tuned / "out"), "--results"]
    monkeypatch.setattr("sys.argv", ["exported.py", *words, str(results)])
    exported.main()
    for row in map(json.loads, results.read_text().splitlines()):
        assert row["equal"] == row["rows"] == 36 and row["largest_difference"] < 1e-4
        assert row["score"] == pytest.approx(row["library_score"], abs=1e-4)
    shown = capsys.readouterr().out.splitlines()
    assert any(line.startswith("| RTE | 1 | 36 | 36 | ") and "| 50.0 |" in line for line in shown)


def test_the_peer_is_measured(fine_tuned, monkeypatch, capsys):
    """A whole run gives scores and speeds, float64 the differences of the losses."""
    peer = imported(EXAMPLE / "peer.py")
    results = fine_tuned / "peer.jsonl"
    words = [str(fine_tuned / "STS-B"), "--source", str(fine_tuned / "hf"), "--out", str(results)]
    for more in ([], ["--float64"]):
        monkeypatch.setattr("sys.argv", ["peer.py", *words, *more])
        peer.main()
    whole, exact = map(json.loads, results.read_text().splitlines())
    assert {
        "score",
        "peer_score",
        "rows_per_cpu_second",
        "peer_rows_per_cpu_second",
    } <= whole.keys()
    assert exact["precision"] == "fp64" and exact["largest_difference"] < 1e-10
    capsys.readouterr()
    monkeypatch.setattr("sys.argv", ["peer.py", "--table", str(results)])
    peer.main()
    assert capsys.readouterr().out.count("| STS-B | ") == 2


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (EXAMPLE / "exported.py", "RUN --source S --out O --results R"),
        (EXAMPLE / "peer.py", "RUN --source S --out O"),
        (EXAMPLE / "untrained.py", "HF OUT"),
        (EXAMPLE.parent / "tartan" / "first_layers.py", "HF 3 OUT"),
    ],
    ids=lambda value: getattr(value, "stem", None),
)
def test_without_transformers_programs_say_what_to_install(program, words, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr("sys.argv", [str(program), *words.split()])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(program), run_name="__main__")
    assert ended.value.code == 1
    error = capsys.readouterr().err
    assert error.startswith(f"{program.name}: ") and error.count("\n") == 1
    assert "pip install 'metaseq-lm[transformers]'" in error
