"""A modern encoder's masked-LM step against transformers' ModernBERT and our classic one.

It also compares rows of packed documents with padded rows, in tokens other than padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mlm_speed import labels_of
from timing import Figure, Step, Variant, memory, paired, speed
from torch.nn.utils import clip_grad_norm_
from training import (
    build,
    fetched,
    first_batches,
    made_up_corpus,
    made_up_lines,
    real_tokens,
    train,
    updates,
)

# Ours also imports it, so that peak memory only differs by the models.
from transformers import ModernBertConfig, ModernBertForMaskedLM

VOCAB, LENGTH, LAYERS, WIDTH, INNER, HEADS = 16384, 128, 8, 384, 576, 6
LR = 1e-4
COMMON = ["task=masked_lm", "task.mask_prob=0.3", f"task.tokens_per_sample={LENGTH}"]
COMMON += ["schedule=constant", f"optimizer.lr={LR}", "optimizer.betas=[0.9,0.98]"]
MODERN = [*COMMON, "model=modern_small", f"model.max_positions={LENGTH}"]
# With equal numbers of weights in a layer: 2 h f = 3 h I.
CLASSIC = [
    *COMMON,
    "model=transformer",
    f"model.encoder_layers={LAYERS}",
    f"model.encoder_embed_dim={WIDTH}",
    f"model.encoder_ffn_embed_dim={3 * INNER // 2}",
    f"model.encoder_attention_heads={HEADS}",
    "model.dropout=0",
    "model.attention_dropout=0",
    f"model.max_positions={LENGTH}",
]
MEDIAN_WORDS, SPREAD = 22, 0.7  # words of a sentence, log-normal as in English novels


def modernbert_step(folder: Path, rows: int, sparse: bool) -> Step:
    """Train transformers' model of the same size the usual way, on preloaded batches.

    With `sparse` the head sees only the masked positions, like ours.
    """
    loaded = first_batches(folder, [*MODERN, f"task.batch_size={rows}"], 8)
    prepared = [(batch.tokens, labels_of(batch)) for batch in loaded]
    special = {f"{name}_token_id": 0 for name in ("pad", "eos", "bos", "cls", "sep")}
    sizes = ModernBertConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=LENGTH,
        sparse_prediction=sparse,
        reference_compile=False,
        **special,
    )
    model = ModernBertForMaskedLM(sizes).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.98))
    count = 0

    def step() -> dict[str, Any]:
        nonlocal count
        tokens, labels = prepared[count % len(prepared)]
        count += 1
        loss = model(input_ids=tokens, labels=labels).loss
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return {"amount": 1, "loss": loss.item()}

    return step


def token_step(folder: Path, overrides: list[str], rows: int) -> Step:
    """Make updates of our task, data included; the amount is their tokens other than padding."""
    run = build(folder, [*overrides, f"task.batch_size={rows}"])
    run.model.train()
    source = fetched(run)

    def step() -> dict[str, Any]:
        update, batches = next(source)
        train(run, update, batches, count=False)
        micros = [micro for stream in batches.values() for batch in stream for micro in batch]
        tokens = sum(real_tokens(micro) for micro in micros)
        return {"amount": tokens, "places": sum(micro.tokens.numel() for micro in micros)}

    return step


def line_lengths(text: Path | None) -> np.ndarray:
    """Return the number of words in each line of a text, or random lengths of sentences."""
    if text is None:
        drawn = np.random.default_rng(1).lognormal(np.log(MEDIAN_WORDS), SPREAD, 20_000)
        return np.clip(drawn.astype(int), 1, LENGTH - 2)
    with text.open(encoding="utf-8") as lines:
        counts = np.array([len(line.split()) for line in lines])
    return np.clip(counts[counts > 0], 1, LENGTH - 2)


def figures(folder: Path, given: Path | None, quick: bool) -> Iterator[Figure]:
    """Yield step time and memory against both, and tokens per second of packed rows."""
    rows = 8 if quick else 32
    rounds = 5 if quick else 7
    corpus = made_up_corpus(folder / "modern", VOCAB, 400 * (LENGTH - 2) * 4)
    sizes = {"folder": corpus, "rows": rows}
    variants = {
        "ours": Variant(updates, {"data": corpus, "overrides": MODERN, "rows": rows}),
        "theirs": Variant(modernbert_step, {**sizes, "sparse": False}),
        "sparse": Variant(modernbert_step, {**sizes, "sparse": True}),
        "classic": Variant(updates, {"data": corpus, "overrides": CLASSIC, "rows": rows}),
    }
    done = paired(variants, rounds=rounds, warm_up=3)
    shape = f"{LAYERS} layers, width {WIDTH}, {rows} rows of {LENGTH}, vocabulary {VOCAB}"
    note = f"{shape}, 30 % targets, no dropout"
    ours = done["ours"]
    yield speed("modern_step", ours, done["theirs"], "steps/s", 1.5, note)
    yield speed(
        "modern_step_sparse", ours, done["sparse"], "steps/s", None, f"{note}; sparse_prediction"
    )
    yield memory("modern_memory", ours, done["theirs"], None, f"{shape}; of the whole process")
    yield speed(
        "modern_against_classic", ours, done["classic"], "steps/s", None, f"{note}; equal weights"
    )
    yield memory("modern_classic_memory", ours, done["classic"], None, shape)

    lengths = line_lengths(given)
    lines = made_up_lines(folder / "lines", VOCAB, lengths)
    packed = {
        mode: Variant(
            token_step,
            {
                "folder": lines,
                "overrides": [*MODERN, f"task.sample_break_mode={mode}"],
                "rows": rows,
            },
        )
        for mode in ("documents", "eos")
    }
    done = paired(packed, rounds=rounds, warm_up=3)
    shares = []
    for name in ("documents", "eos"):
        used = done[name].rounds
        shares.append(sum(r["amount"] for r in used) / sum(r["places"] for r in used))
    source = "drawn as of sentences" if given is None else given.name
    note = f"{shape}; lengths {source}, mean {lengths.mean():.1f}; "
    note += f"real tokens {shares[0]:.0%} of packed, {shares[1]:.0%} of padded rows"
    yield speed("packed_tokens", done["documents"], done["eos"], "tokens/s", None, note)
    yield memory("packed_memory", done["documents"], done["eos"], None, shape)
