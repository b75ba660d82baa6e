"""Whole updates and scores here against transformers' own losses (`labels=`) and
torch's optimizer.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from metaseq_lm.cli import main
from metaseq_lm.core.batch import Layout
from metaseq_lm.data.corpus.pairs import NextSentenceBatch
from metaseq_lm.data.tokenizers.loading import load_tokenizer
from metaseq_lm.data.tokenizers.vocabulary import Vocabulary
from metaseq_lm.methods.electra.data import ElectraBatch
from metaseq_lm.training.restore import open_run
from metaseq_lm.training.run import TrainingRun

pytest.importorskip("transformers")
from hf_folders import make

MASKED = ["BertForPreTraining", "RobertaForMaskedLM", "ElectraForMaskedLM"]
# 64 wide beside a discriminator of 32.
GENERATOR = {
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "intermediate_size": 96,
}
LR, DECAY = 1e-2, 0.1
OPTIMIZER = [
    f"optimizer.lr={LR}",
    f"optimizer.weight_decay={DECAY}",
    "optimizer.clip_norm=0",
    "schedule.warmup_updates=1",
    "engine.device=cpu",
]
LENGTHS = (20, 13, 7, 3)
NOT_COUNTED = -100


def imported(folder: Path, name: str) -> str:
    """Make a folder of transformers and import it."""
    make(folder / name, name)
    assert main(["import", str(folder / name), "--out", str(folder / "own")]) == 0
    return str(folder / "own")


def imported_pair(folder: Path) -> tuple[str, Any, Any]:
    """Make an ELECTRA with one embedding and import it; return its place,
    discriminator, generator.
    """
    judge = make(folder / "judge", "ElectraForPreTraining")
    maker = make(folder / "maker", "ElectraForMaskedLM", seed=1, **GENERATOR)
    maker.electra.embeddings = judge.electra.embeddings
    maker.generator_lm_head.weight = judge.electra.embeddings.word_embeddings.weight
    maker.save_pretrained(folder / "maker")
    generator = ["--generator", str(folder / "maker"), "--out", str(folder / "own")]
    assert main(["import", str(folder / "judge"), *generator]) == 0
    return str(folder / "own"), judge, maker


@dataclass(kw_only=True)
class Rows(ElectraBatch, NextSentenceBatch):
    """Rows for all criterions."""


def batch_of(vocabulary: Vocabulary, kinds: int) -> Rows:
    """Return padded rows of which every third token is chosen, hidden but for the first one."""
    draw = np.random.default_rng(5)
    usual = np.setdiff1d(np.arange(len(vocabulary)), vocabulary.specials)
    tokens = torch.tensor(draw.choice(usual, (len(LENGTHS), max(LENGTHS))))
    padding = torch.arange(max(LENGTHS)) >= torch.tensor(LENGTHS)[:, None]
    tokens[:, 0], tokens[padding] = vocabulary.cls(), vocabulary.pad
    candidates = ~padding
    candidates[:, 0] = False
    places = [list(range(1, length, 3)) for length in LENGTHS]
    positions = torch.zeros(len(LENGTHS), max(map(len, places)), dtype=torch.long)
    targets, masked = torch.full_like(positions, -1), tokens.clone()
    for row, chosen in enumerate(places):
        positions[row, : len(chosen)] = torch.tensor(chosen)
        targets[row, : len(chosen)] = tokens[row, chosen]
        masked[row, chosen[1:]] = vocabulary.mask
    return Rows(
        tokens=tokens,
        masked=masked,
        layout=Layout(padding),
        segments=torch.tensor(draw.integers(0, kinds, tokens.shape)) if kinds > 1 else None,
        positions=positions,
        targets=targets,
        candidates=candidates,
        next_sentence=torch.tensor([0, 1, 1, 0]),
        rows=np.arange(len(LENGTHS)),
        sizes={
            "targets": sum(map(len, places)),
            "tokens": sum(LENGTHS),
            "candidates": int(candidates.sum()),
            "rows": len(LENGTHS),
            "rows_with_targets": len(LENGTHS),
        },
    )


def given(batch: Rows, tokens: Tensor) -> dict[str, Any]:
    """Return what transformers' models take for `tokens` in the rows of a batch."""
    about = {"input_ids": tokens, "attention_mask": (~batch.padding).long()}
    return about | {"token_type_ids": batch.segments}


def labels_of(batch: Rows) -> Tensor:
    """Return the targets of a masked LM as transformers wants them, (B, S)."""
    labels = torch.full_like(batch.tokens, NOT_COUNTED)
    for row, (places, targets) in enumerate(zip(batch.positions, batch.targets)):
        labels[row, places[targets >= 0]] = targets[targets >= 0]
    return labels


def our_loss(run: TrainingRun, batch: Rows, step: bool) -> float:
    """Return the loss of the run's criterion; with `step` the engine makes one update."""
    engine, model = run.engine, run.model.train()
    grads, logs = engine.gradients(
        lambda part: run.task.criterion(model, part),
        [batch],
        engine.parameters("main"),
        rng_key="one",
    )
    assert not step or engine.step("main", grads)
    return float(logs["loss"])


def adamw(*models: Any) -> torch.optim.AdamW:
    """Return torch's AdamW of all parameters, with the moments that are our default."""
    # What both have is there once.
    every = dict.fromkeys(p for model in models for p in model.train().parameters())
    return torch.optim.AdamW(list(every), LR, betas=(0.9, 0.98), eps=1e-6, weight_decay=DECAY)


def stepped(optimizer: torch.optim.AdamW, loss: Tensor) -> float:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


@pytest.mark.parametrize("name", MASKED)
def test_an_update_of_a_masked_lm(name, tmp_path):
    """Criterion, engine and optimizer of the imported run; for BERT with the next-sentence loss."""
    run = open_run(imported(tmp_path, name), overrides=OPTIMIZER)
    batch = batch_of(run.task.vocabulary, run.config.model.segments)  # type: ignore[attr-defined]
    ours = batch.replace(tokens=batch.masked)
    theirs = make(tmp_path / "again", name)
    labels: dict[str, Any] = {"labels": labels_of(batch)}
    if name == "BertForPreTraining":
        labels["next_sentence_label"] = batch.next_sentence
    optimizer, losses = adamw(theirs), []
    for step in (True, False):
        wanted = stepped(optimizer, theirs(**given(batch, batch.masked), **labels).loss)
        losses.append(our_loss(run, ours, step))
        assert losses[-1] == pytest.approx(wanted, abs=1e-5)
    assert abs(losses[1] - losses[0]) > 1e-2


def test_an_update_of_electra(tmp_path):
    """Generator and discriminator, the loss of each by transformers, weighted 1 and 50."""
    place, judge, maker = imported_pair(tmp_path)
    run = open_run(place, overrides=OPTIMIZER)
    model: Any = run.model
    batch = batch_of(run.task.vocabulary, run.config.model.segments)  # type: ignore[attr-defined]
    shown: list[Tensor] = []
    hidden = model.hidden
    model.hidden = lambda tokens, part: shown.append(tokens) or hidden(tokens, part)
    optimizer, losses = adamw(judge, maker), []
    for step in (True, False):
        losses.append(our_loss(run, batch, step))
        fake = (shown[-1] != batch.tokens).long()
        assert fake.sum() > 5
        first = maker(**given(batch, batch.masked), labels=labels_of(batch)).loss
        second = judge(**given(batch, shown[-1]), labels=fake).loss
        wanted = stepped(optimizer, first + 50 * second)
        assert losses[-1] == pytest.approx(wanted, rel=1e-5)
    assert abs(losses[1] - losses[0]) > 0.1


def test_sentences_are_scored_as_by_transformers(tmp_path, capsys):
    """A BertForPreTraining as it was imported, one hidden token at a time."""
    own = imported(tmp_path, "BertForPreTraining")
    text = tmp_path / "text.txt"
    text.write_text("the quick fox\nit was 12\n")
    capsys.readouterr()
    options = ["--tokens", "engine.device=cpu", "engine.precision=fp64"]
    assert main(["score", own, "--input", str(text), *options]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    theirs = make(tmp_path / "again", "BertForPreTraining").double()
    vocabulary = load_tokenizer(own).vocabulary
    for line in lines:
        ids = [vocabulary.index(symbol) for symbol in line["tokens"]]
        row = torch.tensor([[vocabulary.cls(), *ids, vocabulary.sep]])
        for place, found in enumerate(line["log_probs"], 1):
            masked = row.clone()
            masked[0, place] = vocabulary.mask
            with torch.no_grad():
                said = theirs(input_ids=masked).prediction_logits[0, place].log_softmax(-1)
            assert found == pytest.approx(said[ids[place - 1]].item(), rel=1e-6)
    assert len(lines) == 2 and all(len(line["tokens"]) > 2 for line in lines)
