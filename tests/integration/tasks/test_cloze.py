"""CLOTH: its files, rows and scores, a masked language model that is fine-tuned on it, refusals."""

import json
import math
import os
from pathlib import Path
from typing import Any

import cloth_data
import numpy as np
import pytest
import torch
from battery import TINY
from outcomes import expect_error
from torch import Tensor, nn

from metaseq_lm.cli import main
from metaseq_lm.config.criterions import BatchSumConfig
from metaseq_lm.criterions.labelled import Cloze
from metaseq_lm.data.labelled.cloze_rows import ClozeBatch, ClozeRows
from metaseq_lm.data.labelled.sets import LabelledSet
from metaseq_lm.data.tokenizers.loading import load_tokenizer

TRAIN = ["--model", "transformer", *TINY]
TASK = ["--task", "cloze", "--criterion", "cloze", "task.labelled=CLOTH", "task.batch_size=8"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of counting, and the three sets of 10 passages with 2 blanks each."""
    place = tmp_path_factory.mktemp("cloth")
    lines = [" ".join(map(str, range(first, first + 20))) for first in range(40)]
    (place / "text").write_text("\n".join([*lines, "_"]) + "\n")
    command = ["preprocess", f"--trainpref={place}/text", f"--validpref={place}/text"]
    assert main([*command, "--vocab-size=400", f"--destdir={place}/data"]) == 0
    files = cloth_data.write(place / "files")
    for name in ("CLOTH", "CLOTH-M", "CLOTH-H"):
        assert main(cloth_data.arguments(files, place / "data", name)) == 0
    return place / "data"


def rows_of(data: Path, longest: int, name: str = "CLOTH") -> ClozeRows:
    vocabulary = load_tokenizer(data).vocabulary
    return ClozeRows(LabelledSet(data / name, "valid"), vocabulary, longest)


def test_middle_and_high_schools_part_the_set(data):
    counts = [len(LabelledSet(data / f"CLOTH{end}", "test")) for end in ("", "-M", "-H")]
    assert counts == [20, 10, 10]


def test_the_published_folders_are_read(data, tmp_path):
    """One passage a file, in train/middle, train/high and so on."""
    lines = (cloth_data.write(tmp_path / "files") / "valid.jsonl").read_text().splitlines()
    for number, line in enumerate(lines):
        level = json.loads(line)["source"].removesuffix("1.json")
        file = tmp_path / "CLOTH" / "valid" / level / f"{level}{number}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(line)
    command = cloth_data.arguments(tmp_path / "CLOTH", data, "CLOTH-H")
    assert main([*command, "--labelled=published"]) == 0
    assert len(LabelledSet(data / "published", "valid")) == 10


@pytest.mark.parametrize("longest", [64, 12])
def test_rows_have_a_mask_at_each_blank_and_hold_the_one_asked_for(longest, data):
    """A cut row is the window around its blank, whose number lies between its neighbours."""
    rows, tokenizer = rows_of(data, longest), load_tokenizer(data)
    batch = rows.batch(np.arange(len(rows)), np.zeros(len(rows), np.uint64))
    assert batch.positions is not None and batch.targets is not None
    assert batch.tokens.shape[1] <= longest and len(rows) == 20
    mask = tokenizer.vocabulary.mask
    assert longest < 64 or ((batch.tokens == mask).sum(1) == 2).all()
    for number in range(len(rows)):
        place, right = int(batch.positions[number]), int(batch.targets[number])
        assert batch.tokens[number, place] == mask
        tokens = batch.candidates[number, right]
        value = int(tokenizer.decode(tokens[tokens >= 0].tolist()))
        before = [t for t in batch.tokens[number, 1:place].tolist() if t != mask]
        if longest == 64:  # all numbers before the blank are there, but for the other blank
            text = tokenizer.decode(before).split()
            assert len(text) in (value, value - 1) and set(map(int, text)) <= set(range(value))


def test_a_candidate_scores_the_mean_logit_of_its_tokens_at_the_blank():
    class Fixed(nn.Module):
        def forward(self, tokens: Tensor, layout: Any, positions: Tensor) -> Tensor:
            assert positions.tolist() == [[2]]
            return torch.tensor([[[0.0, 1.0, 2.0, 5.0]]])

    candidates = torch.tensor([[[1, -1], [2, 3], [3, -1], [-1, -1]]])
    batch = ClozeBatch(
        tokens=torch.zeros(1, 4, dtype=torch.long),
        positions=torch.tensor([[2]]),
        candidates=candidates,
        targets=torch.tensor([1]),
        sizes={"rows": 1},
    )
    criterion, model = Cloze(BatchSumConfig()), Fixed()
    assert criterion.scores(model, batch).tolist() == [[1.0, 3.5, 5.0, -math.inf]]
    terms = criterion(model, batch)
    expected = math.log(math.exp(1) + math.exp(3.5) + math.exp(5)) - 3.5
    assert terms["cross_entropy"].sum.item() == pytest.approx(expected, rel=1e-6)


def test_fine_tuning_from_a_masked_language_model(data, tmp_path):
    """The loss begins at the pre-trained head, falls, results have each level's accuracy."""
    words = ["--task", "masked_lm", "--criterion", "masked_lm", "task.tokens_per_sample=34"]
    command = ["train", str(data), *TRAIN, *words, "--max-update=20", f"--save-dir={tmp_path}/mlm"]
    assert main(command) == 0
    tune = [*TRAIN, *TASK, "task.tokens_per_sample=34", "task.epochs=40", "task.validate_epochs=20"]
    start = ["--init-from", f"{tmp_path}/mlm", "trainer.final_splits=[test]"]
    assert main(["train", str(data), *tune, *start, f"--save-dir={tmp_path}/tuned"]) == 0
    metrics = json.loads((tmp_path / "tuned/results.json").read_text())["metrics"]
    test = metrics["test"]
    assert test["accuracy"] == (test["accuracy_middle"] + test["accuracy_high"]) / 2
    rows = [json.loads(line) for line in (tmp_path / "tuned/log.jsonl").read_text().splitlines()]
    losses = [row["cross_entropy"] for row in rows if row.get("kind") == "train"]
    assert min(losses[-5:]) < 0.7 * losses[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"article": "1 2 3"}, "0 blanks (_) in the article, 2 options"),
        ({"answers": ["A", "E"]}, "answers[1] is 'E'"),
        ({"options": [["1", "2", "3", "4"], ["1", "2", "3"]]}, "options[1] is not a list"),
        ({"source": "college1"}, "with middle nor with high"),
    ],
)
def test_damaged_passages_are_named(changes, message, data, tmp_path, capsys):
    files = cloth_data.write(tmp_path / "files")
    row = json.loads((files / "valid.jsonl").read_text().splitlines()[0]) | changes
    (files / "valid.jsonl").write_text(json.dumps(row) + "\n")
    command = cloth_data.arguments(files, data)
    expect_error(capsys, main([*command, "--labelled=damaged"]), 1, "valid.jsonl:1", message)
    assert not (data / "damaged").exists()


def test_other_sets_and_tasks_are_refused(data, tmp_path, capsys):
    other = ["--task", "sentence_prediction", "--criterion", "sentence_prediction"]
    command = ["train", str(data), *TRAIN, *other, "task.labelled=CLOTH", "--max-update=1"]
    assert main([*command, "task.tokens_per_sample=34", f"--save-dir={tmp_path}/run"]) == 2
    assert "use task=cloze criterion=cloze" in capsys.readouterr().err


REAL = Path(os.environ.get("METASEQ_LM_DATA", "")) / "cloth"


@pytest.mark.skipif(
    not (REAL / "valid.jsonl.xz").is_file(), reason="METASEQ_LM_DATA names no folder with CLOTH"
)
def test_the_published_validation_split(data):
    command = ["preprocess", "--benchmark=cloth/CLOTH", f"--validpref={REAL}/valid.jsonl.xz"]
    assert main([*command, "--labelled=real", f"--destdir={data}"]) == 0
    rows = LabelledSet(data / "real", "valid").rows
    assert rows is not None
    levels = [row["level"] for row in rows]
    assert [levels.count("middle"), levels.count("high")] == [3273, 7794]
