"""Which rows the tasks see: drawn lines, the end task's own texts, drawn labelled batches."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tartan_bench import EXACT, batches_of, build
from torch.nn import functional as F

from metaseq_lm.core.errors import UsageError
from metaseq_lm.data.corpus.rows import Corpus
from metaseq_lm.data.labelled.sets import LabelledSet
from metaseq_lm.data.tokenizers.vocabulary import Vocabulary
from metaseq_lm.methods.tartan.data import Drawn, _drawn_lines
from metaseq_lm.methods.tartan.model import scores_of


def corpus(data: Path, split: str, longest: int = 12) -> Corpus:
    return Corpus(data, split, Vocabulary.load(data / "dict.txt"), longest, "eos")


def test_lines_are_drawn_without_replacement_and_by_seed(topics):
    lines = corpus(topics, "train")
    first = _drawn_lines(lines, 100, 1, "train")
    assert len(set(first.tolist())) == 100 and (np.diff(first) > 0).all()
    assert (first == _drawn_lines(lines, 100, 1, "train")).all()
    assert (first != _drawn_lines(lines, 100, 2, "train")).any()
    assert (first != _drawn_lines(lines, 100, 1, "other")).any()
    assert (_drawn_lines(lines, 0, 1, "train") == np.arange(300)).all()


def test_every_line_is_as_likely_as_another(topics):
    """300 lines, 60 of them in each of 500 draws: 100 +- 45 is 5 standard deviations."""
    lines = corpus(topics, "train")
    counts = np.bincount(
        np.concatenate([_drawn_lines(lines, 60, seed, "x") for seed in range(500)]), minlength=300
    )
    assert abs(counts - 100).max() < 45 and counts.sum() == 30_000


def test_a_long_line_is_one_row_cut(topics):
    """7 lines of 30 tokens are 7 rows of the first 10, not 21 windows."""
    lines = corpus(topics, "long")
    assert len(lines) == 21
    chosen = _drawn_lines(lines, 7, 1, "long")
    rows, lengths = lines.rows(chosen)
    assert lengths.tolist() == [12] * 7
    assert [len(set(row[1:11])) for row in rows] == [1] * 7
    assert len(set(rows[:, 1])) == 7


def test_more_lines_than_there_are_is_said(topics, tmp_path):
    run = build(topics, tmp_path, "masked_lm", "task.auxiliary=[train]", "task.lines_per_example=7")
    with pytest.raises(UsageError, match="336 lines.*'train'.*300"):
        run.task.build_streams("train")


def test_n_lines_for_each_example(topics, tmp_path):
    more = ["task.auxiliary=[train,tapt]", "task.lines_per_example=3"]
    streams = build(topics, tmp_path, "tartan_mt", *more).task.build_streams("train")
    assert len(streams["auxiliary.train"].lengths) == 3 * 48
    assert len(streams["auxiliary.tapt"].lengths) == 48
    seeds = {}
    for seed, own in ((1, "null"), (2, "null"), (1, 5), (2, 5)):
        options = [*more, f"seed={seed}", f"task.lines_seed={own}"]
        rows = build(topics, tmp_path / f"{seed}{own}", "tartan_mt", *options).task.auxiliary_rows()
        seeds[seed, own] = rows["train"].lengths.tolist()
    assert seeds[1, "null"] != seeds[2, "null"] and seeds[1, 5] == seeds[2, 5]


@pytest.mark.parametrize("criterion", ["masked_lm", "tartan_mt"])
def test_tapt_texts_are_those_of_the_training_rows(criterion, topics, tmp_path):
    """Unmasked, a batch is rows of the labelled set in [CLS0] ... [SEP], without labels."""
    run = build(topics, tmp_path, criterion, "task.batch_size=48")
    ((rows,),) = [batches_of(run)["auxiliary.tapt"][0]]
    texts = LabelledSet(topics / "topic", "train").inputs[0]
    vocabulary = run.task.vocabulary
    assert sorted(rows.samples.tolist()) == list(range(48))
    tokens = rows.tokens.clone()
    for row, (at, targets) in enumerate(zip(rows.positions, rows.targets)):
        tokens[row, at[targets >= 0]] = targets[targets >= 0]
    for row, sample in zip(tokens.tolist(), rows.samples.tolist()):
        kept = texts[sample].tolist()[:10]
        wanted = [vocabulary.cls(), *kept, vocabulary.sep]
        assert row == wanted + [vocabulary.pad] * (len(row) - len(wanted))
    assert rows.head == "lm" and (rows.targets >= 0).sum() > 20


@given(st.integers(1, 40), st.integers(1, 60), st.integers(0, 5))
@settings(max_examples=50, deadline=None)
def test_drawn_batches(count, size, number):
    """Different samples unless the set is too small; a pure function of its number."""
    order = Drawn(count, size, 1, "dev")
    batch = order.batch(number)
    assert len(batch) == size and 0 <= batch.min() and batch.max() < count
    assert (batch == Drawn(count, size, 1, "dev").batch(number)).all()
    if size <= count:
        assert len(set(batch.tolist())) == size


def test_each_drawn_batch_is_another():
    order = Drawn(100, 10, 1, "dev")
    seen = np.concatenate([order.batch(i) for i in range(1000)])
    assert abs(np.bincount(seen, minlength=100) - 100).max() < 50
    assert (order.batch(0) != order.batch(1)).any()
    with pytest.raises(UsageError, match="least 1 row"):
        Drawn(10, 0, 1, "dev")


def test_where_the_meta_head_and_the_meta_objective_get_their_rows(topics, tmp_path):
    """Meta head: train (paper) or dev (the authors' code); objective: dev in both."""
    for split in ("train", "dev"):
        more = [f"criterion.meta_head_split={split}", "task.dev_batch_size=5"]
        run = build(topics, tmp_path / split, "tartan_meta", *more)
        batches = batches_of(run)
        sets = {name: LabelledSet(topics / "topic", name) for name in ("train", "valid")}
        for stream, source in (
            ("head", {"train": "train", "dev": "valid"}[split]),
            ("dev", "valid"),
        ):
            (rows,) = batches[stream][0]
            for sample, row in zip(rows.samples.tolist(), rows.tokens.tolist()):
                text = sets[source].inputs[0][sample].tolist()[:10]
                assert row[1 : len(text) + 1] == text
            assert rows.head == "meta"
        assert len(batches["dev"][0][0].samples) == 5


def test_padding_is_hidden_or_not(topics, tmp_path):
    """The authors' code gives no mask for padding (sheet B1): then scores follow the width."""
    for name in ("paper", "authors"):
        run = build(topics, tmp_path / name, "tartan_mt", f"task.fidelity={name}", *EXACT)
        batches = batches_of(run)
        for parts in batches.values():
            assert (parts[0][0].padding is None) == (name == "authors")
        ((rows,),) = batches["endtask"]
        wider_rows = rows.replace(
            tokens=F.pad(rows.tokens, (0, 1), value=run.task.vocabulary.pad),
            segments=None if rows.segments is None else F.pad(rows.segments, (0, 1)),
            layout=rows.layout.map(lambda padding: F.pad(padding, (0, 1), value=True)),
        )
        with torch.no_grad():
            wider, scores = scores_of(run.model, wider_rows), scores_of(run.model, rows)
        difference = (wider - scores).abs().amax(1)
        assert (difference > 1e-6).all() if name == "authors" else (difference < 1e-12).all()
