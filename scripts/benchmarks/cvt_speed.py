"""Cross-View Training: labelled and unlabelled steps against a plain tagger and each other."""

from __future__ import annotations

import contextlib
import itertools
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from timing import Figure, Measured, Step, Variant, cost, paired
from torch import Tensor, nn
from torch.nn import functional as F
from training import build, configured, train

from metaseq_lm.cli import main
from metaseq_lm.data.streams import Shard
from metaseq_lm.training.parts import build_task

OPTIONS = ["task=cvt", "criterion=cvt_aux", "optimizer=sgd", "optimizer.momentum=0.9"]
OPTIONS += ["optimizer.lr=0.5", "optimizer.clip_norm=1", "schedule=damped_inverse_sqrt"]
TAGGED, TREEBANK = ("a", "b", "c"), "d"
SETS = (*TAGGED, TREEBANK)
CLASSES, WORDS = 20, 5000
BATCH_SIZE = 64


def made_up(folder: Path) -> Path:
    """Write text, tagged sets and a treebank, 8 to 30 words a sentence; return the data folder."""
    draw = random.Random(1)
    words = ["".join(draw.choices("abcdefghijklmnop", k=draw.randint(2, 9))) for _ in range(WORDS)]
    folder.mkdir()

    def sentences(count: int) -> list[list[str]]:
        return [draw.choices(words, k=draw.randint(8, 30)) for _ in range(count)]

    text = folder / "text.txt"
    text.write_text("".join(" ".join(row) + "\n" for row in sentences(2000)))
    data = folder / "data"
    place = ["--destdir", str(data)]
    made = [["--words", "--trainpref", str(text)]]
    for name in SETS:
        kind, ending = ("treebank", "conllu") if name == TREEBANK else ("tagged", "conll")
        file = folder / f"{name}.{ending}"
        write = tree if name == TREEBANK else tags
        file.write_text("".join(write(draw, row) for row in sentences(1000)))
        made.append([f"--{kind}", name, "--trainpref", str(file)])
    with contextlib.redirect_stdout(sys.stderr):  # only figures go to stdout
        assert not any(main(["preprocess", *options, *place]) for options in made)
    return data


def tags(draw: random.Random, row: list[str]) -> str:
    """Return a sentence in CoNLL columns."""
    return "".join(f"{word} T{draw.randrange(CLASSES)}\n" for word in row) + "\n"


def tree(draw: random.Random, row: list[str]) -> str:
    """Return a sentence in CoNLL-U, a tree because the head of a word is an earlier word."""
    lines = []
    for at, word in enumerate(row):
        head = draw.randint(1, at) if at else 0
        relation = f"r{draw.randrange(CLASSES)}" if at else "root"
        lines.append(f"{at + 1}\t{word}\t_\tX\t_\t_\t{head}\t{relation}\t_\t_\n")
    return "".join(lines) + "\n"


def options_for(size: str, sets: tuple[str, ...], rows: int) -> list[str]:
    """Return the configuration of a model with the heads of some sets."""
    labelled = f"task.labelled=[{','.join(sets)}]"
    return [*OPTIONS, f"model=cnn_bilstm_{size}", labelled, f"task.batch_size={rows}"]


def our_step(data: Path, size: str, sets: tuple[str, ...], rows: int, kind: str) -> Step:
    """Make our updates of one kind, "labelled" or "unlabelled", with data; the unit is a word."""
    run = build(data, options_for(size, sets, rows))
    run.model.train()
    streams = run.task.build_streams("train")
    given, work = dict.fromkeys(streams, 0), 0.0
    # Batches of the other kind are not made.
    wanted = (u for u in itertools.count() if (u % 2 == 1) == (kind == "unlabelled"))

    def step() -> dict[str, Any]:
        nonlocal work
        update = next(wanted)
        (name,) = run.task.needs(update)
        micro = streams[name].micro_batches(given[name], run.shard)
        given[name] += 1
        batch = run.engine.to_device(micro)
        words = sum(m.sizes["words"] for m in batch)
        # Count FLOPs only in the first, warm-up step, because counting takes time.
        logs = train(run, update, {name: [batch]}, count=not work)
        work = work or run.flops.total / words
        return {"amount": words, "loss": float(logs["loss"]), "flops_per_word": work}

    return step


class PlainTagger(nn.Module):
    """A handwritten tagger: embeddings, a character CNN, a two-layer nn.LSTM, a linear layer."""

    def __init__(self, size: Any, words: int, characters: int, dropout: float) -> None:
        super().__init__()
        self.words = nn.Embedding(words, size.word_embed_dim)
        self.characters = nn.Embedding(characters, size.char_embed_dim)
        self.filters = nn.ModuleList(
            nn.Conv1d(size.char_embed_dim, size.char_filters, width) for width in size.char_widths
        )
        inputs = size.word_embed_dim + size.char_filters * len(size.char_widths)
        first, second = size.encoder_hidden_dim, size.second_hidden_dim
        most = size.projection_dim
        shape = [(inputs, first), (2 * min(first, most), second)]
        self.layers = nn.ModuleList(
            nn.LSTM(
                i,
                cells,
                batch_first=True,
                bidirectional=True,
                proj_size=most if most < cells else 0,
            )
            for i, cells in shape
        )
        self.dropout = nn.Dropout(dropout)
        widths = 2 * min(first, most) + 2 * min(second, most)
        self.hidden = nn.Linear(widths, 512)
        self.out = nn.Linear(512, CLASSES)

    def forward(self, tokens: Tensor, characters: Tensor) -> Tensor:
        """Return scores (B, S, C); rows of similar lengths need no packing."""
        spelled = self.characters(characters.flatten(0, 1)).transpose(1, 2)
        convolved = [layer(spelled).relu().amax(-1) for layer in self.filters]
        x = torch.cat(convolved, -1).view(*tokens.shape, -1)
        x = torch.cat([self.dropout(self.words(tokens)), self.dropout(x)], -1)
        states = []
        for layer in self.layers:
            x = self.dropout(layer(x)[0])
            states.append(x)
        return self.out(self.hidden(torch.cat(states, -1)).relu())


def plain_step(data: Path, size: str, rows: int) -> Step:
    """Train the plain tagger on our batches, made beforehand."""
    config = configured(data, options_for(size, SETS[:1], rows))
    task = build_task(config)
    stream = task.build_streams("train")[SETS[0]]
    loaded = [stream.micro_batches(number, Shard())[0] for number in range(12)]
    vocabulary = task.vocabulary  # type: ignore[attr-defined]
    model = PlainTagger(
        config.model, len(vocabulary), len(vocabulary.characters), config.model.dropout
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    count = 0

    def step() -> dict[str, Any]:
        nonlocal count
        batch = loaded[count % len(loaded)]
        count += 1
        scores = model(batch.tokens, batch.characters)
        loss = F.cross_entropy(scores.flatten(0, 1), batch.labels.flatten(), ignore_index=-1)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return {"amount": batch.sizes["words"], "loss": loss.item()}

    return step


def compared(name: str, ours: Measured, other: Measured, target: float | None, note: str) -> Figure:
    """Return our cost of a word over the other's, with words, seconds and FLOPs of both."""
    figure = cost(name, ours, other, "s/word", target, note)
    rates = [f"{statistics.median(m.rates()):,.0f} words/s" for m in (ours, other)]
    steps = [f"{statistics.median(r['cpu'] for r in m.rounds):.3g} s/step" for m in (ours, other)]
    figure.note = f"{note}; {rates[0]}, {steps[0]} against {rates[1]}, {steps[1]}"
    work = [m.rounds[0].get("flops_per_word") for m in (ours, other)]
    if work[0] and work[1]:
        figure.note += f"; {work[0] / work[1]:.3g} times its FLOPs"
    return figure


def mean_of(parts: Sequence[Measured]) -> Measured:
    """Return rounds in which a word takes the mean seconds and FLOPs over the parts."""
    rounds = []
    for results in zip(*(part.rounds for part in parts)):
        amount = statistics.mean(r["amount"] for r in results)
        mean = {
            clock: amount * statistics.mean(r[clock] / r["amount"] for r in results)
            for clock in ("cpu", "wall")
        }
        mean["flops_per_word"] = statistics.mean(r["flops_per_word"] for r in results)
        rounds.append({"amount": amount} | mean)
    return Measured(rounds, max(part.peak for part in parts))


def figures(folder: Path, given: Path | None, quick: bool) -> Iterator[Figure]:
    """Yield the cost of a word in our steps against the plain tagger, each other, and one set."""
    size, rows = ("small", BATCH_SIZE // 2) if quick else ("base", BATCH_SIZE)
    data = made_up(folder / "cvt")
    common = {"data": data, "size": size, "rows": rows}
    tagged = common | {"sets": TAGGED[:1]}
    variants = {
        "plain": Variant(plain_step, common),
        "labelled": Variant(our_step, tagged | {"kind": "labelled"}),
        "tags": Variant(our_step, tagged | {"kind": "unlabelled"}),
        "trees": Variant(our_step, common | {"sets": (TREEBANK,), "kind": "unlabelled"}),
        "multitask": Variant(our_step, common | {"sets": SETS, "kind": "unlabelled"}),
    }
    done = paired(variants, rounds=5, warm_up=1 if quick else 2)
    done["mean"] = mean_of([done["trees"] if name == TREEBANK else done["tags"] for name in SETS])
    note = f"cnn_bilstm_{size}, {rows} sentences of 8 to 30 words, {CLASSES} tags or relations"
    # An unlabelled step also has the teacher's pass, a third of a step, and more modules.
    for name, ours, other, target, what in (
        ("labelled", "labelled", "plain", 1.1, "a tagged set; plain tagger"),
        ("unlabelled", "tags", "plain", 1.6, "a tagged set; plain tagger"),
        ("unlabelled_labelled", "tags", "labelled", None, "a tagged set; its labelled step"),
        ("multitask", "multitask", "mean", 1.5, "all sets; mean of each alone"),
        ("multitask_dearest", "multitask", "trees", 1.5, "all sets; the treebank alone"),
        ("multitask_cheapest", "multitask", "tags", 1.5, "all sets; a tagged set alone"),
    ):
        yield compared(f"cvt_{name}", done[ours], done[other], target, f"{note}; {what}")
