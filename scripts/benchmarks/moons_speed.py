"""Two Moons: micro-steps per second of our updates against a plain autograd loop."""

from __future__ import annotations

import contextlib
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from plain_encoder import PAD, Encoder, Student, Teacher
from plain_loop import MicroStep, PlainLoop
from timing import Figure, Measured, Step, Variant, paired, speed
from torch import Tensor
from training import MeteredParts, build, fetched, train

from metaseq_lm import cli
from metaseq_lm.core.batch import CopiesBatch

EXAMPLE = Path(__file__).parents[2] / "examples" / "meta_pseudo_label"
CONFIG = EXAMPLE / "config"
TARGETS = {"mlm": 1.5, "hard": None, "soft": 2.0, "soft_difference": None}
DIFFERENCE = ["criterion.hypergradient=finite_difference"]
FIXED = ["engine.precision=fp64", "model.dropout=0", "model.attention_dropout=0"]
# Full-size steps without warm-up, so that three updates move the weights.
FIXED += ["schedule.warmup_updates=1", "optimizer.lr=0.0025", "task.reward_interval=0"]
WARM_UP = 2  # rounds
NOTE = "reference: batches loaded before, no reward logged; ours: data included, FLOP count not"


def make_data(folder: Path) -> Path:
    """Write and binarise the Two Moons data; return the data folder."""
    text, data = folder / "moons_text", folder / "moons"
    runpy.run_path(str(EXAMPLE / "two_moons.py"))["main"](text)
    files = [f"--{split}pref={text / split}.txt" for split in ("train", "valid")]
    corpus = ["--tokenizer-corpus", str(text / "tokenizer.txt"), "--vocab-size", "512"]
    labelled = text / "which_moon_10"
    rows = [f"--{split}pref={labelled / split}.tsv" for split in ("train", "valid")]
    out = ["--destdir", str(data)]
    with contextlib.redirect_stdout(sys.stderr):  # only figures go to stdout
        for arguments in ([*files, *corpus, *out], ["--labelled", labelled.name, *rows, *out]):
            if cli.main(["preprocess", *arguments]):
                raise RuntimeError("preprocess failed")
    return data


def our_updates(data: Path, config: str, overrides: list[str], updates: int) -> Step:
    """Train with our engine like the trainer, data and FLOP count included."""
    run = build(data, overrides, CONFIG, config)
    source = fetched(run)
    run.model.train()
    copies = run.task.config.batches_per_update

    def step() -> dict[str, Any]:
        loss = 0.0
        for _ in range(updates):
            # The FLOPs of each batch shape are counted once in a run; a few rounds see most shapes.
            logs = train(run, *next(source), count=False)
            loss += float(logs["mlm" if config == "mlm" else "teacher_mlm"])
        return {"amount": updates * copies, "loss": loss / updates}

    return step


def plain_updates(data: Path, config: str, updates: int, loaded: int = 64) -> Step:
    """Train with the plain loop on preloaded batches."""
    run = build(data, ["task.reward_interval=1"] if config == "mlm" else [], CONFIG, config)
    source = fetched(run)
    prepared = [micro_steps(next(source)[1]) for _ in range(loaded)]
    torch.manual_seed(1)
    update = getattr(plain_loop(run), f"update_{config}")
    count = 0

    def step() -> dict[str, Any]:
        nonlocal count
        loss = 0.0
        for _ in range(updates):
            loss += update(prepared[count % loaded])
            count += 1
        return {"amount": updates * len(prepared[0]), "loss": loss / updates}

    return step


def plain_loop(run: MeteredParts) -> PlainLoop:
    """Return the plain loop with the sizes, rates and weights of a run."""
    options, model = run.config, run.config.model
    dtype = torch.float64 if options.engine.precision == "fp64" else torch.float32
    sizes = (
        len(run.task.vocabulary),  # type: ignore[attr-defined]
        model.encoder_layers,
        model.encoder_embed_dim,
        model.encoder_ffn_embed_dim,
        model.encoder_attention_heads,
        model.max_positions,
        model.dropout,
        model.attention_dropout,
    )
    student, teacher = Student(Encoder(*sizes)).to(dtype), Teacher(Encoder(*sizes)).to(dtype)
    weights = dict(run.model.named_children())
    for name, net in (("student", student), ("teacher", teacher)):
        if name in weights:  # masked_lm has no teacher
            net.load_state_dict(plain_names(weights[name].state_dict()))
    return PlainLoop(student, teacher, options.optimizer.lr, options.schedule.warmup_updates)


def plain_names(weights: dict) -> dict:
    """Return the weights of one of our models under the names of the plain one."""
    return {n.replace("embeddings.", "").replace("stack.", ""): w for n, w in weights.items()}


def micro_steps(batches: dict) -> list[MicroStep]:
    """Cut the batches of an update into micro-steps of their own lengths."""
    parts = {name: stream[0][0] for name, stream in batches.items()}
    unlabelled = parts["unlabelled"]
    found = []
    for c in range(len(unlabelled.original)):
        found.append(
            {
                "original": unlabelled.original[c],
                "masked": unlabelled.tokens[c],
                "labels": dense_labels(unlabelled, c),
                "support": labelled_rows(parts["support"], c),
                "query": labelled_rows(parts["query"], c),
            }
        )
    return found


def dense_labels(batch: CopiesBatch, c: int) -> Tensor:
    """Return a label for each position of micro-step c, -1 without a label."""
    positions, targets = batch.positions[c], batch.targets[c]
    labels = torch.full_like(batch.tokens[c], -1)
    row, column = torch.nonzero(targets >= 0, as_tuple=True)
    labels[row, positions[row, column]] = targets[row, column]
    return labels


def labelled_rows(batch: CopiesBatch, c: int) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return tokens, padding and labels of micro-step c, without columns of only padding."""
    tokens = batch.tokens[c]
    width = int((tokens != PAD).any(0).nonzero().max()) + 1
    padding = tokens[:, :width] == PAD
    return tokens[:, :width], padding if padding.any() else None, dense_labels(batch, c)[:, :width]


# ---------------------------------------------------------------- is it the same computation?


def recorded(engine: Any) -> tuple[dict[str, Any], list]:
    """Make an engine remember the teacher's gradient of its next step, and the sampled pairs."""
    gradients: dict[str, Any] = {}
    pairs: list = []
    step, map_ = engine.step, engine.map

    def step_and_keep(name: str, grads: Any) -> bool:
        gradients[name] = [g.clone() for g in grads]
        return step(name, grads)

    def map_and_keep(*args: Any, **kwargs: Any) -> Any:
        found = map_(*args, **kwargs)
        pairs[:] = [(x, y) for x, y in zip(*found[0])]
        return found

    engine.step, engine.map = step_and_keep, map_and_keep
    return gradients, pairs


def difference(data: Path, config: str, updates: int = 3) -> dict[str, float]:
    """Run both from the same weights in float64 without dropout.

    Returns the largest relative difference of the gradient of the first update (the teacher's if
    there is one), and the largest difference of any weight after `updates` updates.
    """
    interval = ["task.reward_interval=1"] if config == "mlm" else []
    run = build(data, FIXED + interval, CONFIG, config)
    plain, source = plain_loop(run), fetched(run)
    engine, name = run.engine, "student" if config == "mlm" else "teacher"
    gradients, pairs = recorded(engine)
    seen: list[list[Tensor]] = []
    trained = getattr(plain, name)
    plain_step = trained.step

    def keep_and_step() -> None:
        seen.append([p.grad.clone() for p in trained.parameters])
        plain_step()

    trained.step = keep_and_step
    run.model.train()
    errors = []
    for _ in range(updates):
        update, batches = next(source)
        engine.begin(update)
        run.task.update(engine, run.model, batches)
        arguments = (pairs,) if config == "hard" else ()
        getattr(plain, f"update_{config}")(micro_steps(batches), *arguments)
        ours, theirs = (torch.cat([g.flatten() for g in gs]) for gs in (gradients[name], seen[-1]))
        errors.append(float((ours - theirs).abs().max() / theirs.abs().max()))
    nets = {"student": plain.student.net, "teacher": plain.teacher.net}
    weights = max(
        float((p - nets[net].state_dict()[key]).abs().max())
        for net, ours in run.model.named_children()
        for key, p in plain_names(ours.state_dict()).items()
    )
    return {"gradient": errors[0], "weights": weights}


def check(data: Path) -> Step:
    """Return a step that compares ours with the plain loop for every objective."""
    return lambda: {"amount": 1} | {c: difference(data, c) for c in ("mlm", "hard", "soft")}


# ---------------------------------------------------------------- figures


def figures(folder: Path, data: Path | None, quick: bool) -> Iterator[Figure]:
    """Yield the figures of Two Moons."""
    data = data or make_data(folder)
    (checked,) = paired({"check": Variant(check, {"data": data})}, 1, 0)["check"].rounds
    rounds = 7 if quick else 21
    for config, updates in (("mlm", 80), ("hard", 8), ("soft", 6)):
        plain = Variant(plain_updates, {"data": data, "config": config, "updates": updates})
        variants = {"ours": our(data, config, updates), "plain": plain}
        if config == "soft":
            variants["difference"] = our(data, config, updates, DIFFERENCE)
        done = paired(variants, rounds, WARM_UP)
        same = checked[config]
        note = (
            f"{NOTE}; float64 difference: gradient {same['gradient']:.0e}, weights after 3 updates "
        )
        note += f"{same['weights']:.0e}; {losses(done, updates)}"
        if max(same.values()) > 1e-8:
            note = f"NOT THE SAME COMPUTATION; {note}"
        name = f"moons_{config}"
        yield speed(name, done["ours"], done["plain"], "micro-steps/s", TARGETS[config], note)
        if config == "soft":
            name += "_difference"
            yield speed(name, done["difference"], done["plain"], "micro-steps/s", None, NOTE)


def our(data: Path, config: str, updates: int, overrides: list[str] | None = None) -> Variant:
    """Return our variant of a configuration."""
    options = {"data": data, "config": config, "overrides": overrides or [], "updates": updates}
    return Variant(our_updates, options)


def losses(done: dict[str, Measured], updates: int) -> str:
    """Return a text with the final masked-LM loss of each variant."""
    ends = [f"{name} {done[name].rounds[-1]['loss']:.2f}" for name in ("ours", "plain")]
    rounds = len(done["ours"].rounds) + WARM_UP
    return f"loss after {rounds * updates} updates: {', '.join(ends)}"
