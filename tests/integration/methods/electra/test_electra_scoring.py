"""`score` and `rerank` on tiny runs of Electric, ELECTRA-TT and the two towers, against hand-made
values.
"""

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from imported import imported

from metaseq_lm.cli import main
from metaseq_lm.core.batch import TokenBatch
from metaseq_lm.reporting import archive
from metaseq_lm.training.restore import open_run

SCORES = Path(__file__).resolve().parents[4] / "examples" / "electric" / "scores.py"

WORDS = [f"w{i}" for i in range(9)]
RATE = 0.2
OPTIONS = f"""
    task=electra model=electra model.noise=two_tower model.encoder_layers=1
    model.encoder_embed_dim=16 model.encoder_ffn_embed_dim=32 model.encoder_attention_heads=2
    model.generator_size=0.5 model.max_positions=12 task.tokens_per_sample=12
    task.sample_break_mode=eos task.batch_size=16 task.mask_prob={RATE} optimizer.lr=0.05
    schedule=constant trainer.max_update=15 trainer.valid_split='' engine.threads=1
    engine.tensorboard=false
""".split()
CRITERIONS = ["electric_nce", "electra_rtd", "two_tower_cloze"]
DISSERTATION = "criterion.pll_formula=dissertation"
PRECISE = ["engine.precision=fp64", "engine.device=cpu"]
SENTENCES = ["w0 w1 w2", "w3", "w4 w4 w5 w6 w7 w8"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of each criterion on the same text, in a folder of its name."""
    folder, rng = tmp_path_factory.mktemp("scored"), random.Random(2)
    lines = [" ".join(rng.choices(WORDS, range(9, 0, -1), k=rng.randint(1, 9))) for _ in range(60)]
    (folder / "train.txt").write_text("\n".join([" ".join(WORDS), *lines]) + "\n")
    text = ["--trainpref", f"{folder}/train.txt", "--tokenizer", "word"]
    assert main(["preprocess", *text, "--destdir", f"{folder}/data"]) == 0
    for name in CRITERIONS:
        command = ["train", f"{folder}/data", "--save-dir", f"{folder}/{name}"]
        assert main([*command, "--criterion", name, *OPTIONS]) == 0
    return folder


@torch.no_grad()
def by_hand(run: Path, sentence: str, formula: str) -> list[float]:
    """Return log p of each word from the run's logits and its towers' log q, without
    its criterion.
    """
    opened = open_run(str(run), overrides=PRECISE)
    model: Any = opened.model.eval()
    vocabulary: Any = opened.task.vocabulary  # type: ignore[attr-defined]
    ids = [vocabulary.index(word) for word in sentence.split()]
    row = torch.tensor([[vocabulary.cls(0), *ids, vocabulary.sep]])
    scores = model.cloze_noise(TokenBatch(tokens=row))[0]
    logits = [0.0] * row.shape[1]
    if run.name != "two_tower_cloze":
        logits = model.heads["rtd"](model.encoder(row))[0].tolist()
    found = []
    for place, token in enumerate(ids, 1):
        weights = [math.exp(s) for s in scores[place].tolist()]
        q, odds = weights[token] / sum(weights), math.exp(-logits[place])
        # With labels by equality real : fake is p (1 - m + m q) : m q (1 - p).
        ratio = odds * RATE * q / (1 - RATE + RATE * q)
        found.append(
            {
                "electric": -logits[place],
                "towers": math.log(q),
                "corrected": math.log(ratio / (1 + ratio)),
                "dissertation": math.log(odds * q * RATE / (1 - RATE)),
            }[formula]
        )
    return found


CASES = [
    ("electric_nce", [], "electric"),
    ("two_tower_cloze", [], "towers"),
    ("electra_rtd", [], "corrected"),
    ("electra_rtd", [DISSERTATION], "dissertation"),
]
IDS = [formula for _, _, formula in CASES]


@pytest.mark.parametrize("name, more, formula", CASES, ids=IDS)
def test_score(name, more, formula, runs, tmp_path, capsys):
    """Log-probabilities of every token; rows of other lengths are padded, and pass once."""
    (tmp_path / "in.txt").write_text("\n".join(SENTENCES) + "\n")
    capsys.readouterr()
    command = ["score", str(runs / name), "--input", str(tmp_path / "in.txt"), "--tokens"]
    assert main([*command, *PRECISE, *more]) == 0
    out, err = capsys.readouterr()
    lines = [json.loads(line) for line in out.splitlines()]
    for sentence, line in zip(SENTENCES, lines, strict=True):
        wanted = by_hand(runs / name, sentence, formula)
        assert line["tokens"] == sentence.split()
        assert line["log_probs"] == pytest.approx(wanted, rel=1e-9)
        assert line["pll"] == pytest.approx(sum(wanted), rel=1e-9)
    assert "10 tokens" in err


@pytest.mark.parametrize("name, more, formula", CASES, ids=IDS)
def test_rerank(name, more, formula, runs, tmp_path, capsys):
    """The best of score + lambda * PLL, with PLLs by hand."""
    plls = {s: sum(by_hand(runs / name, s, formula)) for s in SENTENCES}
    scores = dict(zip(SENTENCES, (-1.0, -3.0, 0.0)))
    hypotheses = {f"hyp_{n}": {"score": s, "text": t} for n, (t, s) in enumerate(scores.items())}
    lists = tmp_path / "lists.json"
    lists.write_text(json.dumps({"u": {"ref": "w0 w1 w2", **hypotheses}}))
    files = ["--dev", str(lists), "--test", str(lists), "--out", str(tmp_path / "out")]
    capsys.readouterr()
    assert main(["rerank", *files, str(runs / name), "--lambdas", "0.7", *PRECISE, *more]) == 0
    rows = (tmp_path / "out" / "1" / "plls.tsv").read_text().splitlines()
    found = {text: float(pll) for pll, _, text in (row.split("\t") for row in rows)}
    assert found == pytest.approx(plls, rel=1e-9)
    totals = {text: scores[text] + 0.7 * plls[text] for text in SENTENCES}
    ranked = json.loads((tmp_path / "out" / "1" / "test.json").read_text())["u"]
    wanted = sorted(SENTENCES, key=lambda text: -totals[text])
    assert [ranked[f"hyp_{n}"]["text"] for n in (1, 2, 3)] == wanted
    assert ranked["hyp_1"]["score"] == pytest.approx(max(totals.values()), rel=1e-9)


def test_a_masked_generator_gives_no_probabilities(runs, tmp_path, capsys):
    """Refused in one message that names what can."""
    place = str(tmp_path / "run")
    options = [*OPTIONS, "model.noise=mlm", "trainer.max_update=1", "--criterion", "electra_rtd"]
    assert main(["train", str(runs / "data"), "--save-dir", place, *options]) == 0
    (tmp_path / "in.txt").write_text("w0\n")
    capsys.readouterr()
    assert main(["score", place, "--input", str(tmp_path / "in.txt")]) == 2
    assert "model.noise=two_tower" in capsys.readouterr().err


def test_scores_of_runs_become_an_archive(runs, tmp_path, monkeypatch, capsys):
    """scores.py: what `score` and `rerank` print of each run, as metrics that `report` reads."""
    pairs = [
        {"sentence_good": good, "sentence_bad": bad}
        for good, bad in (
            ("w0 w1", "w8 w7"),
            ("w1", "w8"),
            ("w0", " ".join(WORDS + WORDS)),  # too long for a row
            ("w2", "w7"),
        )
    ]
    rows = [json.dumps(pair) + "\n" for pair in pairs]
    for name, lines in (("one", rows), ("two", rows[2:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    hypotheses = {f"hyp_{n}": {"score": -n, "text": t} for n, t in enumerate(SENTENCES, 1)}
    (tmp_path / "lists.json").write_text(json.dumps({"u": {"ref": "w3", **hypotheses}}))
    lists = [f"--{split}={tmp_path / 'lists.json'}" for split in ("dev", "test")]
    files = [str(tmp_path / f"{name}.jsonl") for name in ("one", "two")]
    places = [str(runs / name) for name in ("electric_nce", "two_tower_cloze")]
    words = [*places, "--pairs", *files, "--first", "2", *lists, "--out", f"{tmp_path}/out.jsonl"]
    monkeypatch.setattr("sys.argv", ["scores.py", *words])
    imported(SCORES).main()
    for place, run in zip(places, archive.read(tmp_path / "out.jsonl"), strict=True):
        (tmp_path / "one.jsonl").write_text("".join(rows[:2]))  # the first two
        capsys.readouterr()
        command = ["score", place, "--pairs", "--too-long", "skip", "--input", *files]
        assert main([*command, "engine.device=cpu"]) == 0
        printed = json.loads(capsys.readouterr().out)
        assert printed["overall"]["pairs"] == run.metrics["pairs.pairs"] == 3
        assert printed["overall"]["accuracy"] == run.metrics["pairs.accuracy"]
        assert printed["files"][files[1]]["accuracy"] == run.metrics["pairs.two.accuracy"]
        assert main(["rerank", place, *lists, "--append-period", "engine.device=cpu"]) == 0
        printed = json.loads(capsys.readouterr().out)
        assert printed["lambda"] == run.metrics["lists.lambda"]
        assert printed["test"]["wer"] == run.metrics["lists.wer"]
        assert 1 <= run.metrics["pairs.passes"] < 3
    assert main(["report", f"{tmp_path}/out.jsonl", "--metric", "pairs.accuracy"]) == 0
    assert "two_tower_cloze" in capsys.readouterr().out
