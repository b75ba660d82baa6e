"""An ELECTRA step of 12 layers, width 256, against a pair of transformers' models: time, memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from timing import Figure, Step, Variant, memory, paired, speed
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from training import first_batches, made_up_corpus, updates

# Ours also imports it, so that peak memory only differs by the models.
from transformers import ElectraConfig, ElectraForMaskedLM, ElectraForPreTraining

from metaseq_lm.runs.flops import FlopMeter

VOCAB, LENGTH, LAYERS = 30522, 128, 12
LR = 5e-4
OVERRIDES = ["task=electra", "criterion=electra_rtd", "model=electra_small", "schedule=constant"]
OVERRIDES += [f"optimizer.lr={LR}", "optimizer.betas=[0.9,0.999]", "model.max_positions=128"]


def our_step(folder: Path, rows: int) -> Step:
    """Make updates of our electra_rtd, data included."""
    return updates(folder, OVERRIDES, rows)


def pair(vocab: int, layers: int) -> tuple[ElectraForMaskedLM, ElectraForPreTraining]:
    """Return transformers' generator and discriminator of ELECTRA-small with one embedding."""
    sizes: dict[str, Any] = {
        "vocab_size": vocab,
        "embedding_size": 128,
        "num_hidden_layers": layers,
        "max_position_embeddings": LENGTH,
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
    }
    small = ElectraConfig(hidden_size=64, num_attention_heads=1, intermediate_size=256, **sizes)
    large = ElectraConfig(hidden_size=256, num_attention_heads=4, intermediate_size=1024, **sizes)
    generator, discriminator = ElectraForMaskedLM(small), ElectraForPreTraining(large)
    generator.electra.embeddings = discriminator.electra.embeddings
    generator.generator_lm_head.weight = discriminator.electra.embeddings.word_embeddings.weight
    return generator.train(), discriminator.train()


def pair_step(folder: Path, rows: int, vocab: int = VOCAB, layers: int = LAYERS) -> Step:
    """Train the pair the usual way, on preloaded batches, with its default dense head."""
    loaded = first_batches(folder, [*OVERRIDES, f"task.batch_size={rows}"], 8)
    generator, discriminator = pair(vocab, layers)
    both = torch.nn.ModuleList([generator, discriminator])
    optimizer = torch.optim.AdamW(both.parameters(), lr=LR, weight_decay=0.01)
    meter = FlopMeter()
    count = 0

    def step() -> dict[str, Any]:
        nonlocal count
        batch = loaded[count % len(loaded)]
        count += 1
        counted = meter.total
        with meter.count(batch.tokens):
            tokens, masked = batch.tokens, batch.masked
            chosen = torch.zeros_like(tokens, dtype=torch.bool)
            row, column = torch.nonzero(batch.targets >= 0, as_tuple=True)
            chosen[row, batch.positions[row, column]] = True
            logits = generator(input_ids=masked, attention_mask=torch.ones_like(masked)).logits
            chosen_logits = logits[chosen]
            first = F.cross_entropy(chosen_logits, tokens[chosen])
            drawn = torch.distributions.Categorical(logits=chosen_logits.detach()).sample()
            noised = tokens.masked_scatter(chosen, drawn)
            second = discriminator(
                input_ids=noised,
                attention_mask=torch.ones_like(noised),
                labels=(noised != tokens).long(),
            ).loss
            loss = first + 50.0 * second
            loss.backward()
            clip_grad_norm_(both.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return {"amount": 1, "loss": loss.item(), "flops": meter.total - counted}

    return step


def figures(folder: Path, given: Path | None, quick: bool) -> Iterator[Figure]:
    """Yield step time and peak memory."""
    rows = 8 if quick else 32
    folder = made_up_corpus(folder / "electra", VOCAB, 400 * (LENGTH - 2) * 4)
    options = {"folder": folder, "rows": rows}
    variants = {"ours": Variant(our_step, options), "pair": Variant(pair_step, options)}
    done = paired(variants, rounds=5 if quick else 3, warm_up=3)
    ours, theirs = done["ours"], done["pair"]
    shape = (
        f"12 layers, widths 256 and 64, {rows} rows of {LENGTH}, vocabulary {VOCAB}, dropout 0.1"
    )
    first, last = (f"{d.rounds[-1]['loss']:.2f}" for d in (ours, theirs))
    note = f"{shape}; loss of the last step: {first} and {last}"
    yield speed("electra_step", ours, theirs, "steps/s", 1.7, note)
    yield memory("electra_memory", ours, theirs, 0.7, f"{shape}; of the whole process")
