"""What an update is given: unlabelled rows and their masks, tasks, support and query rows."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from meta_pseudo_bench import CONFIGS, Bench
from scipy import stats
from torch.nn import functional as F

from metaseq_lm.core.config import section
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.loading import load_config
from metaseq_lm.methods.meta_pseudo_label.episodes import Labelled, UnlabelledRows
from metaseq_lm.tasks import Batches
from metaseq_lm.training.price import estimate_price

TWO = "task.labelled=[which_moon_10,which_moon_160]"
CLS = {name: 3 + n for n, name in enumerate(("unlabelled", "mlm", "first", "second"))}


def parts_of(bench: Bench) -> tuple[UnlabelledRows, Labelled]:
    """Return the two sources of the training streams."""
    streams = bench.task.build_streams("train")
    return streams["unlabelled"].collate, streams["support"].collate.func


def many(bench: Bench, updates: int) -> list[Batches]:
    return [bench.batches(update) for update in range(updates)]


def rows_of(batches: list[Batches], stream: str, name: str) -> torch.Tensor:
    """Return one entry of a stream's batches, all rows in one axis; narrow ones end in -1."""
    parts = [getattr(b[stream][0][0], name).flatten(0, 1) for b in batches]
    width = max(part.shape[1] for part in parts)
    return torch.cat([F.pad(part, (0, width - part.shape[1]), value=-1) for part in parts])


@pytest.fixture(scope="module")
def masked(even: Path) -> dict[str, torch.Tensor]:
    """Unlabelled rows of 300 updates: 4,800 rows of 34 tokens."""
    batches = many(Bench(even, "mlm", "task.reward_interval=0"), 300)
    names = ("original", "tokens", "positions", "targets")
    return {name: rows_of(batches, "unlabelled", name) for name in names}


def test_number_of_masks(masked):
    """0.15 * 34 = 5.1: five with probability .9, six with .1."""
    counts = Counter((masked["targets"] >= 0).sum(1).tolist())
    assert set(counts) == {5, 6}
    assert stats.binomtest(counts[6], 4_800, 0.1).pvalue > 1e-3


def test_masks_are_spread_evenly_without_replacement(masked):
    chosen = np.zeros(34)
    for at, targets in zip(masked["positions"].tolist(), masked["targets"].tolist()):
        mine = [p for p, t in zip(at, targets) if t >= 0]
        assert len(set(mine)) == len(mine)
        chosen[mine] += 1
    assert chosen[0] > 0 and chosen[33] > 0, "CLS and SEP are targets too"
    assert stats.chisquare(chosen).pvalue > 1e-3


def test_targets_and_what_stands_in_their_place(masked):
    original, tokens = masked["original"].clone(), masked["tokens"]
    assert (original[:, 0] == CLS["unlabelled"]).all()
    assert (tokens[:, 0] == CLS["mlm"]).all(), "CLS is never hidden"
    original[:, 0] = CLS["mlm"]
    counted = masked["targets"] >= 0
    row, column = torch.nonzero(counted, as_tuple=True)
    at = masked["positions"][row, column]
    assert torch.equal(masked["targets"][row, column], original[row, at])
    elsewhere = torch.ones_like(tokens, dtype=torch.bool)
    elsewhere[row, at] = False
    assert torch.equal(tokens[elsewhere], original[elsewhere])
    inner = at > 0
    put, was = tokens[row, at][inner], original[row, at][inner]
    kinds = [(put == 1).sum(), ((put != 1) & (put == was)).sum()]
    drawn = put[(put != 1) & (put != was)]
    total = len(put)
    # A random token is the old one with probability 1/375, too seldom to see here.
    wanted = np.array([0.8, 0.1, 0.1]) * total
    assert stats.chisquare([*kinds, len(drawn)], wanted).pvalue > 1e-3
    forbidden = {0, 1, *range(3, 33)}
    assert not forbidden & set(drawn.tolist())
    assert len(set(drawn.tolist())) > 300


def test_random_tokens(even):
    """Uniform over the vocabulary without [PAD], [MASK] and the task tokens; [SEP] may occur."""
    masking = Bench(even, "mlm").task.masking()
    assert masking.replacements.tolist() == [2, *range(33, 407)]
    assert masking.spared.size == 0
    assert (masking.rate, masking.random, masking.keep, masking.mask) == (0.15, 0.1, 0.1, 1)


def test_texts_count_by_their_length(ragged):
    """A token is drawn, and the text that holds it taken; the query's token is in another text."""
    unlabelled, _ = parts_of(Bench(ragged, "soft"))
    lengths = unlabelled.corpus.windows[np.arange(len(unlabelled.corpus))]
    assert lengths.min() < lengths.max()
    samples = np.arange(60_000)
    for draw in (unlabelled.draw, lambda s: unlabelled.draw_other(s, False)):
        counts = np.bincount(draw(samples), minlength=len(lengths))
        assert stats.chisquare(counts, 60_000 * lengths / lengths.sum()).pvalue > 1e-3
    support, query = (unlabelled.draw_other(samples, asked) for asked in (False, True))
    assert (support != query).all()
    # Given the support text, another one has its length's share of what is left.
    share = lengths / lengths.sum()
    wanted = sum(
        p * np.where(np.arange(len(share)) == i, 0, share / (1 - p)) for i, p in enumerate(share)
    )
    counts = np.bincount(query, minlength=len(lengths))
    assert stats.chisquare(counts, 60_000 * wanted).pvalue > 1e-3


def test_a_token_belongs_to_its_text(ragged):
    unlabelled, _ = parts_of(Bench(ragged, "mlm"))
    corpus = unlabelled.corpus
    owner = np.repeat(np.arange(len(corpus)), corpus.windows[np.arange(len(corpus))])
    assert np.array_equal(unlabelled.text_at(np.arange(len(owner))), owner)
    assert unlabelled.total == len(owner) == len(corpus.data.tokens)


def test_unlabelled_texts_are_uniform(even):
    unlabelled, _ = parts_of(Bench(even, "mlm"))
    texts = unlabelled.draw(np.arange(60_000))
    assert stats.chisquare(np.bincount(texts, minlength=300)).pvalue > 1e-3


def test_the_masked_task_is_half_of_the_tasks(even):
    _, labelled = parts_of(Bench(even, "soft", TWO))
    tasks = labelled.tasks_of(np.arange(0, 40_000, 4))
    counts = Counter(tasks.tolist())
    assert set(counts) == {-1, 0, 1}
    wanted = np.array([0.5, 0.25, 0.25]) * 10_000
    assert stats.chisquare([counts[k] for k in (-1, 0, 1)], wanted).pvalue > 1e-3
    # Successive draws are independent.
    table = np.zeros((3, 3))
    np.add.at(table, (tasks[:-1] + 1, tasks[1:] + 1), 1)
    assert stats.chi2_contingency(table).pvalue > 1e-3


@pytest.mark.parametrize(
    ("name", "options", "mlm"),
    [
        ("soft", [], True),
        ("hard", [], False),
        ("mlm", [], False),
        ("soft", ["task.include_mlm_task=false"], False),
        ("hard", ["task.include_mlm_task=true"], True),
    ],
)
def test_which_runs_have_the_masked_task(even, name, options, mlm):
    bench = Bench(even, name, TWO, "task.reward_interval=1", *options)
    batches = many(bench, 10)
    tasks = {*rows_of(batches, "support", "tokens")[:, 0].tolist()}
    assert tasks == {CLS["first"], CLS["second"]} | ({CLS["mlm"]} if mlm else set())


@pytest.mark.parametrize("per_task", [1, 2, 4, 16])
def test_a_task_lasts(even, per_task):
    bench = Bench(even, "soft", TWO, f"task.samples_per_task={per_task}")
    batches = many(bench, 40)
    tasks = rows_of(batches, "support", "tokens")[:, 0]
    assert torch.equal(tasks, rows_of(batches, "query", "tokens")[:, 0]), "one task for both"
    runs = tasks.view(-1, per_task)
    assert (runs == runs[:, :1]).all()
    changes = (runs[1:, 0] != runs[:-1, 0]).double().mean()
    # Three tasks with 1/2, 1/4, 1/4 differ from one draw to the next with probability 5/8.
    assert abs(changes - 0.625) < 4 * (0.625 * 0.375 / len(runs)) ** 0.5


def test_support_and_query_rows_differ(even):
    _, labelled = parts_of(Bench(even, "hard"))
    samples = np.arange(40_000)
    support = labelled.pick(samples, 10, False, "set 0")
    query = labelled.pick(samples, 10, True, "set 0")
    assert (support != query).all()
    pairs = np.zeros((10, 10))
    np.add.at(pairs, (support, query), 1)
    off = ~np.eye(10, dtype=bool)
    assert pairs[~off].sum() == 0
    assert stats.chisquare(pairs[off]).pvalue > 1e-3


def test_support_and_query_texts_differ(even):
    """Element-wise, in the batches themselves, of labelled rows and of masked text."""
    bench = Bench(even, "soft", "task.labelled=[which_moon_160]")
    points = bench.task.build_streams("train")["support"].collate.func.sets[0]
    rows, _, _ = points.rows(np.arange(160))
    twice = {r for r, n in Counter(map(tuple, rows[:, 1:3].tolist())).items() if n > 1}
    batches = many(bench, 100)
    tokens = {name: rows_of(batches, name, "tokens").tolist() for name in ("support", "query")}
    seen: Counter[int] = Counter()
    for one, other in zip(tokens["support"], tokens["query"]):
        kind = one[0]
        seen[kind] += 1
        same = sum(a == b for a, b in zip(one[1:33], other[1:33]))
        if kind == CLS["mlm"]:
            assert same < 25, "two masked forms of one text"
        elif tuple(one[1:3]) not in twice:
            assert one[1:3] != other[1:3]
    assert min(seen.values()) > 400


def test_labelled_rows_of_an_update(ragged):
    """Every position of a labelled row is a target of its label token, padding is not."""
    bench = Bench(ragged, "hard", "task.labelled=[which_moon_10,pairs]", "task.samples_per_task=1")
    for update in range(10):
        for name in ("support", "query"):
            (batch,) = bench.batches(update)[name][0]
            sizes = torch.zeros(4, dtype=torch.long)
            for c in range(4):
                for b in range(4):
                    tokens, padding = batch.tokens[c, b], batch.padding[c, b]
                    length = int((tokens != 0).sum())
                    sizes[c] += length
                    assert padding.tolist() == [at >= length for at in range(len(tokens))]
                    targets = batch.targets[c, b]
                    counted = targets >= 0
                    assert batch.positions[c, b][counted].tolist() == list(range(length))
                    (label,) = set(targets[counted].tolist())
                    assert label in (2, int(tokens[0]), 1)
                    assert tokens[length - 1] == 2
            assert torch.equal(batch.sizes["targets"], sizes)


def test_masked_rows_as_a_task(even):
    """Loss at masked positions only, or everywhere towards [PAD] as in the authors' code."""
    found = {}
    for mask in ("y", "x"):
        bench = Bench(even, "soft", f"task.mlm_label_mask={mask}", "task.samples_per_task=16")
        update = next(
            u for u in range(20) if bench.batches(u)["support"][0][0].tokens[0, 0, 0] == 4
        )
        (found[mask],) = bench.batches(update)["support"][0]
    assert torch.equal(found["x"].tokens, found["y"].tokens)
    for c in range(4):
        for b in range(4):
            y, x = (
                {
                    p.item(): t.item()
                    for p, t in zip(found[m].positions[c, b], found[m].targets[c, b])
                    if t >= 0
                }
                for m in "yx"
            )
            assert len(y) in (5, 6) and len(x) == 34
            assert x == {at: y.get(at, 0) for at in range(34)}


def test_support_and_query_texts_are_masked_apart(even):
    _, labelled = parts_of(Bench(even, "soft"))
    samples = np.arange(400)
    chosen = [np.sort(labelled.mlm_rows(samples, query)[2][:, :5]) for query in (False, True)]
    # Two draws of five positions out of 34 hardly ever agree.
    assert (chosen[0] == chosen[1]).all(1).mean() < 0.02


def test_batches_are_a_function_of_the_update(even):
    one, other = (Bench(even, "soft", TWO) for _ in range(2))
    list(map(one.batches, range(5)))
    a, b = one.batches(7), other.batches(7)
    for name in ("unlabelled", "support", "query"):
        for key in ("tokens", "positions", "targets"):
            assert torch.equal(getattr(a[name][0][0], key), getattr(b[name][0][0], key))
    again = other.batches(8)["unlabelled"][0][0].original
    assert not torch.equal(a["unlabelled"][0][0].original, again)


def test_reward_is_logged_every_thousand_samples(even):
    """16 samples an update: after 63 updates (1,008), 125 (2,000), 188 (3,008)."""
    bench = Bench(even, "mlm")
    assert [u + 1 for u in range(200) if bench.task.reward_due(u)] == [63, 125, 188]
    assert bench.task.needs(62)["support"] == 1 and bench.task.needs(61)["support"] == 0
    off = Bench(even, "mlm", "task.reward_interval=0")
    assert not any(off.task.reward_due(u) for u in range(200))
    logs = Bench(even, "mlm", "task.reward_interval=16").update(0)
    assert -1 <= logs["reward"] <= 1 and "query" in logs


def test_the_price_of_masked_lm_counts_its_rewards(even):
    """16 of 1,000 samples make an update with a reward; a dry run makes one of each kind."""
    rewarded, plain = {"unlabelled": 1, "support": 1, "query": 1}, {"unlabelled": 1}
    plain |= {"support": 0, "query": 0}
    assert Bench(even, "mlm").task.kinds() == [(0.984, plain), (0.016, rewarded)]
    assert Bench(even, "mlm", "task.reward_interval=0").task.kinds() == [(1.0, plain)]
    assert Bench(even, "mlm", "task.reward_interval=4").task.kinds() == [(1.0, rewarded)]
    assert Bench(even, "hard").task.kinds() == [(1.0, rewarded)]
    every = [price(even, interval) for interval in (16, 32, 0)]
    assert every[0] > 1.05 * every[2] and every[1] == pytest.approx((every[0] + every[2]) / 2)


def price(data: Path, interval: int) -> float:
    """Return the FLOPs of an update of masked_lm by a dry run."""
    given = [f"data={data}", f"task.reward_interval={interval}", "trainer.valid_split=''"]
    return estimate_price(load_config(given, str(CONFIGS), "mlm")).flops


@pytest.mark.parametrize(
    "name", ["batches_per_update", "samples_per_task", "copies_at_once", "pairs", "reward_interval"]
)
def test_counts_are_checked(name):
    options = {"batches_per_update": 1, "samples_per_task": 1, "copies_at_once": 0, "pairs": 0}
    options["reward_interval"] = 0
    section("task", "meta_pseudo_label", **options)
    with pytest.raises(UsageError, match=f"task.{name} .*at least"):
        section("task", "meta_pseudo_label", **options | {name: options[name] - 1})


@pytest.mark.parametrize(
    "objective, option, words",
    [
        ("hard", "task.mlm_label_mask=Y", "task.mlm_label_mask is 'Y'. Choices: y, x"),
        ("hard", "task.labelled=[yes,yes]", "different labelled sets"),
        ("hard", "criterion.inner_clip_norm=-5", "criterion.inner_clip_norm .*at least 0"),
        ("soft", "criterion.inner_lr=-1", "criterion.inner_lr .*at least 0"),
        ("soft", "criterion.difference_step=0", "criterion.difference_step .*above 0"),
    ],
)
def test_values_that_turn_or_change_the_objective(even, objective, option, words):
    more = ["criterion.hypergradient=finite_difference"] if objective == "soft" else []
    with pytest.raises(UsageError, match=words):
        Bench(even, objective, *more, option)
