"""Cross-View Training: labelled and unlabelled steps against a plain torch BiLSTM tagger of the same size."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional

import torch
from timing import Figure, Step, Variant, cost, paired
from torch import Tensor, nn
from torch.nn import functional as F
from training import build, configured, fetched, train

from metaseq_lm.cli import main
from metaseq_lm.data.streams import Shard
from metaseq_lm.run import build_task

OPTIONS = ["task=cvt", "criterion=cvt_aux", "optimizer=sgd", "optimizer.momentum=0.9"]
OPTIONS += ["optimizer.lr=0.5", "optimizer.clip_norm=1", "schedule=damped_inverse_sqrt"]
SETS = ("a", "b", "c")
CLASSES, WORDS = 20, 5000
BATCH_SIZE = 64


def made_up(folder: Path) -> Path:
    """Write unlabelled text and three tagged sets of 8 to 30 words a sentence; return the data folder."""
    draw = random.Random(1)
    words = ["".join(draw.choices("abcdefghijklmnop", k=draw.randint(2, 9))) for _ in range(WORDS)]
    folder.mkdir()

    def sentences(count: int) -> list[list[str]]:
        return [draw.choices(words, k=draw.randint(8, 30)) for _ in range(count)]

    text = folder / "text.txt"
    text.write_text("".join(" ".join(row) + "\n" for row in sentences(2000)))
    data = folder / "data"
    place = ["--destdir", str(data)]
    assert main(["preprocess", "--words", "--trainpref", str(text), *place]) == 0
    for name in SETS:
        file = folder / f"{name}.conll"
        rows = [[f"{w} T{draw.randrange(CLASSES)}\n" for w in row] for row in sentences(1000)]
        file.write_text("\n".join("".join(row) for row in rows))
        made = ["preprocess", "--tagged", name, "--trainpref", str(file), *place]
        assert main(made) == 0
    return data


def options_for(size: str, sets: int, rows: int) -> list[str]:
    """Return the configuration of a model with the heads of so many sets."""
    labelled = f"task.labelled=[{','.join(SETS[:sets])}]"
    return [*OPTIONS, f"model=cnn_bilstm_{size}", labelled, f"task.batch_size={rows}"]


def our_step(data: Path, size: str, sets: int, rows: int, kind: str) -> Step:
    """Make our updates of one kind, "labelled" or "unlabelled"; a word is the unit."""
    run = build(data, options_for(size, sets, rows))
    run.model.train()
    source = fetched(run)

    def step() -> dict[str, Any]:
        for update, batches in source:
            if ("unlabelled" in batches) == (kind == "unlabelled"):
                logs = train(run, update, batches, count=False)
                words = sum(m["sizes"]["words"] for s in batches.values() for b in s for m in b)
                return {"amount": words, "loss": float(logs["loss"])}
        raise AssertionError("training batches have no end")

    return step


class PlainTagger(nn.Module):
    """What one writes by hand: embeddings, a character CNN, a two-layer nn.LSTM, a linear layer."""

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
        """Return scores (B, S, C); rows of like lengths need no packing."""
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
    config = configured(data, options_for(size, 1, rows))
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
        scores = model(batch["tokens"], batch["characters"])
        loss = F.cross_entropy(scores.flatten(0, 1), batch["labels"].flatten(), ignore_index=-1)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return {"amount": batch["sizes"]["words"], "loss": loss.item()}

    return step


def figures(folder: Path, given: Optional[Path], quick: bool) -> Iterator[Figure]:
    """Yield seconds per word of our steps against the plain tagger's, and of many heads against one's."""
    size = "small" if quick else "base"
    data = made_up(folder / "cvt")
    common = {"data": data, "size": size, "rows": BATCH_SIZE}
    variants = {
        "plain": Variant(plain_step, common),
        "labelled": Variant(our_step, common | {"sets": 1, "kind": "labelled"}),
        "unlabelled": Variant(our_step, common | {"sets": 1, "kind": "unlabelled"}),
        "multitask": Variant(our_step, common | {"sets": 3, "kind": "unlabelled"}),
    }
    done = paired(variants, rounds=8 if quick else 5, warm_up=2)
    note = f"cnn_bilstm_{size}, {BATCH_SIZE} sentences of 8 to 30 words, {CLASSES} tags"
    for name, target in (("labelled", 1.1), ("unlabelled", 1.6)):
        unit = "s/word"
        yield cost(f"cvt_{name}", done[name], done["plain"], unit, target, f"{note}; plain tagger")
    text = f"{note}; heads of {len(SETS)} sets against those of 1"
    yield cost("cvt_multitask", done["multitask"], done["unlabelled"], "s/word", 1.5, text)
