"""Published recipes: they train, and draw and weigh as their authors do."""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_data
import torch
from markdown_blocks import ROOT
from published_masks import gpt_bert_spans, t5_noise
from torch import Tensor, nn

from metaseq_lm.cli import main
from metaseq_lm.core.batch import Batch
from metaseq_lm.core.config import FOLDER, RunConfig, build
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.loading import _recipe_names, config_file, load_config
from metaseq_lm.data.corpus.mixture import MixtureBatch
from metaseq_lm.data.streams import Shard
from metaseq_lm.forward.passes import weighted_loss
from metaseq_lm.methods.span_corruption.corruption import Corruption
from metaseq_lm.methods.span_corruption.task import _denoisers_of
from metaseq_lm.tasks import Task
from metaseq_lm.training.parts import build_parts, build_task, prepare_config

NAMES = _recipe_names()
SMALL = [
    *("model.encoder_layers=2", "model.encoder_embed_dim=8", "model.encoder_ffn_embed_dim=16"),
    *("model.encoder_attention_heads=2", "model.max_positions=64"),
    *("task.tokens_per_sample=34", "task.batch_size=16"),
    *("engine.tensorboard=false", "engine.threads=1"),
]
# What a small corpus and a small net need besides.
MORE = {
    "recipes/gpt_bert": ["task.tokens_per_sample=32", "task.row_lengths=[8,16,32]"],
    "recipes/t5": ["task.inputs_length=0", "task.tokens_per_sample=20"],
    "recipes/ul2": ["task.inputs_length=0", "task.tokens_per_sample=20"],
    "recipes/bert": ["model.token_embed_dim=0", "task.row_lengths=[28,34]"],
    "recipes/electra": ["model.token_embed_dim=0", "model.generator_size=0.5"],
}
PAIRS = ("recipes/bert", "recipes/electra")  # of segments, which documents are packed into
ROWS = 64
ONE_LENGTH = ["task.row_lengths=[]", "task.length_phases=[]"]


def options_of(name: str, data: Path) -> list[str]:
    """Return the options that scale a recipe down, and its data."""
    folder = small_data.ensure(data, "documents") if name in PAIRS else data
    return [*SMALL, *MORE.get(name, []), f"data={folder}"]


def recipe(name: str, *more: str) -> RunConfig:
    return load_config(list(more), *config_file(name))


def task_of(name: str, data: Path, *more: str) -> Task:
    rows = [f"task.batch_size={ROWS}", *more]
    return build_task(prepare_config(recipe(name, *options_of(name, data), *rows)))


def batches(task: Task, update: int, count: int, split: str = "train") -> Iterator[Batch]:
    """Yield the batches of an update with so many numbers of batches."""
    stream = task.build_streams(split)[split].at_update(update)
    for number in range(count):
        yield from stream.micro_batches(number, Shard())


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_trains(name, moons, tmp_path):
    _, *options, data = options_of(name, moons)
    run = tmp_path / "run"
    flags = ["--config", name, "--save-dir", str(run), "--max-update", "2", SMALL[0]]
    assert main(["train", data.removeprefix("data="), *flags, *options]) == 0
    results = json.loads((run / "results.json").read_text())
    assert results["status"] == "finished" and results["updates"] == 2
    assert math.isfinite(results["metrics"]["valid"]["loss"])


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_says_its_source_and_what_differs(name):
    comment = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8").split("defaults:")[0]
    assert all(line.startswith("#") for line in comment.strip().split("\n"))
    for part in ("Source: arXiv", "As published:", "What differs, and why:"):
        assert part in comment
    page = (ROOT / "docs/how_to/recipes.md").read_text(encoding="utf-8")
    assert page.count(f"| `{name}` |") == 1


def test_the_model_of_a_recipe_can_be_another():
    config = recipe("recipes/gpt_bert", "model=modern_nano", "trainer.max_update=100")
    assert config.model.encoder_embed_dim == 64 and config.model.attention_dropout == 0.0
    assert config.schedule.total_updates == 100 and config.optimizer._name == "lamb"


def test_a_file_is_a_recipe_of_ones_own(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("defaults:\n  - base\n  - _self_\ntask:\n  mask_prob: 0.25\n")
    assert recipe(str(file)).task.mask_prob == 0.25
    for name, fact in {
        "recipes/brt": "Did you mean 'recipes/bert'",
        str(tmp_path): "no such",
    }.items():
        with pytest.raises(UsageError, match=fact):
            config_file(name)
    flags = ["--config", "recipes/bert", "--config-dir", str(tmp_path)]
    assert main(["train", "--print-config", *flags]) == 2


def test_a_sweep_takes_a_recipe(moons, tmp_path, capsys):
    flags = ["--config", "recipes/gpt_bert", "--out", str(tmp_path / "sweep"), "--dry-run"]
    options = options_of("recipes/gpt_bert", moons)[:-1]
    assert main(["sweep", str(moons), *flags, *options, "--grid", "optimizer.lr=1e-2,1e-3"]) == 0
    text = capsys.readouterr().out
    assert text.count("--config-name gpt_bert") == text.count("config/recipes") == 2


def test_list_has_the_recipes(capsys):
    assert main(["list", "recipes"]) == 0
    assert re.findall(r"^  (\S+)", capsys.readouterr().out, re.M) == NAMES


# ---------------------------------------------------------------- what is drawn


def chosen_tokens(task: Task, update: int, count: int, split: str = "train") -> dict[str, float]:
    """Return shares: targets among tokens that can be, and [MASK], the token itself and others
    among targets.
    """
    vocabulary: Any = task.vocabulary
    kinds, candidates = np.zeros(3), 0
    for batch in batches(task, update, count, split):
        inner: Any = batch.batch if isinstance(batch, MixtureBatch) else batch
        if isinstance(batch, MixtureBatch) and batch.objective != "masked_next_token":
            continue
        read = getattr(inner, "masked", inner.tokens)
        targets = inner.targets
        if hasattr(inner, "sources"):
            at = inner.sources[targets >= 0] + 1
            read, targets = read.flatten()[at], targets[targets >= 0]
        else:
            read = read.gather(1, inner.positions)[targets >= 0]
            targets = targets[targets >= 0]
        is_mask, is_kept = read == vocabulary.mask, read == targets
        kinds += [int(x.sum()) for x in (is_mask, is_kept, ~is_mask & ~is_kept)]
        specials = torch.tensor([*vocabulary.specials])
        candidates += int((~torch.isin(inner.tokens, specials)).sum())
        if not hasattr(inner, "masked"):  # these stand in place of a token
            candidates += int(is_mask.sum())
    shares = kinds / kinds.sum()
    return {"chosen": kinds.sum() / candidates, **dict(zip(("mask", "kept", "other"), shares))}


def test_gpt_bert_divides_rows_and_losses(moons):
    """15 of 16 rows, and 15/16 of the loss, whatever the batch; batches grow from a quarter, but
    for the rows that become longer at .7 and .9 of the updates.
    """
    total, rows_at_first = 40, 256
    more = [f"task.batch_size={rows_at_first // 4}", f"trainer.max_update={total}"]
    task = task_of("recipes/gpt_bert", moons, *more)
    stream = task.build_streams("train")["train"]
    rows = {"masked_next_token": 0, "causal_lm": 0}
    for number in range(total):
        weights = {}
        count, widths = 0, set()
        for batch in stream.at_update(number).micro_batches(number, Shard()):
            assert isinstance(batch, MixtureBatch)
            rows[batch.objective] += len(batch.batch.tokens)
            weights[batch.objective] = batch.weight
            count += len(batch.batch.tokens)
            widths.add(batch.batch.tokens.shape[1])
        assert weights == {"masked_next_token": 15 / 16, "causal_lm": 1 / 16}
        done = number / total
        factor = 4 if done >= 0.9 else 2 if done >= 0.7 else 1
        final = rows_at_first // factor
        published = int(final / 4 * (1 - done) + final * done + 0.5)
        assert abs(count - published) <= 1
        assert widths == {8 * factor}
    assert rows["masked_next_token"] / sum(rows.values()) == pytest.approx(15 / 16, abs=0.003)


def test_gpt_bert_masks_as_published(moons):
    """The share falls from .3 to .15 by update; spans of 1 to 3 become [MASK], another or stay."""
    total, generator = 100, np.random.default_rng(3)
    more = [f"trainer.max_update={total}", "task.batch_warmup_ratio=0", *ONE_LENGTH]
    more.append("task.tokens_per_sample=34")
    task = task_of("recipes/gpt_bert", moons, *more)
    for update in (0, 50, 99):
        rate = 0.3 + (0.15 - 0.3) * update / total
        shares = chosen_tokens(task, update, 12)
        # Rows of 34 tokens hold one document or more.
        published = np.mean([gpt_bert_spans(30, rate, generator).mean() for _ in range(4000)])
        assert shares["chosen"] == pytest.approx(published, abs=0.012)
        assert shares["mask"] == pytest.approx(0.8, abs=0.03)
        assert shares["kept"] == pytest.approx(0.1, abs=0.03)
    masked: Any = task.tasks["masked_next_token"]  # type: ignore[attr-defined]
    assert masked.config.mask_prob == 0.15 and masked.config.random_token_prob == 0.1


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("recipes/gpt_bert", [(32768, 128), (16384, 256), (8192, 512)]),
        ("recipes/bert", [(256, 128), (256, 512)]),
        ("recipes/electra", [(128, 128)]),
    ],
)
def test_rows_and_their_length_are_those_published(name, published):
    phases = recipe(name).task.in_phases()
    assert [(own.batch_size, own.tokens_per_sample) for own in phases] == published


def test_modernbert_has_the_published_numbers_of_tokens():
    """In updates: batches grow by the same number of rows in as many updates each."""
    config = recipe("recipes/modernbert")
    task, schedule = config.task, config.schedule
    updates = np.arange(config.trainer.max_update)
    grown = np.minimum(1, updates / task.batch_warmup_updates)
    tokens = (768 + (4608 - 768) * grown).cumsum() * 1024
    decay = round(schedule.decay_ratio * len(updates))
    assert tokens[task.batch_warmup_updates - 1] == pytest.approx(50e9, rel=1e-3)
    assert tokens[schedule.warmup_updates - 1] == pytest.approx(3e9, rel=1e-3)
    assert tokens[-decay - 1] == pytest.approx(1.719e12, rel=1e-3)
    assert tokens[-1] - tokens[-decay - 1] == pytest.approx(50e9, rel=2e-3)
    assert config.task.in_phases()[0].batch_size * config.task.batch_start == pytest.approx(
        768, 1e-3
    )
    assert config.optimizer.lr * config.optimizer.weight_decay == pytest.approx(1e-5)
    assert config.model.global_theta == config.model.local_theta == 10_000


def test_gpt_bert_has_the_published_rates():
    config = recipe("recipes/gpt_bert")
    factor = build("schedule", config.schedule)
    for step, published in {125: 0.5, 250: 1.0, 7938: 0.55, 15_500: 0.05, 15_625: 0.0}.items():
        assert factor(step) == pytest.approx(published, abs=2e-3)
    assert config.trainer.average_decay == 0.999


@pytest.mark.parametrize(
    ("name", "update", "split", "published"),
    [
        # 80 % [MASK], 10 % others, 10 % themselves.
        ("recipes/modernbert", 0, "train", (0.3, 0.8, 0.1)),
        ("recipes/modernbert", 50, "train", (0.3, 0.8, 0.1)),
        ("recipes/modernbert", 0, "valid", (0.15, 0.8, 0.1)),
        ("recipes/bert", 0, "train", (0.15, 0.8, 0.1)),
        # 85 % [MASK], the others stay (the code).
        ("recipes/electra", 0, "train", (0.15, 0.85, 0.15)),
    ],
)
def test_masked_tokens_are_those_published(name, update, split, published, moons):
    more = ["task.batch_warmup_updates=0"] if name == "recipes/modernbert" else []
    task = task_of(name, moons, *more)
    count = 1 if split == "valid" else 16
    if name in PAIRS:  # the authors count [CLS] and [SEP], too
        for batch in batches(task, update, 2):
            targets = batch.targets  # type: ignore[attr-defined]
            lengths = (batch.tokens != task.vocabulary.pad).sum(1)  # type: ignore[attr-defined]
            numbers = [max(1, round(0.15 * n)) for n in lengths.tolist()]
            assert (targets >= 0).sum(1).tolist() == numbers
    shares = chosen_tokens(task, update, count, split)
    chosen, mask, kept = published
    if name not in PAIRS:
        assert shares["chosen"] == pytest.approx(chosen, abs=0.02)
    assert shares["mask"] == pytest.approx(mask, abs=0.05 if split == "valid" else 0.025)
    assert shares["kept"] == pytest.approx(kept, abs=0.05 if split == "valid" else 0.025)
    if name == "recipes/electra":
        assert shares["other"] == 0


def test_mdlm_draws_times_in_cells(moons):
    """One time in each cell; a token is masked with (1 - 0.001) t and weighs 1 / t."""
    task: Any = task_of("recipes/mdlm", moons)
    specials, excess = torch.tensor([*task.vocabulary.specials]), []
    for batch in batches(task, 0, 24):
        drawn: Any = batch
        rows, length = drawn.tokens.shape  # fewer rows in the last batch of an epoch
        is_target = drawn.targets >= 0
        row = drawn.sources[is_target] // length
        masked = np.bincount(row.numpy(), minlength=rows)
        weights = np.zeros(rows)
        weights[row.numpy()] = drawn.weights[is_target].numpy()
        times = 1 / weights[masked > 0]
        cells = np.floor((times - 1e-3) / (1 - 1e-3) * rows - 1e-9)
        assert len(set(cells)) == len(cells)
        count = masked + (~torch.isin(drawn.tokens, specials)).sum(1).numpy()
        errors = (masked / count)[masked > 0] - (1 - 1e-3) * times
        excess += [*errors[times > 0.5]]  # of lower times rows without a mask are left out
    assert len(excess) > 700
    assert np.mean(excess) == pytest.approx(0.0, abs=4 * np.std(excess) / len(excess) ** 0.5)


def corrupted(name: str, rows: int, length: int) -> tuple[Any, np.ndarray, Corruption]:
    """Return texts of a length corrupted by a recipe, its denoisers' numbers, and how."""
    config = recipe(name)
    denoisers = _denoisers_of(config.task)
    corruption = Corruption(denoisers, 10_000 - np.arange(200), 1, 0, config.task.random_roll)
    keys = np.random.default_rng(4).integers(1 << 62, size=rows).astype(np.uint64)
    chosen = corruption.choose(keys)
    texts = np.tile(100 + np.arange(length), (rows, 1))
    return corruption(texts, np.full(rows, length), keys, chosen), chosen, corruption


def spans_of(inputs: np.ndarray, length: int) -> list[tuple[int, int]]:
    """Return begin and size of each span that is missing in the inputs of a text."""
    is_kept = np.zeros(length, bool)
    is_kept[inputs[(inputs >= 100) & (inputs < 100 + length)] - 100] = True
    edges = np.flatnonzero(np.diff(np.pad(~is_kept, 1).astype(int)))
    return [*zip(edges[::2], edges[1::2] - edges[::2])]


def test_t5_cuts_texts_as_published():
    """Inputs of 512 tokens, targets of 114; 28 spans, whose sizes are those of a random cut."""
    assert prepare_config(recipe("recipes/t5", "data=.")).task.tokens_per_sample == 568 + 2
    rows, _, _ = corrupted("recipes/t5", 300, 568)
    assert set(rows.input_lengths) == {512} and set(rows.target_lengths) == {114}
    sizes = []
    for inputs in rows.inputs:
        spans = spans_of(inputs, 568)
        assert len(spans) == 28 and sum(size for _, size in spans) == 85
        assert spans[-1][0] + spans[-1][1] == 568 and spans[0][0] > 0
        sizes += [size for _, size in spans]
    generator = np.random.default_rng(5)
    published = [size for _ in range(300) for size in t5_noise(568, 0.15, 3.0, generator)[1::2]]
    for size in range(1, 7):
        ours, theirs = (np.mean(np.array(x) == size) for x in (sizes, published))
        assert ours == pytest.approx(theirs, abs=0.015)


UL2 = {
    # Mode, noise and spans of texts of 568 tokens.
    0: ("R", 85, 28),
    1: ("R", 85, 11),
    2: ("S", 142, 1),
    3: ("X", 284, 95),
    4: ("X", 284, 36),
    5: ("X", 85, 1),
    6: ("X", 284, 4),
}


def test_ul2_mixes_its_seven_denoisers():
    """Alike likely; R and X by density and span, S the end; single spans lie anywhere."""
    assert prepare_config(recipe("recipes/ul2", "data=.")).task.tokens_per_sample == 568 + 2
    rows, chosen, corruption = corrupted("recipes/ul2", 2100, 568)
    np.testing.assert_allclose(np.bincount(chosen) / 2100, 1 / 7, atol=0.03)
    begins = []
    for inputs, number in zip(rows.inputs, chosen):
        mode, noise, count = UL2[int(number)]
        spans = spans_of(inputs, 568)
        assert corruption.denoisers[number].mode == mode
        assert sum(size for _, size in spans) == noise
        if mode == "S":
            assert spans == [(568 - noise, noise)]
        else:
            # A turned text may begin and end with a part of the rest, or with spans that touch.
            assert count - 1 <= len(spans) <= count
        if number == 5:
            begins.append(spans[0][0] / (568 - noise))
    assert np.mean(begins) == pytest.approx(0.5, abs=0.07)
    assert np.std(begins) == pytest.approx(12**-0.5, abs=0.04)


def test_next_sentences_are_half_of_berts_pairs(moons):
    task = task_of("recipes/bert", moons, *ONE_LENGTH)
    drawn: list[Any] = list(batches(task, 0, 20))
    labels = torch.cat([batch.next_sentence for batch in drawn])
    assert float(labels.double().mean()) == pytest.approx(0.5, abs=0.06)


# ---------------------------------------------------------------- losses


def with_constant_logits(model: nn.Module) -> dict[str, Tensor]:
    """Make the outputs of all heads the same everywhere: set every weight to 0 but biases of LM
    heads, which are returned by the name of the head.
    """
    generator, biases = torch.Generator().manual_seed(6), {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.zero_()
            if re.fullmatch(r"(generator\.head|heads\.lm)\.bias", name):
                parameter.copy_(
                    torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                )
                biases[name] = parameter.detach()
    return biases


def mean_nll(bias: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss of targets, -1 for none, where the logits are `bias` (V,)."""
    targets = targets[targets >= 0]
    return (bias.logsumexp(0) - bias[targets]).mean()


@pytest.mark.parametrize("name", NAMES)
def test_the_loss_of_constant_logits(name, moons):
    """By its closed form, with the recipe's weights: in training, with its z-loss."""
    more = ["engine.precision=fp64", "task.batch_size=32"]
    config = prepare_config(recipe(name, *options_of(name, moons), *more, "trainer.max_update=9"))
    parts = build_parts(config, dry_run=True)
    ((key, bias),) = with_constant_logits(parts.model).items()
    parts.model.train()
    stream = parts.task.build_streams("train")["train"].at_update(0)
    terms: dict[str, Any] = {}
    sizes: dict[str, Any] = {}
    expected = torch.zeros((), dtype=torch.float64)
    z = 1e-4 * bias.logsumexp(0) ** 2
    for batch in parts.engine.to_device(stream.micro_batches(0, Shard())):
        terms |= parts.task.criterion(parts.model, batch)
        sizes |= batch.sizes
        inner: Any = batch.batch if isinstance(batch, MixtureBatch) else batch
        if name == "recipes/gpt_bert":
            targets = inner.targets
            if batch.objective == "causal_lm":
                targets = inner.tokens.masked_fill(inner.layout.padding_of(inner.tokens), -1)
                targets = targets.masked_fill(first_of_documents(inner), -1)
            share = {"masked_next_token": 15, "causal_lm": 1}[batch.objective] / 16
            expected = expected + share * (mean_nll(bias, targets) + z)
        elif name == "recipes/mdlm":
            is_other = torch.arange(len(bias)) != parts.task.vocabulary.mask
            losses = bias[is_other].logsumexp(0) - bias[inner.targets.clamp(min=0)]
            weighted = losses * inner.weights * (inner.targets >= 0)
            expected = weighted.sum() / inner.sizes["tokens"]
        else:
            expected = mean_nll(bias, inner.targets)
            expected = expected + {
                "recipes/t5": float(z),
                "recipes/bert": math.log(2),  # the next sentence
                "recipes/electra": 50 * math.log(2),  # the discriminator
            }.get(name, 0.0)
    loss = weighted_loss(terms, sizes, {}).detach()
    assert float(loss) == pytest.approx(float(expected), rel=1e-10)


def first_of_documents(batch: Any) -> Tensor:
    """Return which tokens (B, S) begin a row or a document, which nothing predicts."""
    is_first = torch.zeros(batch.tokens.shape, dtype=torch.bool)
    is_first[:, 0] = True
    if batch.layout.documents is not None:
        documents = batch.layout.documents
        is_first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return is_first
