"""Warm-ups of the size of a batch and of the length of rows."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from battery import configure, train

from metaseq_lm.config.tasks import WarmupConfig
from metaseq_lm.core.config import RunConfig
from metaseq_lm.core.errors import MetaseqError, UsageError
from metaseq_lm.data.corpus.packing import open_corpus
from metaseq_lm.data.streams import Shard
from metaseq_lm.tasks.protocols import facts_of
from metaseq_lm.training.parts import build_task
from metaseq_lm.training.price import estimate_price
from metaseq_lm.training.run import TrainingRun

CASE = ("masked_lm", 0)
WINDOWS = ["task.sample_break_mode=none", "task.batch_size=16", "trainer.max_update=20"]
ROWS = ["task.batch_warmup_ratio=0.4", "task.batch_start=0.25"]
PHASES = ["task.row_lengths=[9,17,34]", "task.length_phases=[0.5,0.3,0.2]"]
LENGTHS = ["task.length_warmup_updates=5", "task.length_start=0.5"]


def config_of(data: Path, save: Path, *more: str) -> RunConfig:
    return configure(data, save, CASE, *WINDOWS, *more)


def batches(config: RunConfig, numbers: range) -> list[Any]:
    stream = build_task(config).build_streams("train")["train"]
    return [stream.micro_batches(number, Shard())[0] for number in numbers]


def test_rows_and_their_length_rise_by_a_line(moons, tmp_path):
    shapes = [tuple(b.tokens.shape) for b in batches(config_of(moons, tmp_path, *ROWS), range(10))]
    assert [rows for rows, _ in shapes] == [4, 5, 7, 8, 10, 11, 13, 14, 16, 16]
    shapes = [
        tuple(b.tokens.shape) for b in batches(config_of(moons, tmp_path, *LENGTHS), range(7))
    ]
    assert [length for _, length in shapes] == [17, 20, 23, 27, 30, 34, 34]
    assert {rows for rows, _ in shapes} == {16}


def test_a_cut_row_is_the_beginning_of_the_whole_one(moons, tmp_path):
    still = ["task.mask_prob=0"]
    (cut,) = batches(config_of(moons, tmp_path, *LENGTHS, *still), range(1))
    (whole,) = batches(config_of(moons, tmp_path, *still), range(1))
    assert torch.equal(cut.tokens[:, :16], whole.tokens[:, :16])
    assert torch.equal(cut.tokens[:, 16], whole.tokens[:, -1])  # [SEP]
    assert cut.padding is None


@pytest.mark.parametrize(
    ("more", "published"),
    [
        # Rows of as many tokens as 16 of 34, or as many rows.
        (PHASES, {0: (60, 9), 9: (60, 9), 10: (32, 17), 15: (32, 17), 16: (16, 34), 19: (16, 34)}),
        ([*PHASES, "task.length_keeps=rows"], {0: (16, 9), 10: (16, 17), 19: (16, 34)}),
        ([*PHASES, "task.length_updates=10"], {4: (60, 9), 5: (32, 17), 8: (16, 34)}),
        # The warm-up goes on through the phases.
        ([*PHASES, "task.batch_warmup_ratio=1"], {0: (15, 9), 10: (20, 17), 16: (13, 34)}),
    ],
)
def test_rows_have_another_length_in_each_phase(more, published, moons, tmp_path):
    stream = build_task(config_of(moons, tmp_path, *more)).build_streams("train")["train"]
    for number, shape in published.items():
        (batch,) = stream.at_update(number).micro_batches(number, Shard())
        assert tuple(batch.tokens.shape) == shape  # type: ignore[attr-defined]
        assert stream.places(number) == shape[0] * shape[1]
    (valid,) = build_task(config_of(moons, tmp_path, *more)).build_streams("valid").values()
    assert valid.micro_batches(0, Shard())[0].tokens.shape == (16, 34)  # type: ignore[attr-defined]


@pytest.mark.parametrize("mode", ["eos", "none", "documents"])
def test_each_phase_begins_an_epoch_of_rows_of_its_own(mode, moons, tmp_path):
    """In which each token of the text is once, in a random order; words are counted in them."""
    rows = ["task.batch_size=4", "task.row_lengths=[9,34]", f"task.sample_break_mode={mode}"]
    total = 2000
    more = [*rows, "task.length_phases=[0.75,0.25]", f"trainer.max_update={total}"]
    task = build_task(config_of(moons, tmp_path, *more, "task.mask_prob=0"))
    stream = task.build_streams("train")["train"]
    whole = open_corpus(moons, "train", task.vocabulary, task.config.in_phases()[0], 1).data
    for phase, begin in enumerate((0, 1500)):
        count = len(stream.lengths.phases[phase])
        found: list[int] = []
        number, seen = begin, 0
        while seen < count:
            for batch in stream.micro_batches(number, Shard()):
                assert (batch.layout.documents is None) == (mode != "documents")  # type: ignore[attr-defined]
                left = batch.tokens[: count - seen]  # type: ignore[attr-defined]
                found += left[~torch.isin(left, torch.tensor([*task.vocabulary.specials]))].tolist()
                seen += len(left)
            number += 1
        assert Counter(found) == Counter(whole.tokens[:].tolist())
        words = sum(stream.count_words(n) for n in range(begin, number))
        assert words == pytest.approx(len(found), rel=0.2)  # moons: a word is a token


@pytest.mark.parametrize("case", [("masked_lm", 2), ("bert_pretraining", 0)])
def test_two_segments_are_packed_into_the_rows_of_a_phase(case, moons, tmp_path):
    more = ["task.row_lengths=[20,34]", "task.length_phases=[0.5,0.5]", "trainer.max_update=10"]
    config = configure(moons, tmp_path, case, *more)
    stream = build_task(config).build_streams("train")["train"]
    assert 0 < stream.count_words(0) < stream.count_words(5) * 2
    for batch, length in zip(batches(config, range(0, 10, 5)), (20, 34)):
        assert batch.tokens.shape[1] <= length and batch.segments.shape == batch.tokens.shape
        assert batch.segments.any(1).sum() > 8


@pytest.mark.parametrize("more", [ROWS, LENGTHS, [*ROWS, *LENGTHS], PHASES, [*PHASES, *ROWS]])
def test_a_run_costs_what_its_price_says(more, moons, tmp_path):
    config = config_of(moons, tmp_path, *more, "trainer.valid_split=''")
    price = estimate_price(config).flops
    train(config)
    spent = json.loads((tmp_path / "results.json").read_text())["flops"]
    # Rows are whole numbers, and attention grows with the square of their length.
    assert 20 * price == pytest.approx(spent, rel=0.03)
    full = estimate_price(config_of(moons, tmp_path)).flops
    by_size = full * config.task.sizes(20).mean()
    # Short rows cost less, by their attention and the fewer tokens of windows across documents.
    assert price < by_size if PHASES[0] in more else price == pytest.approx(by_size, rel=1e-12)


def test_mean_size():
    """By hand: over four of ten updates rows rise from a quarter of their number."""
    options = WarmupConfig(batch_warmup_updates=4)
    assert options.sizes(10).mean() == pytest.approx((0.25 + 0.4375 + 0.625 + 0.8125 + 6) / 10)
    halves = WarmupConfig(
        batch_warmup_updates=2, batch_start=0.5, length_warmup_ratio=0.5, length_start=0.5
    )
    assert halves.sizes(4).mean() == pytest.approx((0.25 + 0.75 * 0.75 + 1 + 1) / 4)
    assert WarmupConfig().sizes(7).mean() == 1.0


def test_what_a_warm_up_cannot_be(moons, tmp_path):
    """Another length of the run changes a share; rows of two segments are not cut."""
    short = [*ROWS, "trainer.max_update=10"]
    train(config_of(moons, tmp_path / "a", *short))
    with pytest.raises(MetaseqError, match=r"warmup_updates.*\[4, 0\].*\[8, 0\]"):
        TrainingRun(config_of(moons, tmp_path / "a", *ROWS)).train()
    config = configure(moons, tmp_path / "b", ("masked_lm", 2), *LENGTHS)
    with pytest.raises(UsageError, match="two segments"):
        build_task(config).build_streams("train")
    config = configure(moons, tmp_path / "c", ("bert_pretraining", 1), *ROWS)
    with pytest.raises(UsageError, match="several batches"):
        build_task(config)
    assert "warmup_updates" not in facts_of(build_task(config_of(moons, tmp_path / "d")))


@pytest.mark.parametrize(
    ("case", "options", "fact"),
    [
        (CASE, [PHASES[0]], "length_phases"),
        (CASE, [PHASES[1]], "row_lengths"),
        (CASE, [PHASES[0], "task.length_phases=[0.5,0.3,0.1]"], "1 together"),
        (CASE, [PHASES[0], "task.length_phases=[0.5,0.5]"], "for each length"),
        (CASE, [*PHASES, "task.tokens_per_sample=20"], "tokens_per_sample=20"),
        (CASE, [*PHASES, *LENGTHS], "length_warmup_updates"),
        (("bert_pretraining", 1), PHASES, "several batches"),
        (("sentence_prediction", 0), PHASES, "row_lengths"),
    ],
)
def test_phases_that_cannot_be(case, options, fact, moons, tmp_path):
    """They are refused before anything is written."""
    with pytest.raises(UsageError, match=fact):
        TrainingRun(configure(moons, tmp_path / "run", case, *options)).train()
    assert not (tmp_path / "run").exists()


def test_a_run_goes_on_in_the_phases_it_began_in(moons, tmp_path):
    train(config_of(moons, tmp_path, *PHASES, "trainer.max_update=10"))
    for longer in ([], ["task.length_updates=30"]):
        with pytest.raises(MetaseqError, match="length_updates"):
            TrainingRun(config_of(moons, tmp_path, *PHASES, *longer)).train()
    kept = [*PHASES, "task.length_updates=10"]
    with pytest.raises(UsageError, match="--reset data"):
        TrainingRun(config_of(moons, tmp_path, *kept, "task.length_keeps=rows")).train()
