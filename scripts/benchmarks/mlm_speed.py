"""A masked-LM step of 12 layers, width 256, against transformers' BertForMaskedLM: time, memory, FLOPs."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.utils.flop_counter import FlopCounterMode

# Imported by ours too: peak memory then differs by the models only.
from transformers import BertConfig, BertForMaskedLM

from metaseq_lm.criterions.masked_lm import MaskedLM
from metaseq_lm.data.masking import Masking, mask_tokens
from metaseq_lm.engine import Engine
from metaseq_lm.models.transformer import TransformerConfig, TransformerLM
from metaseq_lm.optim import build_optimizer
from metaseq_lm.randomness import row_keys
from timing import Figure, Step, Variant, memory, paired, speed

VOCAB, LENGTH, LAYERS = 30522, 128, 12
SPECIALS, MASK = 33, 1
LR = 1e-4
ADAMW = {
    "_name": "adamw",
    "lr": LR,
    "betas": [0.9, 0.999],
    "eps": 1e-8,
    "weight_decay": 0.01,
    "decay_norms_and_biases": True,
    "clip_norm": 1.0,
}
CONSTANT = {"_name": "constant", "warmup_updates": 0}


def masked_rows(rows: int, vocab: int, length: int = LENGTH) -> dict[str, Any]:
    """Return random rows with 15 % of the tokens masked, as the batch of one micro-step."""
    tokens = np.random.default_rng(1).integers(SPECIALS, vocab, (rows, length))
    how = Masking(mask=MASK, replacements=np.arange(SPECIALS, vocab))
    numbers = np.arange(rows)
    masked, positions, targets = mask_tokens(
        tokens, np.full(rows, length), row_keys(1, numbers), how
    )
    return {
        "original": torch.from_numpy(tokens),
        "tokens": torch.from_numpy(masked),
        "padding": None,
        "positions": torch.from_numpy(positions),
        "targets": torch.from_numpy(targets),
        "rows": numbers,
        "sizes": {"targets": int((targets >= 0).sum()), "rows": rows},
    }


def labels_of(batch: dict[str, Any]) -> Tensor:
    """Return the targets as transformers wants them: one per position, -100 for none."""
    labels = torch.full_like(batch["tokens"], -100)
    row, column = torch.nonzero(batch["targets"] >= 0, as_tuple=True)
    labels[row, batch["positions"][row, column]] = batch["targets"][row, column]
    return labels


def our_step(rows: int, vocab: int = VOCAB, layers: int = LAYERS) -> Step:
    """Train our encoder with the engine and the masked_lm criterion."""
    torch.manual_seed(1)
    sizes = TransformerConfig(
        encoder_layers=layers, encoder_normalize_before=False, max_positions=LENGTH
    )
    model = TransformerLM(sizes, vocab).train()
    engine = Engine({"main": build_optimizer(model.named_parameters(), ADAMW, CONSTANT)})
    criterion, batch = MaskedLM(), masked_rows(rows, vocab)
    parameters = engine.parameters("main")
    update = 0
    flops = 0.0

    def train() -> float:
        nonlocal update
        engine.begin(update)
        update += 1
        grads, logs = engine.gradients(lambda b: criterion(model, b), [batch], parameters)
        engine.step("main", grads)
        return float(logs["loss"])

    def step() -> dict[str, Any]:
        nonlocal flops
        if flops:
            return {"amount": 1, "flops": flops, "loss": train()}
        with FlopCounterMode(display=False) as counter:  # in the warm-up
            loss = train()
        flops = float(counter.get_total_flops())
        return {"amount": 1, "loss": loss}

    return step


def bert_step(rows: int, vocab: int = VOCAB, layers: int = LAYERS) -> Step:
    """Train transformers' model of the same size the usual way."""
    torch.manual_seed(1)
    sizes = BertConfig(
        vocab_size=vocab,
        hidden_size=256,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=1024,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
    )
    model = BertForMaskedLM(sizes).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01)
    batch = masked_rows(rows, vocab)
    tokens, labels = batch["tokens"], labels_of(batch)

    def step() -> dict[str, Any]:
        loss = model(input_ids=tokens, labels=labels).loss
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return {"amount": 1, "loss": loss.item()}

    return step


def matmul(size: int = 2048) -> Step:
    """Multiply square matrices: the rate that the machine can give."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    out = torch.empty(size, size)

    def step() -> dict[str, Any]:
        for _ in range(5):
            torch.mm(a, b, out=out)
        return {"amount": 5 * 2 * size**3}

    return step


def figures(folder: Path, given: Optional[Path], quick: bool) -> Iterator[Figure]:
    """Yield step time, peak memory and FLOP rate."""
    rows = 8 if quick else 32
    variants = {
        "ours": Variant(our_step, {"rows": rows}),
        "bert": Variant(bert_step, {"rows": rows}),
        "matmul": Variant(matmul),
    }
    done = paired(variants, rounds=3)
    ours, bert, peak = done["ours"], done["bert"], done["matmul"]
    shape = f"12 layers, width 256, {rows} rows of {LENGTH}, vocabulary {VOCAB}, dropout 0.1"
    first, last = (f"{d.rounds[-1]['loss']:.2f}" for d in (ours, bert))
    note = f"{shape}; loss after 4 steps on one batch: {first} and {last}"
    yield speed("mlm_step", ours, bert, "steps/s", 2.0, note)
    yield memory("mlm_memory", ours, bert, 0.65, f"{shape}; of the whole process")
    rates = [r["flops"] / r["cpu"] / 1e9 for r in ours.rounds]
    limits = [r / 1e9 for r in peak.rates()]
    shares = [a / b for a, b in zip(rates, limits)]
    yield Figure(
        "mlm_flop_rate",
        statistics.median(rates),
        statistics.median(limits),
        statistics.median(shares),
        "GFLOP/s",
        len(shares),
        (min(shares), max(shares)),
        None,
        note=f"{shape}; reference: a matrix product of size 2048",
    )


