"""The task: what a batch holds, cuts of the batch, two-stage training, on rows of all lengths."""

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from metaseq_lm.cli import main
from metaseq_lm.core.errors import UsageError
from metaseq_lm.core.loading import load_config
from metaseq_lm.data.streams import Shard
from metaseq_lm.methods.electra.data import ElectraBatch
from metaseq_lm.runs import checkpoint, manifests
from metaseq_lm.training.run import TrainingRun

WORDS = [f"w{i}" for i in range(12)]
SIZES = """
    model.encoder_layers=1 model.encoder_embed_dim=8 model.encoder_ffn_embed_dim=32
    model.max_positions=32 engine.threads=1 engine.precision=fp64 engine.tensorboard=false
    schedule.warmup_updates=2 optimizer.eps=1e-4
""".split()
ROWS = ["task.batch_size=8", "task.tokens_per_sample=32", "task.sample_break_mode=eos"]
SILENT = "trainer.valid_split=''"
TASK = [SILENT, "task=electra", "model=electra", *ROWS, *SIZES]


@pytest.fixture(scope="module")
def ragged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of lines of 1 to 20 words, one in ten words unknown; some lines of those only."""
    folder, rng = tmp_path_factory.mktemp("ragged"), random.Random(2)
    lines = [" ".join(rng.choices(WORDS, k=rng.randint(1, 20))) for _ in range(80)]
    rare = [
        " ".join(w if rng.random() < 0.9 else f"r{rng.random()}" for w in x.split()) for x in lines
    ]
    rare[3] = rare[4] = "unknown1 unknown2"
    (folder / "learn.txt").write_text("\n".join(lines))
    (folder / "train.txt").write_text("\n".join(rare))
    (folder / "valid.txt").write_text("\n".join(lines[:20]))
    command = ["preprocess", "--tokenizer", "word", "--destdir", str(folder / "data")]
    for name, key in (
        ("learn", "tokenizer-corpus"),
        ("train", "trainpref"),
        ("valid", "validpref"),
    ):
        command += [f"--{key}", str(folder / f"{name}.txt")]
    assert main(command) == 0
    return folder / "data"


def run_of(data: Path, place: Path, *options: str) -> TrainingRun:
    return TrainingRun(load_config([*TASK, *options, f"data={data}", f"save_dir={place}"]))


def batches(run: TrainingRun, number: int = 0, rows: int = 0) -> list[ElectraBatch]:
    stream = run.task.build_streams("train")["train"]
    return stream.micro_batches(number, Shard(0, 1, rows))


def test_a_batch_holds_what_the_losses_need(ragged, tmp_path):
    run = run_of(ragged, tmp_path, "criterion=electra_rtd", "criterion.disc_positions=random")
    specials = {0, 1, 2, *range(3, 3 + 30)}
    subset = real = 0
    for number in range(6):
        (batch,) = batches(run, number)
        tokens, masked = batch.tokens, batch.masked
        sizes = dict.fromkeys(("targets", "tokens", "candidates", "subset"), 0)
        for row in range(len(tokens)):
            last = int((tokens[row] == 2).nonzero()[0, 0])
            places = {int(p) for p, t in zip(batch.positions[row], batch.targets[row]) if t >= 0}
            sizes["targets"] += int((batch.targets[row] >= 0).sum())
            assert len(places) == int((batch.targets[row] >= 0).sum())
            for t in range(tokens.shape[1]):
                padded = bool(batch.padding[row, t]) if batch.padding is not None else False
                assert padded == (t > last)
                sizes["tokens"] += t <= last
                candidate = t <= last and int(tokens[row, t]) not in specials
                assert bool(batch.candidates[row, t]) == candidate
                sizes["candidates"] += candidate
                assert candidate or t not in places
                assert masked[row, t] == tokens[row, t] or (t in places and masked[row, t] == 1)
                sizes["subset"] += bool(batch.subset[row, t])
                assert t <= last or not batch.subset[row, t]
        assert batch.sizes == sizes | {"rows": len(tokens)}
        subset, real = subset + sizes["subset"], real + sizes["tokens"]
    assert subset / real == pytest.approx(0.15, abs=4 * (0.1275 / real) ** 0.5)


def test_an_unknown_word_is_a_word(ragged, tmp_path):
    """[UNK] is maskable, a candidate and a unigram; of a row of nothing else one is chosen."""
    run = run_of(
        ragged, tmp_path, "criterion=electra_rtd", "model.noise=unigram", "task.batch_size=80"
    )
    unk = run.task.vocabulary.unk  # type: ignore[attr-defined]
    assert run.model.generator.log_probs[unk] > -100  # type: ignore[union-attr,index]
    seen = 0
    for number in range(10):
        (batch,) = batches(run, number)
        assert batch.candidates[batch.tokens == unk].all()
        seen += int((batch.targets == unk).sum())
    assert seen > 0


def test_masks_are_drawn_again_for_every_batch(ragged, tmp_path):
    run = run_of(ragged, tmp_path, "criterion=electra_rtd", "task.batch_size=80")
    first, second = (batches(run, number)[0] for number in (0, 1))
    order = [b.samples.argsort() for b in (first, second)]
    assert torch.equal(first.tokens[order[0]], second.tokens[order[1]])
    assert not torch.equal(first.masked[order[0]], second.masked[order[1]])


def test_rare_tokens_are_chosen_in_training_only(ragged, tmp_path):
    """As many tokens of a row, rarer ones on average; held-out masks stay as they were."""
    chosen = {}
    for rarity in (0, 20):
        options = ["criterion=electra_rtd", "task.batch_size=80", f"task.mask_rarity={rarity}"]
        run = run_of(ragged, tmp_path / str(rarity), *options)
        counts = torch.tensor(run.task.vocabulary.counts)
        (train,) = batches(run, 0)
        assert (train.targets >= 0).any()
        used = train.targets[train.targets >= 0]
        held_out = run.task.build_streams("valid")["valid"].micro_batches(0, Shard(0, 1, 0))[0]
        chosen[rarity] = len(used), counts[used].double().mean(), held_out.masked
    assert chosen[20][0] == chosen[0][0] and chosen[20][1] < 0.9 * chosen[0][1]
    assert torch.equal(chosen[20][2], chosen[0][2])


CUT = [
    ("electra_rtd", []),
    ("electra_rtd", ["criterion.contrast=0.4"]),
    ("electra_rtd", ["criterion.disc_positions=random"]),
    ("electra_rtd", ["model.noise=two_tower"]),
    ("electric_nce", ["model.noise=two_tower"]),
    ("replace_mlm", []),
    ("all_tokens_mlm", []),
    ("electra_adversarial", []),
    ("strategic_mlm", ["model.noise=difficulty"]),
    ("electra_rtd", ["task.mask_rarity=1"]),
]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize(
    "name, options", CUT, ids=lambda x: x if isinstance(x, str) else "".join(x)
)
def test_cuts_of_ragged_rows(name, options, dropout, ragged, tmp_path):
    """Rows of other lengths have other numbers of chosen positions; no draw may notice."""
    more = [f"model.dropout={dropout}", f"model.attention_dropout={dropout}"]
    run = run_of(ragged, tmp_path, f"criterion={name}", *options, *more)
    model, engine = run.model.train(), run.engine
    gradients = []
    for rows in (0, 1, 3):
        engine.begin(0)
        loss = partial(run.task.criterion, model)
        found, logs = engine.gradients(loss, batches(run, 0, rows), engine.parameters("main"))
        gradients.append([logs["loss"], *found])
    for other in gradients[1:]:
        for one, whole in zip(other, gradients[0]):
            assert (one - whole).abs().max() < 1e-11 * max(1.0, whole.abs().max().item())


# ---------------------------------------------------------------- two stages


def stages(data: Path, place: Path, model: list[str], *more: str) -> tuple[Any, Any]:
    """Train a masked LM for two updates and start ELECTRA from it; return both models."""
    common = [*ROWS, *SIZES, *model, f"data={data}", "trainer.max_update=2", SILENT]
    lm = TrainingRun(
        load_config(["task=masked_lm", "model=transformer", *common, f"save_dir={place}/lm"])
    )
    lm.train()
    wanted = ["model.sharing=none", "model.generator_size=1", "model.freeze_generator=true"]
    second = ["criterion=electra_rtd", *model, *wanted, *more, f"init_from={place}/lm"]
    return lm.model, run_of(data, place / "second", *second).model


@torch.no_grad()
def logits_of_both(lm: Any, model: Any) -> tuple[Tensor, Tensor]:
    lm.eval(), model.eval()
    tokens = torch.randint(33, 40, (3, 9))
    positions = torch.arange(9).expand(3, -1)
    batch = ElectraBatch(
        tokens=tokens,
        masked=tokens,
        positions=positions,
        targets=tokens,
        candidates=torch.ones_like(tokens, dtype=torch.bool),
    )
    return lm(tokens), model.masked_noise(batch)[0]


@pytest.mark.parametrize(
    "model",
    [
        ["model.encoder_attention_heads=1"],
        ["model.encoder_attention_heads=2"],
        ["model.encoder_attention_heads=1", "model.token_embed_dim=4"],
        ["model.encoder_attention_heads=1", "model.encoder_ffn_embed_dim=16"],
    ],
    ids=["plain", "two-heads", "narrow-embeddings", "other-ffn"],
)
def test_the_second_stage_starts_from_the_first(model, ragged, tmp_path):
    """The generator is the masked LM; the discriminator has its encoder, a fresh head."""
    lm, electra = stages(ragged, tmp_path, model)
    torch.testing.assert_close(*logits_of_both(lm, electra), rtol=0, atol=1e-12)
    wanted = dict(lm.encoder.named_parameters())
    for name, parameter in electra.encoder.named_parameters():
        assert torch.equal(parameter, wanted[name])
        assert parameter.requires_grad
    assert not any(p.requires_grad for p in electra.generator.parameters())


def test_the_second_stage_trains_the_discriminator_only(ragged, tmp_path):
    sizes = ["model.encoder_attention_heads=1"]
    _, before = stages(ragged, tmp_path, sizes)
    start = {n: w.clone() for n, w in before.state_dict().items()}
    more = ["criterion=electra_rtd", *sizes, "model.sharing=none", "model.generator_size=1"]
    more += ["model.freeze_generator=true", f"init_from={tmp_path}/lm", "trainer.max_update=3"]
    run = run_of(ragged, tmp_path / "trained", *more)
    run.train()
    moved = {n for n, w in run.model.state_dict().items() if not torch.equal(w, start[n])}
    assert moved and not any(n.startswith("generator.") for n in moved)


def test_a_run_of_the_task_starts_from_another(ragged, tmp_path):
    sizes = ["criterion=electra_rtd", "model.encoder_attention_heads=1", "trainer.max_update=2"]
    first = run_of(ragged, tmp_path / "first", *sizes)
    first.train()
    second = run_of(ragged, tmp_path / "second", *sizes, f"init_from={tmp_path}/first")
    for (name, a), b in zip(first.model.named_parameters(), second.model.parameters()):
        assert torch.equal(a, b), name


# ---------------------------------------------------------------- encoders without a generator


def masked_lm_run(data: Path, place: Path) -> Any:
    """Train a masked LM for one update; return its model."""
    places = [f"data={data}", f"save_dir={place}", "trainer.max_update=1", SILENT]
    model = ["model=transformer", "model.encoder_attention_heads=1"]
    run = TrainingRun(load_config(["task=masked_lm", *ROWS, *SIZES, *model, *places]))
    run.train()
    return run.model


def started(data: Path, place: Path, source: Path, *options: str) -> tuple[Any, dict, dict]:
    """Return the model of a run that starts from `source`, its weights, and fresh ones."""
    sizes = ["criterion=electra_rtd", "model.encoder_attention_heads=1", *options]
    fresh = run_of(data, place / "fresh", *sizes).model.state_dict()
    model = run_of(data, place / "started", *sizes, f"init_from={source}").model
    return model, model.state_dict(), fresh


@pytest.mark.parametrize(
    "options",
    [
        ["model.generator_size=0.5"],
        ["model.generator_size=1", "model.generator_layers=2"],
        ["model.noise=two_tower"],
        ["model.noise=uniform"],
        ["model.generator_size=1", "model.token_embed_dim=8", "model.sharing=none"],
    ],
    ids=["narrower", "deeper", "two-tower", "uniform", "the-same"],
)
def test_from_a_masked_lm(options, ragged, tmp_path, capsys):
    """Its encoder becomes the main one; noise of another kind or size starts fresh, and says so."""
    lm = masked_lm_run(ragged, tmp_path / "lm").state_dict()
    capsys.readouterr()
    _, found, fresh = started(ragged, tmp_path, tmp_path / "lm", *options)
    same = "model.sharing=none" in options
    assert ("starts fresh" in capsys.readouterr().out) == (
        not same and "model.noise=uniform" not in options
    )
    for name, weight in found.items():
        wanted = fresh[name]
        if name.startswith("encoder."):
            wanted = lm[name]
        elif same and name.startswith("generator."):
            own = name.replace("generator.head", "heads.lm").replace("generator", "encoder")
            wanted = lm[own]
        assert torch.equal(weight, wanted), name


@pytest.mark.parametrize("sharing", ["embeddings", "all"])
def test_a_generator_of_the_same_sizes_is_the_masked_lm(sharing, ragged, tmp_path):
    """What it shares with the main encoder is there once."""
    lm = masked_lm_run(ragged, tmp_path / "lm")
    options = ["model.generator_size=1", f"model.sharing={sharing}"]
    model, _, _ = started(ragged, tmp_path, tmp_path / "lm", *options)
    torch.testing.assert_close(*logits_of_both(lm, model), rtol=0, atol=1e-12)


def test_from_a_discriminator_alone(ragged, tmp_path):
    """An imported one has no generator; its detection head comes along, also as energies."""
    sizes = ["criterion=electra_rtd", "model.encoder_attention_heads=1", "trainer.max_update=2"]
    first = run_of(ragged, tmp_path / "first", *sizes)
    first.train()
    found = checkpoint.load(manifests.resolve(str(tmp_path / "first")))
    alone = {n: w for n, w in found.weights.items() if not n.startswith("generator.")}
    about = {name: found.manifest[name] for name in ("config", "valid", "data")}
    checkpoint.save(tmp_path / "alone" / "checkpoints", 0, alone, {}, about)
    for more in ([], ["criterion=electric_nce", "model.noise=two_tower"]):
        place = tmp_path / str(len(more))
        _, weights, fresh = started(ragged, place, tmp_path / "alone", *more)
        assert alone.keys() <= weights.keys()
        for name, weight in weights.items():
            assert torch.equal(weight, alone.get(name, fresh[name])), name


def test_a_fresh_generator_is_not_frozen(ragged, tmp_path):
    masked_lm_run(ragged, tmp_path / "lm")
    options = ["model.sharing=none", "model.freeze_generator=true", "model.generator_size=0.5"]
    options += ["criterion=electra_rtd", "model.encoder_attention_heads=1"]
    with pytest.raises(UsageError, match="generator of init_from.*generator_size=1"):
        run_of(ragged, tmp_path / "frozen", *options, f"init_from={tmp_path}/lm")
