"""WNLI by the discriminator: rows, loss, predictions, and a toy that can be learnt."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import wnli_data

from metaseq_lm.cli import main
from metaseq_lm.config.criterions import BatchSumConfig
from metaseq_lm.core.config import RunConfig
from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.core.loading import load_config
from metaseq_lm.data.benchmarks import find_benchmark
from metaseq_lm.data.labelled.sets import LabelledSet
from metaseq_lm.data.tokenizers.loading import load_tokenizer
from metaseq_lm.methods.electra.wnli import Wnli, _label_probabilities
from metaseq_lm.methods.electra.wnli_rows import CandidateBatch, CandidateRows
from metaseq_lm.training.run import TrainingRun

SMALL = """
    model.encoder_layers=1 model.encoder_embed_dim=32 model.encoder_ffn_embed_dim=64
    model.encoder_attention_heads=2 model.max_positions=24 model.dropout=0 engine.device=cpu
    engine.threads=1 engine.tensorboard=false optimizer.lr=0.003 schedule=polynomial
    schedule.warmup_ratio=0.1
""".split()
TASK = ["task=wnli", "criterion=wnli", "task.labelled=WNLI", "task.tokens_per_sample=24"]
WORDS = r"\w+|[^\w\s]"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with a word tokenizer, the sentences as corpus, and a learnable WNLI."""
    place = tmp_path_factory.mktemp("wnli")
    source = wnli_data.write(place / "WNLI", 60)
    # "the owl" after "because" too, where a candidate stands in place of the pronoun.
    lines = [f"{a} {b}" for a, b, _ in wnli_data.rows("train", 60)]
    for split in ("train", "valid"):
        (place / f"{split}.txt").write_text("\n".join(lines) + "\n")
    command = ["preprocess", f"--trainpref={place}/train.txt", f"--validpref={place}/valid.txt"]
    command += ["--tokenizer", "word", "--word-pattern", WORDS, "--destdir", f"{place}/data"]
    assert main(command) == 0 and main(wnli_data.arguments(source, place / "data")) == 0
    return place / "data"


def configure(data: Path, save: Path, *more: str) -> RunConfig:
    return load_config([*TASK, *SMALL, f"data={data}", f"save_dir={save}", *more])


def read(
    data: Path, split: str = "train", training: bool = True, length: int = 24
) -> CandidateRows:
    return CandidateRows(LabelledSet(data / "WNLI", split), load_tokenizer(data), length, training)


def with_rows(rows: list[dict], labels: list[int] | None) -> LabelledSet:
    """A set of given facts and labels, as far as CandidateRows looks."""
    found = object.__new__(LabelledSet)
    found.__dict__ |= {"folder": Path("data/WNLI"), "split": "train"}
    found.benchmark = find_benchmark("glue/WNLI")
    found.__dict__ |= {"label_names": ["0", "1"], "rows": rows, "inputs": [rows]}
    found.labels = None if labels is None else np.array(labels)
    return found


SENTENCE = "The cat is near the cup because it is broken ."
PLACE = [SENTENCE.index("it is"), SENTENCE.index("it is") + 2]


def row(query: str, *candidates: str) -> dict:
    return {"sentence": SENTENCE, "pronoun": PLACE, "query": query, "candidates": [*candidates]}


def choices(data: Path, rows: list[dict], labels: list[int] | None, training: bool = True):
    tokenizer, found = load_tokenizer(data), with_rows(rows, labels)
    found.tokenizer_hash = tokenizer.fingerprint
    made = CandidateRows(found, tokenizer, 24, training)
    texts = [
        [tokenizer.decode(t[a:b]) for t, (a, b) in zip(c.tokens, c.spans)]
        for c in made.choices.values()
    ]
    return made, texts, [c.positive for c in made.choices.values()]


# ------------------------------------------------------------------------ rows


def test_rows_have_the_candidate_for_the_pronoun(data: Path) -> None:
    rows = read(data)
    batch = rows.batch(np.arange(2), np.arange(2, dtype=np.uint64))
    tokenizer = load_tokenizer(data)
    sentence, query, _ = wnli_data.rows("train", 60)[0]
    assert rows.data.rows is not None
    facts = rows.data.rows[0]
    for number, text in enumerate([facts["query"], *facts["candidates"]]):
        whole = sentence.replace("it is", f"{text} is")
        ids = batch.tokens[number][~batch.padding[number]] if batch.padding is not None else 0
        assert ids[0] == tokenizer.vocabulary.cls() and ids[-1] == tokenizer.vocabulary.sep
        assert ids[1:-1].tolist() == tokenizer.encode_batch([whole])[0]
        inside = batch.tokens[number][batch.candidate[number]]
        assert inside.tolist() == tokenizer.encode_batch([text])[0]
    assert batch.present.sum() == len(batch.tokens) == len(batch.rows) == len(batch.slots)
    assert len(set(batch.rows.tolist())) == len(batch.rows)


def test_long_sentences_keep_the_candidate(data: Path) -> None:
    """What is left of a sentence stands around the candidate, all of it if there is room."""
    whole, cut = read(data, length=24), read(data, length=7)
    for sample, choice in cut.choices.items():
        for tokens, span, before, place in zip(
            choice.tokens, choice.spans, whole.choices[sample].tokens, whole.choices[sample].spans
        ):
            assert len(tokens) == 5
            assert tokens[slice(*span)].tolist() == before[slice(*place)].tolist()[:5]
    with pytest.raises(UsageError, match="too short"):
        read(data, length=4)


def test_positive_candidates_follow_label_and_sister(data: Path) -> None:
    cup, cat = row("the cup", "the cat", "near"), row("the cat", "the cup", "near")
    _, texts, positive = choices(data, [cup, cat], [1, 0])
    assert [p.tolist() for p in positive] == [[True, False, False], [False, False, True]]
    assert texts[1] == ["the cat", "near", "the cup"]  # the sister's query, put last
    # No sister: anything but the query.
    _, _, positive = choices(data, [cat], [0])
    assert positive[0].tolist() == [False, True, True]
    # What overlaps the right one is no negative, and the right one is added where it was not found.
    near = row("the cat", "cup because", "near")
    _, texts, positive = choices(data, [cup, near], [1, 0])
    assert texts[1] == ["the cat", "near", "the cup"] and positive[1].tolist() == [0, 0, 1]
    # A sister of the same noun tells nothing.
    _, _, positive = choices(data, [row("cat", "the cup"), cat], [1, 0])
    assert positive[1].tolist() == [False, True, True]


def test_labels_change_no_candidates_outside_training(data: Path) -> None:
    """Else the right answer of a validation row could be read off its candidates."""
    rows = [row("the cup", "the cat"), row("the cat", "cup because", "near")]
    _, with_labels, positive = choices(data, rows, [1, 0], training=False)
    _, without, none = choices(data, rows, None, training=False)
    assert with_labels == without and none == [None, None]
    assert positive[1].tolist() == [False, True, True]


def test_rows_without_a_choice(data: Path) -> None:
    rows = read(data)
    assert rows.unusable.tolist()[0] == 120 and len(rows) + len(rows.unusable) == 122
    alone = [{"sentence": SENTENCE, "pronoun": None}, row("the cat"), row("the cat", "the cup")]
    made, _, _ = choices(data, alone, [0, 1, 1])
    assert made.usable.tolist() == [2] and made.unusable.tolist() == [0, 1]


@pytest.mark.parametrize(
    "change",
    [
        {"sentence": 1},
        *({"pronoun": span} for span in ([3], [3, 3], [3, 999], "it", [True, 3])),
        *({"query": query} for query in ("", None)),
        *({"candidates": candidates} for candidates in (None, ["a", 1])),
    ],
    ids=str,
)
def test_damaged_rows(change: dict, data: Path) -> None:
    good = row("the cup", "the cat")
    with pytest.raises(MetaseqError, match="train.rows.jsonl:2: .*pronoun"):
        choices(data, [good, good | change], [0, 1])


# ------------------------------------------------------------------------ scores and loss


def test_scores_and_loss_in_closed_form(data: Path) -> None:
    """Minus the mean logit of the candidate's tokens; minus log of the positives' share."""
    logits = torch.tensor([[0.0, 2, 4, 9], [0, 1, 9, 9], [0, -1, 9, 9], [5, 3, 1, 9], [0, 0, 9, 9]])
    inside = torch.tensor([[0, 1, 1, 0], [0, 1, 0, 0], [0, 1, 0, 0], [1, 1, 1, 0], [0, 1, 0, 0]])
    batch = CandidateBatch(
        tokens=logits,
        candidate=inside.bool(),
        slots=torch.tensor([0, 1, 2, 3, 4]),
        present=torch.tensor([[1, 1, 1], [1, 1, 0]]).bool(),
        positive=torch.tensor([[1, 0, 0], [0, 1, 0]]).bool(),
        targets=torch.tensor([1, 0]),
    )

    class Given(torch.nn.Module):
        def forward(self, tokens, layout, segments):
            return tokens

    criterion, model = Wnli(BatchSumConfig()), Given()
    scores = criterion.scores(model, batch)
    assert scores.tolist() == [[-3, -1, 1], [-3, 0, -math.inf]]
    terms = criterion.terms(model, scores, batch)
    wanted = math.log(1 + math.exp(2) + math.exp(4)) + math.log(1 + math.exp(-3))
    assert terms["cross_entropy"].sum.item() == pytest.approx(wanted, rel=1e-6)
    assert terms["accuracy"].sum.item() == 1  # the second row is no entailment, and predicted so
    assert terms["cross_entropy"].is_summed
    assert not criterion.terms(model.eval(), scores, batch)["cross_entropy"].is_summed
    # Without a known antecedent: minus log (1 - p(query)).
    batch.positive = torch.tensor([[0, 1, 1], [0, 1, 0]]).bool()
    found = criterion.terms(model, scores, batch)["cross_entropy"].sum.item()
    p = torch.softmax(scores, -1)[:, 0]
    assert found == pytest.approx(-torch.log1p(-p).sum().item(), rel=1e-5)


def test_entailment_exactly_if_the_query_scores_best() -> None:
    scores = torch.tensor([[2.0, 1, 1.9], [1, 1, 0], [0, 1, -math.inf]])
    found = _label_probabilities(scores)
    assert found.sum(-1).tolist() == pytest.approx([1, 1, 1])
    assert found.argmax(-1).tolist() == [1, 0, 0] and found[1, 1] == 0.5


# ------------------------------------------------------------------------ runs


@pytest.fixture(scope="module")
def learnt(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    save = tmp_path_factory.mktemp("runs") / "learnt"
    more = ["task.batch_size=8", "task.epochs=12", "trainer.log_interval=50"]
    TrainingRun(configure(data, save, *more, "trainer.final_splits=[valid,test]")).train()
    return save


def test_the_right_antecedent_is_learnt(learnt: Path) -> None:
    """Over 90 % of all rows of the validation split, those without a choice among them."""
    metrics = json.loads((learnt / "results.json").read_text())["metrics"]["valid"]
    assert list(metrics)[:2] == ["score", "accuracy"] and metrics["score"] == metrics["accuracy"]
    assert metrics["accuracy"] > 0.9
    rows = [json.loads(r) for r in (learnt / "predictions.valid.jsonl").read_text().splitlines()]
    assert [r["index"] for r in rows] == list(range(42))
    right = np.mean([r["gold"] == r["predicted"] for r in rows])
    assert right == pytest.approx(metrics["accuracy"])
    # The rows without a choice have the shares of the training labels.
    share = (60 + 1) / 122
    assert rows[40]["scores"] == pytest.approx([1 - share, share], abs=1e-6)


def test_the_leaderboard_file(learnt: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(["evaluate", str(learnt), "--split", "test", "--out", str(out)]) == 0
    lines = (out / "WNLI.tsv").read_text().splitlines()
    assert lines[0] == "index\tprediction" and len(lines) == 43
    gold = [label for _, _, label in wnli_data.rows("test", 20)]
    predicted = [line.split("\t") for line in lines[1:41]]
    assert [int(index) for index, _ in predicted] == list(range(40))
    assert np.mean([int(label) == y for (_, label), y in zip(predicted, gold)]) > 0.9


def test_ensembles(data: Path, tmp_path: Path) -> None:
    names = []
    for seed in (1, 2):
        names.append(str(tmp_path / str(seed)))
        TrainingRun(
            configure(data, Path(names[-1]), f"seed={seed}", "trainer.max_update=2")
        ).train()
    found = []
    for place, given in (("0", names[:1]), ("1", names[1:]), ("both", [*names, "--ensemble"])):
        assert main(["evaluate", *given, "--split", "valid", "--out", f"{tmp_path}/{place}"]) == 0
        lines = (tmp_path / place / "predictions.valid.jsonl").read_text().splitlines()
        found.append([json.loads(line)["scores"] for line in lines])
    np.testing.assert_allclose(np.mean(found[:2], 0), found[2], rtol=1e-12)
    metrics = json.loads((tmp_path / "both" / "metrics.valid.json").read_text())
    assert list(metrics) == ["score", "accuracy"]


def test_encoder_and_head_start_from_the_pretrained_run(data: Path, tmp_path: Path) -> None:
    more = ["task=electra", "model=electra", "criterion=electra_rtd", "trainer.max_update=2"]
    places = [f"data={data}", "task.tokens_per_sample=24", "task.batch_size=16"]
    before = TrainingRun(load_config([*more, *SMALL, *places, f"save_dir={tmp_path}/electra"]))
    before.train()
    options = ["model=electra", f"init_from={tmp_path}/electra", "trainer.max_update=1"]
    after = TrainingRun(configure(data, tmp_path / "wnli", *options))
    old, new = before.model.state_dict(), after.model.state_dict()
    assert {name for name in new if name not in old} == {"prior"}
    assert all(torch.equal(new[name], old[name]) for name in new if name != "prior")
    assert [name for name in new if name.startswith("heads.rtd.")]
    after.train()
    again = TrainingRun(
        configure(data, tmp_path / "more", f"init_from={tmp_path}/wnli", "model=electra")
    )
    trained = after.model.state_dict()
    assert all(torch.equal(w, trained[n]) for n, w in again.model.state_dict().items())


def test_mistakes(data: Path, pairs: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="sentence_prediction.*wnli"):
        TrainingRun(configure(data, tmp_path / "a", "criterion=sentence_prediction"))
    with pytest.raises(UsageError, match="is not glue/WNLI"):
        TrainingRun(configure(pairs, tmp_path / "b", "task.labelled=pairs")).train()
