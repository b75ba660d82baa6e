"""Facts of the Two Moons experiment: sizes, settings, data (paper section 4.2, tables 4 to 6)."""

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from imported import imported
from meta_pseudo_bench import CONFIGS, Bench
from meta_pseudo_data import preprocess

from metaseq_lm import plugins
from metaseq_lm.core.config import RunConfig
from metaseq_lm.core.loading import load_config
from metaseq_lm.data.corpus.rows import Corpus
from metaseq_lm.data.labelled.sets import LabelledSet
from metaseq_lm.data.tokenizers.loading import load_tokenizer
from metaseq_lm.data.tokenizers.vocabulary import Vocabulary, special_symbols
from metaseq_lm.methods.meta_pseudo_label.model import build_pair
from metaseq_lm.optim import build_optimizer

FIRST_LINE = (
    "10 39 11 42 23 40 24 36 26 30 36 36 36 37 36 45 37 9 37 14 39 32 40 14 48 17 50 19 55 14 57 35"
)


def configured(name: str, *overrides: str) -> RunConfig:
    plugins.load_all()
    return load_config(list(overrides), str(CONFIGS), name)


def vocabulary_of(size: int) -> Vocabulary:
    specials = special_symbols()
    return Vocabulary(specials + [f"w{i}" for i in range(size - len(specials))])


def counts(config: RunConfig, size: int) -> dict[str, int]:
    with torch.device("meta"):
        pair = build_pair(config, vocabulary_of(size))
    return {name: sum(p.numel() for p in net.parameters()) for name, net in pair.items()}


def test_parameter_counts() -> None:
    moons = configured("soft")
    assert counts(moons, 407) == {"student": 5_783, "teacher": 12_790}
    assert counts(moons, 512) == {"student": 6_728, "teacher": 15_520}
    sizes = {"layers": 6, "embed_dim": 256, "ffn_embed_dim": 1024, "attention_heads": 4}
    options = [f"model.encoder_{name}={size}" for name, size in sizes.items()]
    large = configured("soft", *options, "model.max_positions=128")
    assert counts(large, 30_000) == {"student": 12_548_144, "teacher": 28_004_448}


@pytest.mark.parametrize("name", ["mlm", "soft", "hard", "soft_fixed_y"])
def test_settings_of_pretraining(name: str) -> None:
    """Tables 4 and 5."""
    config = configured(name)
    model, task, optimizer = config.model, config.task, config.optimizer
    sizes = (model.encoder_layers, model.encoder_embed_dim, model.encoder_ffn_embed_dim)
    assert (*sizes, model.encoder_attention_heads, model.max_positions) == (2, 8, 32, 2, 34)
    rates = (model.dropout, model.attention_dropout, model.activation_dropout)
    assert rates == (0.1, 0.1, 0.0) and model.encoder_normalize_before
    assert (task.batch_size, task.batches_per_update, task.samples_per_task) == (4, 4, 4)
    masks = (task.mask_prob, task.random_token_prob, task.leave_unmasked_prob)
    assert masks == (0.15, 0.1, 0.1) and task.mlm_label_mask == "y"
    assert task.tokens_per_sample == 34 and task.valid_size == 128 and not task.include_mlm_task
    assert (optimizer._name, optimizer.lr, optimizer.clip_norm) == ("adamw", 0.08, 5.0)
    assert (list(optimizer.betas), optimizer.eps, optimizer.weight_decay) == (
        [0.9, 0.98],
        1e-6,
        0.01,
    )
    assert optimizer.decay_norms_and_biases
    assert (config.schedule._name, config.schedule.warmup_updates) == ("inverse_sqrt", 1000)
    assert not config.schedule.lr_is_peak
    assert config.trainer.max_update == 40_000
    if name != "mlm":
        criterion = config.criterion
        assert criterion.meta_weight == (1.0 if name == "hard" else 100.0)
        assert (criterion.inner_steps, criterion.inner_lr) == (1, 0.1)
    if name.startswith("soft"):
        assert config.criterion.fixed_y == (name == "soft_fixed_y")
        steps = (config.criterion.pretrain_step, config.criterion.finetune_step)
        assert steps == ("adamw", "sgd") and config.criterion.hypergradient == "exact"
    if name == "hard":
        assert (config.criterion.reward, config.criterion.inner_clip_norm) == ("cosine", 5.0)


def test_settings_of_finetuning() -> None:
    """Table 6."""
    config = configured("finetune")
    assert not config.schedule.lr_is_peak
    optimizer = config.optimizer
    assert (optimizer._name, optimizer.lr, optimizer.clip_norm) == ("adamw", 0.04, 5.0)
    assert (optimizer.weight_decay, list(optimizer.betas)) == (0.01, [0.9, 0.98])
    assert optimizer.eps == 1e-6 and config.schedule.warmup_updates == 10
    assert config.trainer.best_checkpoint_metric == "accuracy"
    assert config.trainer.maximize_best_checkpoint_metric


@pytest.mark.parametrize(
    ("base", "warmup", "wanted"),
    [
        (0.08, 1000, {1: 2.530e-6, 500: 1.265e-3, 1000: 2.530e-3, 4000: 1.265e-3, 40000: 4.0e-4}),
        (0.08, 10000, {1: 8.0e-8, 10000: 8.0e-4, 40000: 4.0e-4, 93750: 2.613e-4}),
        (0.04, 10, {1: 1.265e-3, 10: 1.265e-2, 1000: 1.265e-3}),
    ],
)
def test_learning_rates(base: float, warmup: int, wanted: dict[int, float]) -> None:
    config = configured("mlm", f"optimizer.lr={base}", f"schedule.warmup_updates={warmup}")
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = build_optimizer([("w", weight)], config.optimizer, config.schedule)
    for number, rate in wanted.items():
        optimizer.updates = number - 1
        assert optimizer.lr == pytest.approx(rate, rel=3e-4)
        weight.grad = torch.ones(1)
        optimizer.step()
        assert optimizer.inner.param_groups[0]["lr"] == pytest.approx(rate, rel=3e-4)


def test_vocabulary_saturates(even: Path) -> None:
    """Numbers alone are one token each with and without a space before: 407 symbols in all."""
    vocabulary, tokenizer = Vocabulary.load(even / "dict.txt"), load_tokenizer(even)
    assert len(vocabulary) == 407
    wanted = ["[PAD]", "[MASK]", "[SEP]", *(f"[CLS{n}]" for n in range(30))]
    assert vocabulary.symbols[:33] == wanted
    for number in range(64):
        ids, sizes = tokenizer.encode_packed([f"{number} {number}"])
        assert list(sizes) == [2]
        assert [vocabulary.symbols[i] for i in ids] == [str(number), f"Ġ{number}"]


def test_a_line_is_34_tokens(even: Path) -> None:
    bench = Bench(even, "mlm")
    corpus = bench.task.corpus("train")
    rows, lengths = corpus.rows(np.arange(300))
    assert rows.shape == (300, 34) and (lengths == 34).all()
    assert (rows[:, 0] == 3).all() and (rows[:, -1] == 2).all() and (rows[:, 1:-1] >= 33).all()


@pytest.fixture(scope="session")
def generator() -> ModuleType:
    return imported(CONFIGS.parent / "two_moons.py")


def test_grid(generator: ModuleType) -> None:
    corners = np.array([[-1.5, -1.0], [2.5, 1.5], [-9.0, 9.0], [0.5, 0.25], [-1.5 + 4 / 63.98, 0]])
    found = generator.discretise(corners).tolist()
    assert found == [[0, 0], [63, 63], [0, 63], [31, 31], [1, 25]]


def test_points_are_sorted_within_their_line(generator: ModuleType) -> None:
    points = np.random.default_rng(0).integers(0, 64, (48, 2))
    lines = generator.lines(points)
    assert len(lines) == 3
    for number, line in enumerate(lines):
        values = list(map(int, line.split()))
        found = list(zip(values[::2], values[1::2]))
        assert found == sorted(found)
        assert sorted(map(tuple, points[16 * number : 16 * number + 16].tolist())) == found


@pytest.mark.slow
def test_the_whole_data(generator: ModuleType, tmp_path: Path) -> None:
    text, data = tmp_path / "text", tmp_path / "data"
    generator.main(text)
    train = (text / "train.txt").read_text().splitlines()
    assert len(train) == 32_000 and train[0] == FIRST_LINE
    assert len((text / "valid.txt").read_text().splitlines()) == 1_000
    preprocess(
        *("--trainpref", f"{text}/train.txt", "--validpref", f"{text}/valid.txt"),
        *("--tokenizer-corpus", f"{text}/tokenizer.txt", "--vocab-size", "512"),
        *("--destdir", str(data)),
    )
    for count in (10, 20, 40, 80, 160):
        place = text / f"which_moon_{count}"
        lines = (place / "train.tsv").read_text().splitlines()[1:]
        assert len(lines) == count
        if count == 160:
            assert lines[:3] == ["35 45\t0", "8 36\t0", "22 56\t0"]
        preprocess(
            *("--labelled", place.name, "--trainpref", f"{place}/train.tsv"),
            *("--validpref", f"{place}/valid.tsv", "--testpref", f"{place}/test.tsv"),
            *("--split", f"vis={place}/vis.tsv", "--destdir", str(data)),
        )
        sets = {s: LabelledSet(data / place.name, s) for s in ("train", "valid", "test", "vis")}
        sizes = {split: len(labelled) for split, labelled in sets.items()}
        assert sizes == {"train": count, "valid": count, "test": 1_000, "vis": 4_096}
        assert all(sets[s].labels.sum() == count / 2 for s in ("train", "valid"))
    vocabulary, tokenizer = Vocabulary.load(data / "dict.txt"), load_tokenizer(data)
    assert len(vocabulary) == 407
    ids = [vocabulary.symbols.index(s) for s in ("6", "Ġ24")]
    assert list(tokenizer.encode_packed(["6 24"])[0]) == ids
    corpus = Corpus(data, "train", vocabulary, 34, "eos")
    rows, lengths = corpus.rows(np.arange(len(corpus)))
    assert rows.shape == (32_000, 34) and (lengths == 34).all()
    first = ["[CLS0]", *FIRST_LINE.split(), "[SEP]"]
    assert [vocabulary.symbols[i].removeprefix("Ġ") for i in rows[0]] == first
