"""The cost of updates of the meta-learning methods in updates of plain masked LM, at NLP size.

There is one model (6 layers, width 256) and batches of B rows of one length. Every update takes the
batches of its method: MT-TARTAN three (two auxiliaries, the end task), META-TARTAN one more and up
to 10 steps of a meta head on a quarter of the rows, meta-learned pre-training k + 1, hard and soft
labels the batches of one micro-step.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from timing import Figure, Variant, cost, paired
from training import made_up_set, updates

from metaseq_lm.data.storage.indexed import IndexedWriter
from metaseq_lm.data.tokenizers.vocabulary import Vocabulary, special_symbols

VOCAB, LENGTH, LAYERS = 30000, 128, 6
LINES, SENTENCES = 400, 20
PLAIN = "mlm"
SIZES = [f"model.encoder_layers={LAYERS}", f"model.max_positions={LENGTH}", "schedule=constant"]
SIZES += [f"task.tokens_per_sample={LENGTH}", "optimizer.lr=1e-4", "model.attention_dropout=0.1"]
TARTAN = ["task=tartan", "task.labelled=topic", "task.auxiliary=[train,tapt]"]
MLM = "criterion=masked_lm"
INNER = ["task=meta_pretrain", MLM, "model.segments=2"]
EXACT = ["task.inner_optim=sgd", "task.inner_lr=0.1", "task.second_order=exact"]
SOFT = "criterion=meta_pseudo_label_soft"
LABELS = ["task=meta_pseudo_label", "task.labelled=[topic]", "task.batches_per_update=1"]
KINDS = {
    PLAIN: ["task=masked_lm", MLM, "task.sample_break_mode=eos"],
    "tartan_mt": [*TARTAN, "criterion=tartan_mt"],
    "tartan_meta": [*TARTAN, "criterion=tartan_meta"],
    "tartan_meta_same_head": [*TARTAN, "criterion=tartan_meta", "criterion.same_head=true"],
    "meta_pretrain_1": [*INNER, "task.inner_steps=1"],
    "meta_pretrain_3": [*INNER, "task.inner_steps=3"],
    "meta_pretrain_5": [*INNER, "task.inner_steps=5"],
    "meta_pretrain_1_exact": [*INNER, *EXACT],
    "hard": [*LABELS, "criterion=meta_pseudo_label_hard"],
    "soft": [*LABELS, SOFT],
    "soft_difference": [*LABELS, SOFT, "criterion.hypergradient=finite_difference"],
}


def made_up_data(folder: Path, vocab: int = VOCAB) -> dict[str, Path]:
    """Write random tokens as lines with a labelled set, and as documents of sentences.

    Returns the data folder of each kind of update.
    """
    specials = special_symbols()
    draw = np.random.default_rng(1)
    for name, size in (("lines", LENGTH - 2), ("documents", LENGTH // 5)):
        data, cut = folder / name, name == "documents"
        data.mkdir(parents=True)
        words = [f"w{i}" for i in range(vocab - len(specials))]
        Vocabulary([*specials, *words]).save(data / "dict.txt")
        with IndexedWriter(data / "train", "<u2", documents=cut) as writer:
            for _ in range(LINES):
                for _ in range(SENTENCES if cut else 1):
                    writer.add(draw.integers(len(specials), vocab, size, dtype="<u2"))
                if cut:
                    writer.end_documents([len(writer)])
    made_up_set(folder / "lines" / "topic", vocab, LENGTH - 2, {"train": LINES, "valid": LINES}, 2)
    return {kind: folder / ("documents" if "pretrain" in kind else "lines") for kind in KINDS}


def options_of(kind: str, rows: int) -> list[str]:
    """Return the overrides of an update kind; the meta head has the default share of rows."""
    more = [f"task.meta_head_batch_size={max(rows // 4, 1)}"] if kind == "tartan_meta" else []
    return [*SIZES, *KINDS[kind], *more]


def figures(folder: Path, given: Path | None, quick: bool) -> Iterator[Figure]:
    """Yield seconds of each kind of update; the note has FLOPs and peak memory."""
    rows = 4 if quick else 16
    places = made_up_data(folder / "meta")
    variants = {
        kind: Variant(
            updates, {"data": places[kind], "overrides": options_of(kind, rows), "rows": rows}
        )
        for kind in KINDS
    }
    done = paired(variants, rounds=3 if quick else 7)
    plain = done[PLAIN]
    shape = f"{LAYERS} layers, width 256, {rows} rows of {LENGTH}, vocabulary {VOCAB}, dropout 0.1"
    for kind, ours in done.items():
        if kind == PLAIN:
            continue
        work = [measured.rounds[-1]["flops"] for measured in (ours, plain)]
        note = (
            f"{shape}; {work[0]:.3g} FLOPs against {work[1]:.3g}, {work[0] / work[1]:.2f} times; "
        )
        note += f"peak {ours.peak / 1e6:.0f} MB against {plain.peak / 1e6:.0f}"
        yield cost(f"{kind}_update", ours, plain, "s/update", None, note)
